"""Exports the model of a run: uint8 images [B, C, H, W] in, logits [B, classes] out, with the normalisation inside.

    vitmnist export outputs/runs/DATE/TIME-… --format onnx
    vitmnist export outputs/runs/DATE/TIME-… --format torch --output digits.pt2

Nothing is written unless the exported model predicts the same classes as the original on the split that the run was
evaluated on. A model card is written next to it. An existing file is not overwritten.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import vitmnist
from vitmnist.checkpoint.inference import InferenceModel
from vitmnist.cli.command import command
from vitmnist.cli.evaluate import add_run, load_run
from vitmnist.cli.resume import recorded_overrides
from vitmnist.data import images
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.images import ImageReader
from vitmnist.errors import ConfigError, ExportError, MissingExtraError
from vitmnist.runtime.files import display_path, write_atomic


@dataclass(frozen=True)
class Format:
    """A file format.

    Args:
        packages: those of the extra `export` that it needs.
        usage: Python code that loads the file `{name}` and classifies `images`, a NumPy array.
        load: turns the content of the file into a function from uint8 `[B, C, H, W]` to logits.
    """

    suffix: str
    packages: tuple[str, ...]
    usage: str
    serialize: Callable[[ExportedProgram], bytes]
    load: Callable[[bytes], Callable[[Tensor], Tensor]]


def _to_onnx(program: ExportedProgram) -> bytes:
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": ({0: "batch"},)}
    exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    return bytes(exported.model_proto.SerializeToString())


def _load_onnx(content: bytes) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _to_pt2(program: ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _load_pt2(content: bytes) -> Callable[[Tensor], Tensor]:
    return torch.export.load(io.BytesIO(content)).module()


FILE_USAGE = """\
from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image


{source}

opened = Image.open("picture.jpg")  # your picture
images = to_pixels(opened, {arguments}).transpose(2, 0, 1)[np.newaxis]"""
IMAGES_USAGE = """\
import numpy as np

images = np.zeros({shape}, dtype=np.uint8)  # your images, as the dataset {dataset} reads them"""
ONNX_USAGE = """\
import onnxruntime

session = onnxruntime.InferenceSession({name})
print(session.run(None, {{"images": images}})[0].argmax(axis=1))  # their classes, from 0"""
TORCH_USAGE = """\
import torch

model = torch.export.load({name}).module()
print(model(torch.from_numpy(images)).argmax(dim=1))  # their classes, from 0"""
FORMATS = {
    "onnx": Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), ONNX_USAGE, _to_onnx, _load_onnx),
    "torch": Format(".pt2", (), TORCH_USAGE, _to_pt2, _load_pt2),
}


def model_card(
    name: str, kind: Format, trained: InferenceModel, content: bytes, summary: str, overrides: Sequence[str]
) -> str:
    """The model card in Markdown.

    Args:
        name: the name of the exported file.
        content: the bytes of that file.
        summary: the accuracy of the exported model, and how far its logits are from those of the original.
        overrides: the command line of the training.
    """
    channels, height, width = trained.shape
    crop = "" if trained.size == (height, width) else ", and takes the centre of each image"
    return f"""# Model card: {name}

An image classifier, trained with vitmnist {vitmnist.__version__}, exported with torch {torch.__version__}.

- **Input**: `images`, uint8 `[B, {channels}, {height}, {width}]`, any B. The model normalises them{crop}.
- **Output**: `logits`, float32 `[B, {len(trained.classes)}]`
- **Check**: {summary}
- **Classes**: `{json.dumps(trained.classes, ensure_ascii=False)}`
- **Overrides of the training**: `{shlex.join(overrides)}`
- **SHA-256**: `{hashlib.sha256(content).hexdigest()}`

```python
{_reading_code(trained)}
{kind.usage.format(name=json.dumps(name))}
```
"""


def _reading_code(trained: InferenceModel) -> str:
    """Python code that turns a picture file into `images` as the model takes them, without this package."""
    try:
        reader = trained.reader()
    except ConfigError:  # such images are not pictures
        reader = None
    if not isinstance(reader, ImageReader):
        return IMAGES_USAGE.format(shape=(1, *trained.shape), dataset=trained.dataset.get("name"))
    options = {**vars(reader), "mode": reader.mode.value, "resize": reader.resize.value}
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    source = inspect.getsource(images)
    return FILE_USAGE.format(source=source[source.index("def to_pixels(") :], arguments=arguments)


def export_model(kind: Format, trained: InferenceModel, dataset: Dataset, batch_size: int) -> tuple[bytes, str]:
    """Export a model that is on the CPU, with its normalisation, and compare both on the split of the evaluations.

    Returns:
        The content of the file, and a line about the comparison.

    Raises:
        ConfigError: the images or classes of the dataset do not fit the model.
        ExportError: the exported model predicts another class for some image.
    """
    split = trained.normalized(dataset.evaluated)
    original = nn.Sequential(trained.preprocess(), trained.model).eval()
    # Two images: torch.export would treat a batch size of one as a constant.
    example = torch.zeros(2, *trained.shape, dtype=torch.uint8)
    program = torch.export.export(original, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = kind.serialize(program)
    reloaded = kind.load(content)  # compare what the file holds, not the program in memory
    with torch.inference_mode():
        pairs = [(original(images), reloaded(images)) for images in split.images.split(batch_size)]
    expected, actual = (torch.cat(logits) for logits in zip(*pairs, strict=True))
    predicted, checked_on = actual.argmax(dim=1), f"{dataset.name}, {dataset.evaluated_on()}"
    if differing := int((predicted != expected.argmax(dim=1)).sum()):
        raise ExportError(
            f"the exported model predicts another class than {trained.path} for {differing:,} images of {checked_on}; "
            "nothing is written"
        )
    accuracy = 100 * int((predicted == split.labels).sum()) / len(split)
    return content, (
        f"{checked_on}: accuracy {accuracy:.2f}%; same predictions as {trained.path.name}, largest difference of the "
        f"logits {(actual - expected).abs().max().item():.2g}"
    )


def _parse(parser: ArgumentParser) -> Namespace:
    add_run(parser)
    parser.add_argument("overrides", nargs="*", help="changes to the run's configuration, such as data/dataset=kmnist")
    parser.add_argument("--format", choices=[*FORMATS], required=True, help="ONNX, or a torch.export program (.pt2)")
    default = "default: model.onnx or model.pt2 in the run's folder"
    parser.add_argument("--output", type=Path, metavar="FILE", help=default)
    return parser.parse_intermixed_args()


@command("export", _parse)
def main(options: Namespace) -> None:
    kind = FORMATS[options.format]
    for package in kind.packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, "export")
    output = options.output or options.run / f"model{kind.suffix}"
    card = output.with_name(f"{output.name}.md")
    for file in (output, card):
        if file.exists():
            raise ConfigError(f"{file}: exists; remove it, or choose another --output")
    config, _, trained, dataset = load_run(options.run, [*options.overrides, "device=cpu"], options.weights)
    content, summary = export_model(kind, trained, dataset, config.batch_size)
    text = model_card(output.name, kind, trained, content, summary, recorded_overrides(options.run))
    write_atomic(output, content)
    write_atomic(card, text.encode(errors="surrogateescape"))
    print(f"{display_path(output)}\n{display_path(card)}\n{summary}")
