"""The model card: what an exported model is, how it was trained and checked, and how to use it."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import vitmnist
from vitmnist.cli.resume import recorded_config, recorded_overrides
from vitmnist.config.labels import to_plain_dict
from vitmnist.data.tensors import digest
from vitmnist.export.exported import Exported
from vitmnist.tracking.result import choices_of
from vitmnist.tracking.runs import read_run

HEADING = "# Model card: "


def card_path(output: Path) -> Path:
    """The card of an exported file: `model.onnx.md` for `model.onnx`."""
    return output.with_name(f"{output.name}.md")


def is_export(output: Path) -> bool:
    """Whether a file is an unchanged export, as its card says."""
    card = card_path(output)
    if not card.is_file() or not card.read_bytes().startswith(HEADING.encode()):
        return False
    return not output.exists() or (output.is_file() and _sha256(output.read_bytes()) in card.read_text())


def model_card(exported: Exported, file_name: str, folder: Path) -> str:
    """The card of an exported model in Markdown.

    Args:
        folder: of the run, whose records have the recipe and the checksums of the training data.
    """
    choices = choices_of(to_plain_dict(recorded_config(folder, [])))
    overrides = recorded_overrides(folder)
    usage = exported.kind.usage.format(name=json.dumps(file_name), shape=(1, *exported.trained.shape))
    return "\n".join(
        [
            f"{HEADING}{file_name}\n",
            f"An image classifier (`{choices['model']}`), trained with vitmnist, exported as {exported.kind.title}.\n",
            "| | |\n|---|---|",
            *(f"| {name} | {value} |" for name, value in _facts(exported, folder).items()),
            _section("Use", "python", usage.rstrip()),
            _section("Classes", "json", json.dumps(exported.trained.classes, ensure_ascii=False)),
            _section("Recipe", "bash", shlex.join(["python", "train.py", *overrides])),
            _section("Choices", "json", _as_json(choices)),
            _section("Data", "json", _as_json(_data(exported, folder))),
            "",
        ]
    )


def _facts(exported: Exported, folder: Path) -> dict[str, str]:
    run = read_run(folder)
    trained, dataset = exported.trained, exported.dataset
    versions = {"vitmnist": vitmnist.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {package: version(package) for package in exported.kind.packages}
    return {
        "input": f"`images`, uint8 `[B, {', '.join(map(str, trained.shape))}]`, any B, values 0 to 255",
        "normalisation": f"in the model: mean {_numbers(trained.mean)}, standard deviation {_numbers(trained.std)}",
        "output": f"`logits`, float32 `[B, {len(trained.classes)}]`",
        "accuracy": f"{exported.accuracy:.2f}% on {dataset.name}, {dataset.evaluated_on()}; with this file, on a CPU",
        "check": "the same prediction as the original for each of these images; "
        f"largest difference of the logits {exported.largest_difference:.2g}",
        "training": f"{run.status}, {len(run.epochs)} epochs" if run.epochs else "not recorded",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "SHA-256 of the file": f"`{_sha256(exported.content)}`",
        f"SHA-256 of the run's {trained.path.name}": f"`{_sha256(trained.path.read_bytes())}`",
    }


def _data(exported: Exported, folder: Path) -> dict[str, Any]:
    """The data set of the training, as its record has it, and that of the check."""
    dataset, test = exported.dataset, exported.dataset.test
    return {
        "trained_on": dict(read_run(folder).section("dataset")) or "not recorded",
        "measured_on": {
            "name": dataset.name,
            "split": dataset.eval_split,
            "images": len(test),
            "sha256": {"images": test.sha256 or digest(test.images), "labels": digest(test.labels)},
        },
    }


def _section(heading: str, language: str, block: str) -> str:
    return f"\n## {heading}\n\n```{language}\n{block}\n```"


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
