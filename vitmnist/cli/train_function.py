"""`vitmnist.train`: trains a run from Python, and restores the state of the process."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode

from vitmnist.cli.arguments import parse_arguments, quote, to_overrides
from vitmnist.cli.command import TIMED_FORMAT
from vitmnist.cli.messages import classify_cli_error
from vitmnist.cli.process import resume_hint
from vitmnist.cli.start import configure_run, log_results, start_run
from vitmnist.config import CONF
from vitmnist.config.compose import compose_command, initialize_hydra
from vitmnist.config.schema import iterate_registries
from vitmnist.errors import ConfigError, RunInterrupted, TimeLimitReached, TrainingError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.runtime.signals import StopReason, StopSignal, create_interruption
from vitmnist.runtime.world import is_distributed
from vitmnist.tracking.result import Result
from vitmnist.tracking.runs import read_run

RUN_LOCK = threading.Lock()
"""The lock of the run that trains in this process. Two runs would draw from the same random generators."""


def train(*overrides: str, folder: str | Path | None = None, **keys: object) -> Result:
    """Train a run as `python train.py` does, with the same keys, folders and records.

        result = vitmnist.train("data/loader=gpu_slice", epochs=3, data={"holdout": 0.1})

    Random states, torch's deterministic flag, logging, signal handlers and the state of Hydra are restored at the end.
    In the main thread, a signal stops the run after the current step, and the run is saved. In another thread, signals
    do not stop a run.

    Args:
        overrides: arguments of `train.py`: `KEY=VALUE` and `--config-dir=FOLDER`.
        folder: the folder of the run; by default a new folder in `outputs/runs`.
        keys: values by key: numbers, text, paths, None, lists and dicts. A nested dict sets the keys of a section. Keys
            that are not identifiers can be unpacked: `**{"data.loader.num_workers": 4, "data/augment": "shift"}`.

    Returns:
        The record of the run. With `resume`, a completed run is not trained again.

    Raises:
        ConfigError, DataError, TrainingError: as on the command line, with the same message.
        KeyboardInterrupt: Ctrl-C stopped the run. The message has its folder, and the call that resumes it.
        TimeoutError: the run reached `max_minutes`. The message has its folder, and the call that resumes it.
        RunInterrupted: another signal, such as SIGTERM, stopped the run. `except Exception` does not catch it.
    """
    if is_distributed():
        raise ConfigError("vitmnist.train: cannot train with several ranks; start train.py with torchrun")
    if not RUN_LOCK.acquire(blocking=False):
        raise ConfigError("vitmnist.train: another thread of this process trains; wait for it, or use another process")
    try:
        with preserve_process_state(), initialize_hydra():
            argv = [*overrides, *to_overrides(keys)]
            if folder is not None:
                argv.append(f"hydra.run.dir={quote(str(Path(folder).expanduser()))}")
            return _train(argv)
    finally:
        RUN_LOCK.release()


def _train(argv: list[str]) -> Result:
    """Train a run as the command line does, but raise exceptions with the messages that it prints."""
    stop, folder = StopSignal(), None
    try:
        for argument in argv:
            if not isinstance(argument, str):
                raise ConfigError(f"vitmnist.train: {argument!r}: must be a string; unpack a dict: **{{…}}")
            if argument.startswith("-") and not argument.startswith(("--config-dir", "-cd")):
                advice = "pass KEY=VALUE or --config-dir=FOLDER"
                raise ConfigError(f"{argument}: is an option of the command line only; {advice}")
        arguments = parse_arguments(argv)
        store_members()
        values, hydra_values = compose_command(arguments.overrides_to_compose)
        if hydra_values.mode == RunMode.MULTIRUN:
            raise ConfigError("hydra.mode=MULTIRUN: is a sweep; run vitmnist train -m")
        with configure_run(arguments, values, hydra_values) as run, run_log(run.folder):
            folder = run.folder
            if result := start_run(run, stop):
                log_results(folder)
            if stop.reason:  # The signal arrived too late to stop the run.
                raise create_interruption(stop.reason)
            return result or read_run(folder).result
    except (Exception, KeyboardInterrupt, RunInterrupted) as error:
        translated = _translate_error(error, stop, folder)
        if translated is error:
            raise
        raise translated from error


def store_members() -> None:
    """Let Hydra select members without a YAML file, such as a model defined in a notebook, with default options."""
    for _, group in iterate_registries():
        for name in group.members():
            if not (CONF / group.group / f"{name}.yaml").exists():
                ConfigStore.instance().store(name, group.with_defaults({"name": name}), group.group)


def _translate_error(error: BaseException, stop: StopSignal, folder: Path | None) -> BaseException:
    """Return the exception that `train` raises; `folder` is None before the run is configured."""
    failure = classify_cli_error(error)
    if failure.status == "interrupted":
        hint = resume_hint(folder, f"vitmnist.train(resume={display_path(folder)!r})") if folder else ""
        if isinstance(error, TimeLimitReached):
            return TimeoutError(failure.message + hint)
        is_ctrl_c = isinstance(error, KeyboardInterrupt) or stop.reason is StopReason.SIGINT
        return (KeyboardInterrupt if is_ctrl_c else RunInterrupted)(failure.message + hint)
    if failure.is_user_error and str(error) != failure.message:
        is_refused = folder is None or isinstance(error, ConfigError)
        return (ConfigError if is_refused else TrainingError)(failure.message)
    return error


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the state of the process that a run changes: random states, and torch's flags and current device."""
    flags: Any = torch.utils.deterministic
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_filled = flags.fill_uninitialized_memory
    # Before the first use of a GPU, its generator has this seed. Reading its state would allocate memory on the GPU.
    seed, device, states = torch.initial_seed(), 0, []
    if torch.cuda.is_initialized():
        device, states = torch.cuda.current_device(), torch.cuda.get_rng_state_all()
    try:
        with preserve_random_state():
            yield
    finally:
        flags.fill_uninitialized_memory = is_filled
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)
        torch.cuda.manual_seed_all(seed)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(device)
            torch.cuda.set_rng_state_all(states)


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """In the block, log to stdout and `vitmnist.log` as the command line does, but not to handlers of the caller."""
    logger = logging.getLogger("vitmnist")
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        stack.callback(setattr, logger, "propagate", logger.propagate)
        file = stack.enter_context(closing(logging.FileHandler(folder / "vitmnist.log", encoding="utf-8", delay=True)))
        for handler, date_format in ((logging.StreamHandler(sys.stdout), "%H:%M:%S"), (file, None)):
            handler.setFormatter(logging.Formatter(TIMED_FORMAT, date_format))
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        yield
