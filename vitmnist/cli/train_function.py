"""`vitmnist.train`: trains a run from Python."""

import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from numbers import Real
from pathlib import Path
from traceback import walk_stack

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from vitmnist.cli.arguments import parse_arguments, quote
from vitmnist.cli.messages import classify_cli_error
from vitmnist.cli.preserved_process import configure_run_log, preserved_process
from vitmnist.cli.process import ProcessState
from vitmnist.cli.train import compose_with_hydra, configure_run, train_run
from vitmnist.config import is_group
from vitmnist.config.schema import schema_fields
from vitmnist.errors import ConfigError, RunInterrupted, TimeLimitReached, TrainingError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.runtime.signals import StopReason, create_interruption
from vitmnist.runtime.world import is_distributed
from vitmnist.tracking.result import Result
from vitmnist.trainer import Trainer

RUN_LOCK = threading.Lock()
"""Held by the run that trains in this process. Two runs would draw from the same random generators."""
VALUE_KEYS = {
    key
    for key, option in schema_fields()
    if not is_dataclass(option.default_factory) and not is_group(key.replace(".", "/"))
}
"""Keys that are no sections. A dict as the value of such a key, for example `lr_scale`, is set as a whole."""


def train(*overrides: str, folder: str | Path | None = None, **keys: object) -> Result:
    """Train a run as `python train.py` does, with the same keys, folders and records.

        result = vitmnist.train("data/loader=gpu_slice", epochs=3, data={"holdout": 0.1})

    Random states, the flags of torch, logging, signal handlers, environment variables and the state of Hydra are
    restored at the end. In the main thread, a signal stops the run after its step, and the run is saved. In another
    thread, signals do not stop it.

    Args:
        overrides: arguments as typed after `train.py`: `KEY=VALUE` and `--config-dir=FOLDER`.
        folder: the folder of the run; by default a new folder in `outputs/runs`.
        keys: values by key: numbers, text, paths, None, lists and dicts. A nested dict sets the keys of a section.
            Other keys and groups are unpacked: `**{"data.loader.num_workers": 4, "data/augment": "shift"}`.

    Returns:
        The record of the run. With `resume`, a completed run is not trained again.

    Raises:
        ConfigError, DataError, TrainingError: as on the command line, with the same message.
        KeyboardInterrupt: Ctrl-C stopped the run. The message has its folder, and the call that resumes it.
        TimeoutError: the run reached `max_minutes`. The message also says how to resume it.
        RunInterrupted: another signal, such as SIGTERM, stopped the run. `except Exception` does not catch it.
    """
    if not RUN_LOCK.acquire(blocking=False):
        raise ConfigError("vitmnist.train: another thread of this process trains; wait for it, or start a process")
    try:
        with preserved_process():
            argv = [*overrides, *to_overrides(keys)]
            if folder is not None:
                argv.append(f"hydra.run.dir={quote(str(Path(folder).expanduser()))}")
            _check_call(argv)
            return _train(ProcessState(argv))
    finally:
        RUN_LOCK.release()


def _check_call(argv: list[str]) -> None:
    """Refuse options of the command line, and calls in processes that must not train a run."""
    for text in argv:
        if not isinstance(text, str):
            raise ConfigError(f"{text!r}: must be text, such as 'epochs=3'; keys can also be keywords, as in epochs=3")
        if text.startswith("-") and text.partition("=")[0] not in ("--config-dir", "-cd"):
            raise ConfigError(f"{text}: is for the command line; here, type KEY=VALUE or --config-dir=FOLDER")
    if is_distributed():
        raise ConfigError("vitmnist.train: trains in one process; for several, start train.py with torchrun")
    # A spawned worker process imports the main script under this name.
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            raise ConfigError(
                "vitmnist.train: worker processes import this script; call it below if __name__ == '__main__':"
            )


def _train(process: ProcessState) -> Result:
    """Train a run. An exception gets the message of the command line."""
    try:
        with process.resources:
            arguments = parse_arguments(process.argv)
            for override in OverridesParser.create().parse_overrides(arguments.overrides):
                if override.is_sweep_override():
                    raise ConfigError(f"{override.input_line}: is a sweep; call vitmnist.train for each value")
            composed = compose_with_hydra(process, arguments)
            if composed.hydra.mode == RunMode.MULTIRUN:
                raise ConfigError("hydra.mode=MULTIRUN: is a sweep; type vitmnist train -m")
            run = configure_run(process, composed, arguments)
            if run is None:  # The run is complete.
                return Result.from_json(Path(composed.hydra.run.dir).absolute() / "result.json")
            configure_run_log(composed.hydra)
            result = train_run(Trainer, process, run)
            if process.stop.reason:  # The signal arrived too late to stop the run.
                raise create_interruption(process.stop.reason)
            return result
    except (Exception, KeyboardInterrupt, RunInterrupted) as error:
        reported = _describe_error(error, process)
        if reported is error:
            raise
        raise reported from error


def _describe_error(error: BaseException, process: ProcessState) -> BaseException:
    """Return the exception to raise. After an interruption, its message says how to resume."""
    failure = classify_cli_error(error)
    if failure.status != "interrupted":
        if not failure.is_user_error or str(error) == failure.message:
            return error
        is_refused = process.folder is None or isinstance(error, ConfigError)
        return (ConfigError if is_refused else TrainingError)(failure.message)
    text = failure.message
    if process.folder:
        path = display_path(process.folder)
        text += f"; results: {path}"
        if has_checkpoint(process.folder):
            text += f", resume with vitmnist.train(resume={path!r})"
    if isinstance(error, TimeLimitReached):
        return TimeoutError(text)
    is_ctrl_c = isinstance(error, KeyboardInterrupt) or process.stop.reason is StopReason.SIGINT
    return KeyboardInterrupt(text) if is_ctrl_c else RunInterrupted(text)


def to_overrides(keys: Mapping[str, object], section: str = "") -> Iterator[str]:
    """Convert keywords to overrides: `data={"holdout": 0.1}` becomes `data.holdout=0.1`."""
    for name, value in keys.items():
        key = f"{section}{name}"
        group = key.replace(".", "/")
        if isinstance(value, Mapping) and key not in VALUE_KEYS:
            yield from to_overrides(value, f"{key}.")
        elif key == "resume":
            yield f"resume={'null' if value is None else value}"  # `parse_arguments` quotes it.
        elif not is_group(group):
            yield f"{key}={_format_value(key, value)}"
        elif isinstance(value, str):
            yield f"{group}={_format_value(group, value)}"
        else:
            raise ConfigError(f"{group}={value!r}: must be a member's name; for several, call vitmnist.train for each")


def _format_value(key: str, value: object) -> str:
    """Format a value in Hydra's grammar; raises `ConfigError` for values of other types."""
    if value is None:
        return "null"
    if isinstance(value, Real):
        return str(value).lower()  # A bool is a number, too.
    if isinstance(value, str | Path | torch.device):
        text = quote(str(value))
        # Text such as `null` or `1e3` needs quotes.
        is_text = text.startswith("'") or isinstance(OverridesParser.create().parse_override(f"_={text}").value(), str)
        return text if is_text else f"'{text}'"
    if isinstance(value, list | tuple):
        return f"[{','.join(_format_value(key, item) for item in value)}]"
    if isinstance(value, Mapping):
        # In a key, the grammar has no quotes.
        names = [re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", str(name)) for name in value]
        items = [_format_value(key, item) for item in value.values()]
        return f"{{{','.join(map(':'.join, zip(names, items, strict=True)))}}}"
    raise ConfigError(f"{key}={value!r}: must be a number, text, a path, None, a list or a dict")
