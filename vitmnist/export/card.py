"""The model card: what an exported model is, how it was trained and checked, and how to use it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

import vitmnist
from vitmnist.export.exported import Exported

HEADING = "# Model card: "


def card_path(output: Path) -> Path:
    """The card of an exported file: `model.onnx.md` for `model.onnx`."""
    return output.with_name(f"{output.name}.md")


def is_export(output: Path) -> bool:
    """Whether a file is an unchanged export, as its card says."""
    card = card_path(output)
    if not card.is_file() or not card.read_bytes().startswith(HEADING.encode()):
        return False
    return not output.exists() or (output.is_file() and _sha256(output) in card.read_text())


def model_card(exported: Exported, file_name: str, overrides: Sequence[str]) -> str:
    """The card of an exported model in Markdown, of about 40 lines.

    Args:
        overrides: of the run, which are the recipe.
    """
    trained, dataset = exported.trained, exported.dataset
    channels, height, width = trained.shape
    scale = "JPEG decoded at the smallest of the scales 1/8, 1/4, 1/2 and 1 that is at least twice the size, "
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (trained.mean, trained.std))
    return f"""{HEADING}{file_name}

An image classifier, trained with vitmnist {vitmnist.__version__}, exported as {exported.kind.title} with torch \
{torch.__version__}.

| | |
|---|---|
| input | `images`, uint8 `[B, {channels}, {height}, {width}]`, any B, values 0 to 255 |
| image files | {scale * trained.draft}upright, transparent pixels on white, \
converted to {"grey" if channels == 1 else "RGB"}, resized to {width}×{height} by a bilinear filter with \
antialiasing, as `predict` does |
| normalisation | in the model: mean {mean}, standard deviation {std} |
| output | `logits`, float32 `[B, {len(trained.classes)}]` |
| accuracy | {exported.accuracy:.2f}% on {dataset.name}, {dataset.evaluated_on()}; with this file, on a CPU |
| check | the same prediction as the original for each of these images; largest difference of the logits \
{exported.largest_difference:.2g} |
| SHA-256 of the file | `{hashlib.sha256(exported.content).hexdigest()}` |
| SHA-256 of the run's {trained.path.name} | `{_sha256(trained.path)}` |
| SHA-256 of the images of the check | `{dataset.sha256["test_images"]}` |

## Use

```python
{exported.kind.usage.format(name=json.dumps(file_name), shape=(1, *trained.shape))}
```

## Classes

```json
{json.dumps(trained.classes, ensure_ascii=False)}
```

## Recipe

```bash
{shlex.join(["python", "train.py", *overrides])}
```
"""


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
