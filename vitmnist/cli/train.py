"""Trains a run or a sweep. `main` calls the other functions in the order in which they are defined.

With `torchrun`, several processes run the same command line.
"""

from __future__ import annotations

import logging
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.utils import configure_log, env_override
from hydra.types import RunMode
from omegaconf import DictConfig, read_write

import vitmnist
from vitmnist.cli.arguments import Arguments, lazy_help_accepted, parse_arguments
from vitmnist.cli.command import TIMED_FORMAT, errors_as_messages, format_command
from vitmnist.cli.process import connected_ranks, import_trainer, results_in_message
from vitmnist.cli.sweep import run_sweep
from vitmnist.config import CONF, is_hydra_override, parse_key
from vitmnist.config.compose import compose, compose_command, initialize_hydra
from vitmnist.config.schema import Config, to_json_values
from vitmnist.config.validation import validate
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import lock_folder
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.tracking.result import Result
from vitmnist.tracking.resume import is_resumable, load_resumed_config, print_if_completed

if TYPE_CHECKING:
    from vitmnist.trainer import Trainer

log = logging.getLogger(__name__)

# Options of Hydra that print information and do not train.
PRINTING_OPTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class ConfiguredRun:
    """A run with a validated configuration and a locked folder; `overrides` are only recorded."""

    config: Config
    folder: Path
    overrides: list[str]


@errors_as_messages()
def main() -> None:
    """Run the command line. Rank 0 reads it, and runs a sweep or configures the run that all ranks train."""
    stop = StopSignal()
    with connected_ranks() as world, ExitStack() as resources:
        if world.broadcast_object(partial(print_information, sys.argv[1:])):
            return
        run = None  # The other ranks receive the run of rank 0.
        if world.is_main:
            arguments = parse_arguments(sys.argv[1:])
            resources.enter_context(initialize_hydra())
            values, hydra_values = compose_command(arguments.overrides_to_compose)
            if hydra_values.mode == RunMode.MULTIRUN:
                run_sweep(arguments, values, hydra_values, stop)  # This is an error if there are other ranks.
                return
            run = configure_run(arguments, values, hydra_values, resources)
        run = broadcast_run(world, run)
        if world.broadcast_object(partial(print_if_completed, run.folder, run.config)):
            return
        if world.is_main:
            command = f"{format_command(world.size)} {shlex.quote(f'resume={display_path(run.folder)}')}"
            resources.enter_context(results_in_message(run.folder, command))
            configure_log(hydra_values.job_logging, hydra_values.verbose)
        else:
            run.folder.mkdir(parents=True, exist_ok=True)  # It can be missing on another machine.
            file = run.folder / f"rank-{world.rank}.log"
            logging.basicConfig(filename=file, encoding="utf-8", format=TIMED_FORMAT, level=logging.INFO, force=True)
        train_run(import_trainer(), run, stop, world)


def print_information(argv: list[str]) -> bool:
    """Handle `--version`, `--help` and other options that only print; returns False without such an option."""
    # Hydra's `--version` would print the version of Hydra.
    if "--version" in argv:
        print(f"vitmnist {vitmnist.__version__}")
        return True
    options = parse_arguments(argv).options
    if not any(getattr(options, name) for name in PRINTING_OPTIONS):
        return False
    # Let Hydra raise errors instead of printing them.
    with env_override({"HYDRA_FULL_ERROR": "1"}), lazy_help_accepted():
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda composed: None)()
    return True


def configure_run(
    arguments: Arguments, values: DictConfig, hydra_values: DictConfig, resources: ExitStack
) -> ConfiguredRun:
    """Load or validate the configuration of a run, and lock its folder until `resources` are closed.

    Args:
        values: the composed configuration; a resumed run uses the recorded configuration instead.
        hydra_values: the section `hydra`; its `runtime.output_dir` is set.
    """
    folder = Path(hydra_values.run.dir)
    is_resumed = arguments.resume is not None
    if arguments.resume == "auto":
        is_resumed = is_resumable(folder)
        print(f"resume=auto: {'resuming' if is_resumed else 'beginning'} {display_path(folder)}")
    if is_resumed:
        config, overrides = load_resumed_config(folder, arguments.overrides)
    else:
        config, overrides = validate(Config, values), arguments.overrides
    resources.enter_context(lock_folder(folder, refuse_existing=arguments.resume is None))
    # Hydra's launchers do the same for the jobs of a sweep.
    with read_write(hydra_values.runtime):
        hydra_values.runtime.output_dir = str(folder.absolute())
    resources.enter_context(env_override(hydra_values.job.env_set))
    config = replace(config, resume=str(folder) if is_resumed else None)
    recorded = [override for override in overrides if not is_hydra_override(override)]
    return ConfiguredRun(config, folder.absolute(), recorded)


def broadcast_run(world: World, run: ConfiguredRun | None) -> ConfiguredRun:
    """Send the run of rank 0 to all ranks. A rank keeps its own `data.root`, because it can be on another machine."""
    values: dict[str, Any] = {"folder": str(run.folder), "config": to_json_values(run.config)} if run else {}
    shared = world.broadcast_object(lambda: values)
    if run:
        return run
    if roots := [text for text in sys.argv[1:] if parse_key(text) == "data.root"]:
        shared["config"]["data"]["root"] = compose(roots).data.root
    return ConfiguredRun(validate(Config, shared["config"]), Path(shared["folder"]), [])


def train_run(
    trainer_class: type[Trainer], run: ConfiguredRun, stop: StopSignal, world: World = SINGLE_PROCESS
) -> Result:
    """Train a run, and log where its results are."""
    trainer = trainer_class(run.config, run.folder, run.overrides, stop, world)
    result = trainer.fit()
    if world.is_main:
        path = display_path(run.folder)
        log.info("Results: %s", path)
        if any(options["name"] == "tensorboard" for options in trainer.logger_configs):
            # TensorBoard names a run by its path below `--logdir`.
            log.info("View them with\n    tensorboard --logdir %s", shlex.quote(display_path(run.folder.parent)))
    return result
