"""Exports the model of a run: uint8 images [B, C, H, W] in, logits [B, classes] out, with the normalisation inside.

    vitmnist export outputs/runs/DATE/TIME-… --format onnx
    vitmnist export outputs/runs/DATE/TIME-… --format torch --output digits.pt2

Nothing is written unless the exported model predicts the same classes as the original on the split that the run was
evaluated on. A model card is written next to it. An existing file is not overwritten.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from vitmnist.cli.command import command
from vitmnist.cli.evaluate import add_run, load_run
from vitmnist.cli.resume import recorded_overrides
from vitmnist.errors import ConfigError, MissingExtraError
from vitmnist.export import FORMATS, export_model
from vitmnist.runtime.files import display_path, write_atomic


def _parse(parser: ArgumentParser) -> Namespace:
    add_run(parser)
    parser.add_argument("overrides", nargs="*", help="changes to the run's configuration, such as data/dataset=kmnist")
    parser.add_argument("--format", choices=[*FORMATS], required=True, help="ONNX, or a torch.export program (.pt2)")
    default = "default: model.onnx or model.pt2 in the run's folder"
    parser.add_argument("--output", type=Path, metavar="FILE", help=default)
    return parser.parse_intermixed_args()


@command(_parse)
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
    exported = export_model(kind, trained, dataset, config.batch_size)
    write_atomic(output, exported.content)
    write_atomic(card, exported.card(output.name, recorded_overrides(options.run)).encode(errors="surrogateescape"))
    print(f"{display_path(output)}\n{display_path(card)}\n{exported.summary}")
