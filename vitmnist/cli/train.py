"""Trains a run, or a sweep of several: arguments in, records and an exit code out."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log, env_override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

import vitmnist
from vitmnist.cli.arguments import Arguments, is_of_hydra, key_of, parse, quoted, without_keys
from vitmnist.cli.command import program
from vitmnist.cli.resume import GLOBAL_GROUPS, config_to_resume, is_resumable, recorded_config, recorded_overrides
from vitmnist.cli.start import (
    RECORDS,
    Start,
    check_restarts,
    connect_ranks,
    exit_with_message,
    follow_rank_0,
    import_trainer,
    start_other_ranks,
)
from vitmnist.cli.sweep import Sweep, prepare_sweep
from vitmnist.config import CONF
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.runtime.signals import handled_by

log = logging.getLogger(__name__)


def main() -> None:
    """Train what the command line says; an exception becomes one message and an exit code."""
    start = Start(sys.argv[1:])
    with exit_with_message(start):
        prepared = configure(start)
        if isinstance(prepared, Sweep):
            with prepared.reported():
                prepared.multirun(prepared.job, prepared.overrides)
        elif prepared:
            config, folder, overrides = prepared
            start.is_training, trainer, shown = True, import_trainer(), display_path(folder)
            try:
                trainer(config, folder.absolute(), overrides, start.stop, start.world).fit()
            except Exception as error:
                if (folder / "result.json").exists() and not isinstance(error, ConfigError):  # which is not recorded
                    log.info("failed; results: %s", shown)
                raise
            if start.world.is_main:
                start.resources.enter_context(handled_by(signal.SIG_IGN, signal.SIGINT))  # it ends by itself
                view = f"\nView them with\n    tensorboard --logdir {shlex.quote(shown)}"
                log.info("Results: %s%s", shown, view * ("tensorboard" in config.logger))


def configure(start: Start) -> tuple[Config, Path, list[str]] | Sweep | None:
    """Check what was typed, and lock the folder.

    Returns:
        The configuration of a run, its folder, and its overrides, or a sweep; None if nothing is left to do.

    Raises:
        ConfigError: the arguments, the configuration or the folder cannot be used; nothing was written.
    """
    start.world = connect_ranks()
    if not start.world.is_main:
        followed = follow_rank_0(start.world, start.typed)
        return followed and (*followed, [])
    if "--version" in start.typed:
        print(f"vitmnist {vitmnist.__version__}")  # Hydra would print its own version
        return None
    arguments = parse(start.typed)
    check_restarts(start.typed)
    if arguments.is_question:
        with env_override({"HYDRA_FULL_ERROR": "1"}):  # Hydra then raises its errors instead of printing them
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda composed: None)()
        return None
    composed, multirun = _compose(start, arguments)
    if composed.hydra.mode == RunMode.MULTIRUN:
        return prepare_sweep(start, composed, arguments.overrides, multirun)
    configured = _configure_run(start, composed, arguments)
    if configured:
        config, folder, _ = configured
        start_other_ranks(start.world, start.typed, folder.absolute(), config)
        start.hint = partial(_hint, folder, start.world.size)
    return configured


def _compose(start: Start, arguments: Arguments) -> tuple[DictConfig, Callable[..., object]]:
    """Compose the configuration, for a run to resume only that of Hydra; also returns what runs the jobs of a sweep."""
    options, overrides = arguments.options, arguments.overrides
    config_path, name = str(Path(options.config_path or CONF).resolve()), options.config_name or "config"
    start.resources.enter_context(initialize_config_dir(config_path, job_name="train", version_base="1.3"))
    composer = GlobalHydra.instance().hydra
    assert composer
    if arguments.run:  # its values are recorded
        overrides = [*filter(is_of_hydra, overrides), f"hydra.run.dir={quoted(str(arguments.run))}"]
    composed = composer.compose_config(name, overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
    HydraConfig.instance().set_config(composed)  # for ${hydra:runtime.cwd}; Hydra does so only later
    is_sweep = composed.hydra.mode == RunMode.MULTIRUN
    if not is_sweep and any(text.is_sweep_override() for text in OverridesParser.create().parse_overrides(overrides)):
        composer.compose_config(name, overrides, RunMode.RUN)  # raises an error that explains -m
    if not is_sweep and composed.repeats > 1:
        raise ConfigError(f"repeats={composed.repeats}: repeats the jobs of a sweep; type -m as well")
    return composed, partial(composer.multirun, name)


def _configure_run(start: Start, composed: DictConfig, arguments: Arguments) -> tuple[Config, Path, list[str]] | None:
    """Lock the folder of a run, take the recorded values if it is resumed, and configure the log."""
    typed, run, is_auto = arguments.overrides, arguments.run, composed.resume == "auto"
    folder = Path(composed.hydra.run.dir)
    if run:
        config = recorded_config(folder, typed)
    else:
        values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        config = replace(validate(Config, values), resume=None)
    start.lock_folder(folder, "hydra.run.dir", () if run or is_auto else RECORDS)
    must_resume = run or (is_auto and is_resumable(folder))  # under the lock: another process may have trained here
    if is_auto and must_resume:
        # The same command line is typed again and again: the values of `experiment=` and the like are recorded.
        config = recorded_config(folder, without_keys(typed, GLOBAL_GROUPS))
    if must_resume:
        resumed = config_to_resume(folder, config)
        if not resumed:
            return None
        config = resumed
    if is_auto:
        shown = display_path(folder)
        print(
            f"resume=auto: {f'resuming {shown}' if must_resume else f'nothing to resume in {shown}; a new run begins'}"
        )
    with read_write(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(folder.absolute())
    configure_log(composed.hydra.job_logging, composed.hydra.verbose)
    start.resources.enter_context(env_override(composed.hydra.job.env_set))
    overrides = [*without_keys(recorded_overrides(folder) if run else [], map(key_of, typed)), *typed]
    return config, folder, [text for text in without_keys(overrides, ["resume"]) if not is_of_hydra(text)]


def _hint(folder: Path, ranks: int) -> str:
    """The end of a message about an interruption: where the results are, and the command that resumes."""
    shown = display_path(folder)
    if not has_checkpoint(folder):
        return f"; results: {shown}"
    return f"; results: {shown}, resume with\n    {program(ranks)} {shlex.quote(f'resume={shown}')}"
