"""Trains a run, or a sweep of several: arguments in, records and an exit code out."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
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
from omegaconf import OmegaConf, read_write

import vitmnist
from vitmnist.cli.arguments import Arguments, key_of, parse, without_keys
from vitmnist.cli.command import program
from vitmnist.cli.resume import SEVERAL, config_to_resume, is_resumable, recorded_config, recorded_overrides
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
from vitmnist.cli.sweep import run_sweep
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
        if configured := configure(start):
            config, folder, overrides = configured
            start.is_training, trainer, shown = True, import_trainer(), display_path(folder)
            try:
                trainer(config, folder.absolute(), overrides, start.stop, start.world).fit()
            except Exception as error:
                if (folder / "result.json").exists() and not isinstance(error, ConfigError):  # which is not recorded
                    log.info("failed; results: %s", shown)
                raise
            if start.world.is_main:
                start.resources.enter_context(
                    handled_by(signal.SIG_IGN, signal.SIGINT)
                )  # a completed run ends by itself
                view = f"\nView them with\n    tensorboard --logdir {shlex.quote(shown)}"
                log.info("Results: %s%s", shown, view * ("tensorboard" in config.logger))


def configure(start: Start) -> tuple[Config, Path, list[str]] | None:
    """Check what was typed, and lock the folder. A sweep is run to its end here.

    Returns:
        The configuration of a run, its folder, and its overrides; None if nothing is left to do.

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
    configured = _recorded(start, arguments) if arguments.run else _composed(start, arguments)
    if configured:
        config, folder, _ = configured
        start_other_ranks(start.world, start.typed, folder.absolute(), config)
        start.hint = partial(_hint, folder, start.world.size)
    return configured


def _recorded(start: Start, arguments: Arguments) -> tuple[Config, Path, list[str]] | None:
    """Resume a run with its recorded values and what was typed, without Hydra."""
    folder, typed = arguments.run, arguments.overrides
    assert folder
    config = recorded_config(folder, typed)
    start.lock_folder(folder, "resume")
    if not (resumed := config_to_resume(folder, config)):
        return None
    line = "%(asctime)s  %(message)s"  # as in conf/config.yaml, which formats the log of a new run
    file = logging.FileHandler(folder / "vitmnist.log")
    file.setFormatter(logging.Formatter(line))  # with the date, which the terminal leaves out
    handlers = (logging.StreamHandler(sys.stdout), file)
    logging.basicConfig(format=line, datefmt="%H:%M:%S", level=logging.INFO, handlers=handlers, force=True)
    return resumed, folder, [*without_keys(recorded_overrides(folder), map(key_of, typed)), *typed]


def _composed(start: Start, arguments: Arguments) -> tuple[Config, Path, list[str]] | None:
    """Compose the configuration of a run that begins, or that `resume=auto` continues, or of a sweep, which is run."""
    options, overrides = arguments.options, arguments.overrides
    config_path = str(Path(options.config_path or CONF).resolve())
    start.resources.enter_context(initialize_config_dir(config_path, job_name="train", version_base="1.3"))
    composer, name = GlobalHydra.instance().hydra, options.config_name or "config"
    assert composer
    composed = composer.compose_config(name, overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
    HydraConfig.instance().set_config(composed)  # for ${hydra:runtime.cwd}; Hydra does so only later
    if options.multirun or composed.hydra.mode == RunMode.MULTIRUN:
        run_sweep(start, composed, overrides, partial(composer.multirun, name))
        return None
    if any(override.is_sweep_override() for override in OverridesParser.create().parse_overrides(overrides)):
        composer.compose_config(name, overrides, RunMode.RUN)  # raises an error that explains -m
    if composed.repeats > 1:
        raise ConfigError(f"repeats={composed.repeats}: repeats the jobs of a sweep; type -m as well")
    folder, is_auto = Path(composed.hydra.run.dir), composed.resume == "auto"
    values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    config = replace(validate(Config, values), resume=None)
    start.lock_folder(folder, "hydra.run.dir", () if is_auto else RECORDS)
    if is_auto and is_resumable(folder):  # asked under the lock: another process may have trained here meanwhile
        # The same command line is typed again and again: the values of `experiment=` and the like are recorded.
        resumed = config_to_resume(folder, recorded_config(folder, without_keys(overrides, SEVERAL)))
        if not resumed:
            return None
        print(f"resume=auto: resuming {display_path(folder)}")
        config = resumed
    elif is_auto:
        print(f"resume=auto: nothing to resume in {display_path(folder)}; a new run begins")
    with read_write(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(folder.absolute())
    configure_log(composed.hydra.job_logging, composed.hydra.verbose)
    start.resources.enter_context(env_override(composed.hydra.job.env_set))
    return config, folder, without_keys(composed.hydra.overrides.task, ["resume"])


def _hint(folder: Path, ranks: int) -> str:
    """The end of a message about an interruption: where the results are, and the command that resumes."""
    shown = display_path(folder)
    if not has_checkpoint(folder):
        return f"; results: {shown}"
    return f"; results: {shown}, resume with\n    {program(ranks)} {shlex.quote(f'resume={shown}')}"
