"""Exports the model of a run: uint8 images [B, C, H, W] in, logits [B, classes] out, with the normalisation inside.

    vitmnist export outputs/runs/DATE/TIME-… --format onnx
    vitmnist export outputs/runs/DATE/TIME-… --format torch --output digits.pt2

The exported model must predict the same classes as the original for all images of the evaluated split; otherwise
nothing is written. A description of the model is written next to it, as JSON. An existing file is not overwritten.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vitmnist.cli.command import add_run_arguments, create_parser, errors_as_messages
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.images import ImageReader
from vitmnist.errors import ConfigError, MissingExtraError, UserError
from vitmnist.inference.evaluation import load_evaluation_config, load_evaluation_dataset
from vitmnist.inference.trained_model import TrainedModel, load_model
from vitmnist.runtime.files import display_path, write_atomic


@dataclass(frozen=True)
class Format:
    """A file format."""

    suffix: str
    packages: tuple[str, ...]  # Required packages of the extra `export`
    serialize: Callable[[ExportedProgram], bytes]
    load: Callable[[bytes], Callable[[Tensor], Tensor]]  # Returns a function from uint8 images to logits.


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


FORMATS = {
    "onnx": Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), _to_onnx, _load_onnx),
    "torch": Format(".pt2", (), _to_pt2, lambda content: torch.export.load(io.BytesIO(content)).module()),
}


def describe_model(trained: TrainedModel) -> str:
    """Describe the exported model, as JSON, for programs that use it."""
    reader = trained.reader
    description = {
        "images": {"dtype": "uint8", "shape": [None, *trained.image_shape], "range": [0, 255]},
        "logits": {"dtype": "float32", "shape": [None, len(trained.classes)]},
        "classes": trained.classes,
        "read_by": vars(reader) if isinstance(reader, ImageReader) else f"the dataset {trained.dataset.get('name')}",
    }
    return json.dumps(description, ensure_ascii=False, indent=2) + "\n"


def export_model(file_format: Format, trained: TrainedModel, dataset: Dataset, batch_size: int) -> tuple[bytes, str]:
    """Export a model with its normalisation, and compare the predictions of the exported and the original model.

    Returns:
        The content of the file, and a summary of the comparison.

    Raises:
        ConfigError: the images or classes of the dataset do not fit the model.
        UserError: the exported model predicts another class for an image.
    """
    split = trained.adapt_split(dataset.eval_split)
    original = nn.Sequential(trained.preprocess, trained.module).eval()
    # Use two images, because torch.export treats a batch size of one as a constant.
    example = torch.zeros(2, *trained.image_shape, dtype=torch.uint8)
    program = torch.export.export(original, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = file_format.serialize(program)
    # Check the content of the file, not the program in memory.
    reloaded = file_format.load(content)
    with torch.inference_mode():
        pairs = [(original(images), reloaded(images)) for images in split.images.split(batch_size)]
    expected, actual = (torch.cat(logits) for logits in zip(*pairs, strict=True))
    predicted = actual.argmax(dim=1)
    checked_on = f"{dataset.name}, {dataset.eval_split_name} split, {len(dataset.eval_split):,} images"
    if differing := int((predicted != expected.argmax(dim=1)).sum()):
        raise UserError(
            f"the exported model and {trained.weights} predict different classes for {differing:,} images of "
            f"{checked_on}; nothing is written"
        )
    accuracy = 100 * int((predicted == split.labels).sum()) / len(split)
    return content, (
        f"{checked_on}: accuracy {accuracy:.2f}%; same predictions as {trained.weights.name}, largest difference of "
        f"the logits {(actual - expected).abs().max().item():.2g}"
    )


@errors_as_messages()
def main() -> None:
    parser = create_parser("export", __doc__)
    add_run_arguments(parser, overrides=True)
    parser.add_argument("--format", choices=[*FORMATS], required=True, help="ONNX, or a torch.export program (.pt2)")
    help_text = "file of the exported model (default: model.onnx or model.pt2 in the run's folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_text)
    options = parser.parse_intermixed_args()
    file_format = FORMATS[options.format]
    for package in file_format.packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, "export")
    output = options.output or options.run / f"model{file_format.suffix}"
    description = output.with_name(f"{output.name}.json")
    for file in (output, description):
        if file.exists():
            raise ConfigError(f"{file}: exists already; remove it, or set another --output")
    trained = load_model(options.run, options.weights, "cpu")
    config = load_evaluation_config(options.run, options.overrides)
    dataset = load_evaluation_dataset(options.run, config)
    content, summary = export_model(file_format, trained, dataset, config.batch_size)
    write_atomic(output, content)
    write_atomic(description, describe_model(trained).encode(errors="surrogateescape"))
    print(f"{display_path(output)}\n{display_path(description)}\n{summary}")
