"""The file formats of an exported model: how each is written, loaded and used."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitmnist.errors import MissingExtraError


@dataclass(frozen=True)
class Format:
    """A file format.

    Args:
        title: its name in prose.
        suffix: what the name of a file ends in.
        packages: those of the extra `export` that it needs.
        usage: Python code that loads the file `{name}` and classifies a batch of the shape `{shape}`.
        serialize: the content of the file.
        load: a function from uint8 `[B, C, H, W]` to logits, from the content of the file; raises if it is invalid.
    """

    title: str
    suffix: str
    packages: tuple[str, ...]
    usage: str
    serialize: Callable[[ExportedProgram], bytes]
    load: Callable[[bytes], Callable[[Tensor], Tensor]]

    def check_installed(self) -> None:
        """Raise `MissingExtraError` if a package is missing."""
        for package in self.packages:
            try:
                import_module(package)
            except ImportError as error:
                raise MissingExtraError(package, "export") from error


def _to_onnx(program: ExportedProgram) -> bytes:
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": ({0: "batch"},)}
    exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    return bytes(exported.model_proto.SerializeToString())


def _load_onnx(content: bytes) -> Callable[[Tensor], Tensor]:
    import onnx
    import onnxruntime

    onnx.checker.check_model(content, full_check=True)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _to_pt2(program: ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _load_pt2(content: bytes) -> Callable[[Tensor], Tensor]:
    return torch.export.load(io.BytesIO(content)).module()


ONNX_USAGE = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession({name})
images = np.zeros({shape}, dtype=np.uint8)  # your images
print(session.run(None, {{"images": images}})[0].argmax(axis=1))"""
TORCH_USAGE = """\
import torch

model = torch.export.load({name}).module()
images = torch.zeros({shape}, dtype=torch.uint8)  # your images
print(model(images).argmax(dim=1))"""
FORMATS = {
    "onnx": Format("ONNX", ".onnx", ("onnx", "onnxscript", "onnxruntime"), ONNX_USAGE, _to_onnx, _load_onnx),
    "torch": Format("torch.export", ".pt2", (), TORCH_USAGE, _to_pt2, _load_pt2),
}
