"""Exports the model of a run: uint8 images [B, C, H, W] in, logits [B, classes] out, with the normalisation inside.

    vitmnist export outputs/runs/DATE/TIME-… --format onnx
    vitmnist export outputs/runs/DATE/TIME-… --format torch --output digits.pt2

Nothing is written unless the exported model predicts the same classes as the original on the split that the run was
evaluated on. A model card is written next to it.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from vitmnist.cli.command import command
from vitmnist.cli.evaluate import add_run, load_run
from vitmnist.cli.resume import recorded_overrides
from vitmnist.errors import ConfigError, DataError
from vitmnist.export.card import card_path, is_export, model_card
from vitmnist.export.exported import Exported, export_model
from vitmnist.export.formats import FORMATS, Format
from vitmnist.runtime.files import display_path, write_atomic


def export(folder: Path, kind: Format, output: Path, overrides: list[str], weights: str | None) -> Exported:
    """Write the model of a run to a file, and its model card next to it.

    Args:
        folder: of the run.
        overrides: changes to the run's configuration, such as another dataset to check the model on.
        weights: final, best or last; None takes the first that exists.

    Raises:
        ExportError: the exported model predicts another class for some image.
        UserError: the folder, the overrides, the data or the output cannot be used, or a package is missing.
    """
    kind.check_installed()
    config, _, trained, dataset = load_run(folder, [*overrides, "device=cpu"], weights)
    check_output(output, kind)
    exported = export_model(kind, trained, dataset, config.batch_size)
    card = model_card(exported, output.name, recorded_overrides(folder))
    write_atomic(output, exported.content)
    write_atomic(card_path(output), card.encode(errors="surrogateescape"))
    return exported


def check_output(output: Path, kind: Format) -> None:
    """Raise `UserError` if a model cannot be written there, or would replace a file that is no export."""
    card = card_path(output)
    if output.suffix != kind.suffix:
        raise ConfigError(f"--output {output}: the name of a file for {kind.title} must end in {kind.suffix}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {output}: {output.parent} does not exist, or is not writable")
    if (output.exists() or card.exists()) and not is_export(output):
        raise ConfigError(
            f"{output}: not overwritten, because it is not an unchanged export with its card {card.name}; "
            "remove it, or choose another --output"
        )


def _parse(parser: ArgumentParser) -> Namespace:
    add_run(parser)
    parser.add_argument("overrides", nargs="*", help="changes to the run's configuration, such as data/dataset=kmnist")
    parser.add_argument("--format", choices=[*FORMATS], required=True, help="ONNX, or a torch.export program (.pt2)")
    place = "default: model.onnx or model.pt2 in the run's folder"
    parser.add_argument("--output", type=Path, metavar="FILE", help=place)
    return parser.parse_intermixed_args()


@command(_parse)
def main(options: Namespace) -> None:
    kind = FORMATS[options.format]
    output = options.output or options.run / f"model{kind.suffix}"
    exported = export(options.run, kind, output, options.overrides, options.weights)
    print(f"{display_path(output)}\n{display_path(card_path(output))}\n{exported.summary()}")
