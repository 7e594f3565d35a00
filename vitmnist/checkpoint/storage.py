"""Reads and writes checkpoints, and reads the weights for `init`. A complete checkpoint exists at any time.

checkpoints/last.pt            the newest checkpoint
checkpoints/previous.pt        the checkpoint before it
checkpoints/best.pt            with a validation split, the checkpoint of the best epoch
checkpoints/final.safetensors  the weights at the end

A `.pt` file is what `torch.save` writes, followed by its SHA-256. `torch.load` ignores these 32 bytes.
"""

import hashlib
import io
import json
import logging
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch.serialization import safe_globals

from vitmnist.errors import ConfigError, DataError, classify_error, join_names
from vitmnist.runtime.files import rename, write_atomic

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
FORMAT = 12
"""The version of the checkpoint format. Increase it when the meaning of a field changes."""
DIGEST_SIZE = hashlib.sha256().digest_size
WEIGHT_FILES = {"best": "best.pt", "final": "final.safetensors", "last": "last.pt"}
"""The file of each kind of weights."""
STATE_DICT_KEYS = ("step", "ema", "state_dict_ema", "state_dict", "model_state_dict", "model", "net")
"""Keys of the weights in checkpoints of this project, timm, Lightning and others; averaged weights come first."""


class Checkpoint(TypedDict):
    """Everything needed to continue a run bit for bit, and to use its weights: plain values and tensors.

    Read a new key with `get`, because older checkpoints lack it. If there is no suitable default, increase `FORMAT`.
    """

    format: int  # `FORMAT` of the program that wrote the checkpoint
    config: dict[str, Any]  # the configuration, with all keys
    model_info: dict[str, Any]  # `make_model_info()`: how to build the model, and how to read files for it
    dataset_sha256: dict[str, str]  # the checksum of each part of the dataset
    step: dict[str, Any]  # `TrainStep.state_dict()`, with the weights
    epochs: list[dict[str, Any]]  # the records of the completed epochs
    is_best: bool  # whether the last of these epochs, which the run has just completed, is the best
    rng: list[dict[str, Any]]  # `RandomState.to_dict()` of each rank
    threads: int  # `torch.get_num_threads()`, which affects the result on the CPU
    progress: dict[str, Any] | None  # `EpochProgress.state_dict()` of an unfinished epoch; None between epochs


class DamagedError(DataError):
    """The content of a checkpoint is damaged."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `last.pt` in the folder of a run, and `best.pt` if it is the best; the old `last.pt` becomes `previous.pt`.

    Raises `OSError` if the checkpoint cannot be written; the earlier ones are unchanged.
    """
    checkpoints = folder / FOLDER
    last, previous = checkpoints / "last.pt", checkpoints / "previous.pt"
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    content = buffer.getvalue()
    content += hashlib.sha256(content).digest()
    checkpoints.mkdir(exist_ok=True)
    write_atomic(last, content, previous if last.exists() else None)
    if checkpoint.get("is_best"):
        write_atomic(checkpoints / "best.pt", content)


def write_final_weights(folder: Path, weights: Mapping[str, torch.Tensor], model_info: dict[str, Any]) -> None:
    """Write `final.safetensors` in the folder of a run; raises `OSError`."""
    # Copy each weight: safetensors refuses weights that share memory, such as tied weights.
    copies = {name: value.contiguous().cpu().clone() for name, value in weights.items()}
    content = to_safetensors(copies, {"vitmnist": json.dumps(model_info)})
    write_atomic(folder / FOLDER / WEIGHT_FILES["final"], content)


def read_newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the newest undamaged checkpoint, on the CPU; None without one. Raises as `read_checkpoint_file` does.

    The previous checkpoint replaces a damaged one: the next save would otherwise keep the damaged one in its place.
    """
    last, previous = folder / FOLDER / "last.pt", folder / FOLDER / "previous.pt"
    if last.exists():
        try:
            return read_checkpoint_file(last)
        except DamagedError as error:
            if not previous.exists():
                raise DamagedError(f"{error}; remove it to begin the run again") from error
            log.warning("%s; %s is read instead", error, previous.name)
            checkpoint = read_checkpoint_file(previous)
            rename(previous, last)
            return checkpoint
    return read_checkpoint_file(previous) if previous.exists() else None


def read_checkpoint_file(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; unpickling runs no code from it.

    Raises:
        DamagedError: the file is damaged, or not a checkpoint.
        DataError: another version of the program wrote it.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    if hashlib.sha256(memoryview(content)[:-DIGEST_SIZE]).digest() != content[-DIGEST_SIZE:]:
        raise DamagedError(f"{path}: is damaged or not a checkpoint: its checksum does not match")
    with as_damaged_error(path):
        checkpoint: Checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if (version := checkpoint["format"]) != FORMAT:
            raise DataError(
                f"{path}: was written by another version of the program (checkpoint format {version!r:.40}; "
                f"this version has {FORMAT}); start a new run, or resume it with that version"
            )
        return checkpoint


@contextmanager
def as_damaged_error(path: Path) -> Iterator[None]:
    """Raise `DamagedError` for almost any error in the block: unpickling damaged content can raise any type."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError | OSError) or classify_error(error).cause in ("memory", "device"):
            raise
        message = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(message.split()) or type(error).__name__
        # Hide torch's message, which suggests loading the file unsafely.
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in reason:
            reason = "its content is not only plain values and tensors; save the state_dict of the model alone"
        raise DamagedError(
            f"{path}: is damaged, or not of this version of the program or of the model's code: {reason:.1000}"
        ) from error


def find_weights_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of the named weights files that exists; raises `ConfigError` if there is none."""
    for name in names:
        if (path := folder / FOLDER / WEIGHT_FILES[name]).is_file():
            return path
    raise ConfigError(
        f"{folder}: holds no {' or '.join(names)} weights in {FOLDER}/: it is not the folder of a run, or the "
        "run has saved none"
    )


def read_weights_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read `model_info` and the weights from a file of this project; averaged weights take precedence."""
    if path.suffix == ".pt":
        checkpoint = read_checkpoint_file(path)
        if checkpoint["progress"] and checkpoint["step"].get("averages_weights"):
            raise DataError(f"{path}: has no averaged weights within an epoch; resume the run until the epoch ends")
        return checkpoint["model_info"], get_evaluated_weights(checkpoint)
    with safe_open(path, framework="pt") as file:
        info = json.loads((file.metadata() or {})["vitmnist"])
        return info, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # The file is not a dict.


def read_best_weights(run: Path, epoch: int | None) -> dict[str, torch.Tensor]:
    """Read the weights in `best.pt` of a run; raises `DataError` unless they are of the best epoch, counted from 0."""
    path = run / FOLDER / WEIGHT_FILES["best"]
    checkpoint = read_checkpoint_file(path)
    if len(checkpoint["epochs"]) - 1 != epoch:
        raise DataError(f"{path}: has the weights of epoch {len(checkpoint['epochs'])}, which is not the best one")
    return get_evaluated_weights(checkpoint)


def get_evaluated_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the averaged weights if the run has an EMA, else the weights of the model."""
    return dict((checkpoint["step"]["ema"] or checkpoint["step"])["model"])


def read_initial_weights(init: str, key: str = "init") -> dict[str, torch.Tensor]:
    """Read the weights in a file, or the best (without a validation split, the final) weights of a run.

    Raises:
        ConfigError: the file does not exist, or the folder has no weights.
        DataError: the file is damaged.
    """
    path = Path(init).expanduser()
    if is_run := path.is_dir():
        path = find_weights_file(path, ["best", "final"])
    elif path.suffix not in (".safetensors", ".pt", ".pth") or not path.is_file():
        raise ConfigError(f"{key}={init}: there is no such folder of a run, .safetensors, .pt or .pth file")
    with as_damaged_error(path):
        return read_weights_file(path)[1] if is_run else _read_foreign_weights(path)


def _read_foreign_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights in a file of any program; in `.pt` and `.pth` files, they can be under `STATE_DICT_KEYS`."""
    if path.suffix == ".safetensors":
        return load_file(path)
    with safe_globals([Namespace]):  # timm's checkpoints contain its command-line arguments.
        state = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(state, dict) and (keys := [key for key in STATE_DICT_KEYS if isinstance(state.get(key), dict)]):
        log.info("the weights are read from %s of the file", keys[0])
        state = state[keys[0]]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        content = f"its keys are {join_names(map(str, state))}" if isinstance(state, dict) else type(state).__name__
        raise DataError(
            f"{path}: holds no tensors by name, at the top or under {', '.join(STATE_DICT_KEYS)}; {content}"
        )
    return state
