"""Trains a run or a sweep. `main` calls the other functions in the order of their definition.

With `torchrun`, several processes run the same command line.
"""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log, env_override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

import vitmnist
from vitmnist.cli.arguments import Arguments, Resume, find_value, parse_arguments
from vitmnist.cli.command import PrintableFormatter, echo
from vitmnist.cli.process import ProcessState, exit_with_message, import_trainer
from vitmnist.cli.resume import has_run_to_continue, print_if_completed, split_global_overrides
from vitmnist.cli.sweep import run_sweep
from vitmnist.config import CONF, is_hydra_override
from vitmnist.config.schema import Config, to_json_values
from vitmnist.config.validation import validate
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.world import is_distributed
from vitmnist.tracking.recorded_config import load_recorded_config
from vitmnist.tracking.result import Result

if TYPE_CHECKING:
    from vitmnist.trainer import Trainer

log = logging.getLogger(__name__)

# Options of Hydra that print information and do not train.
PRINTING_OPTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class ConfiguredRun:
    """A validated run with a locked folder; its overrides are only recorded."""

    config: Config
    folder: Path
    overrides: list[str]


def main() -> None:
    """Run the command line; an exception becomes one message and an exit code.

    Only rank 0 parses the command line. It runs a sweep itself, or configures the run that all ranks train.
    """
    process = ProcessState(sys.argv[1:])
    with exit_with_message(process):
        if is_distributed():
            from vitmnist.runtime.torch_world import TorchWorld  # Import late: this module imports torch.

            process.world = TorchWorld()
        run = None
        if process.world.is_main and not print_information(process.argv):
            arguments = parse_arguments(process.argv)
            composed = compose_with_hydra(process, arguments)
            if composed.hydra.mode == RunMode.MULTIRUN:
                run_sweep(process, composed, arguments)
            else:
                run = configure_run(process, composed, arguments)
                if run:
                    configure_log(composed.hydra.job_logging, composed.hydra.verbose)
        run = broadcast_run(process, run)
        if run:
            train_run(import_trainer(), process, run)


def print_information(argv: list[str]) -> bool:
    """Handle `--version`, `--help` and Hydra's other options that print; False if there is something to train."""
    # Without this, `--version` prints the version of Hydra.
    if "--version" in argv:
        print(f"vitmnist {vitmnist.__version__}")
        return True
    options = parse_arguments(argv).options
    if not any(getattr(options, name) for name in PRINTING_OPTIONS):
        return False
    # With this variable, Hydra raises errors instead of printing them.
    with env_override({"HYDRA_FULL_ERROR": "1"}):
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda composed: None)()
    return True


def compose_with_hydra(process: ProcessState, arguments: Arguments) -> DictConfig:
    """Compose the configuration. For a resumed run, only its section `hydra` is used."""
    process.resources.enter_context(initialize_config_dir(str(CONF), job_name="train", version_base="1.3"))
    composer = GlobalHydra.instance().hydra
    assert composer
    overrides = arguments.overrides
    if arguments.resume is Resume.REQUIRED:
        overrides = [*filter(is_hydra_override, overrides)]
    composed = composer.compose_config("config", overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
    # Hydra sets the configuration later, but `${hydra:runtime.cwd}` in a value needs it here.
    HydraConfig.instance().set_config(composed)
    if composed.resume is not None:
        raise ConfigError(f"resume={composed.resume}: is for the command line; remove it from the file")
    if composed.hydra.mode != RunMode.MULTIRUN:
        if any(override.is_sweep_override() for override in OverridesParser.create().parse_overrides(overrides)):
            # This raises Hydra's error, which explains -m.
            composer.compose_config("config", overrides, RunMode.RUN)
        if composed.repeats > 1:
            raise ConfigError(f"repeats={composed.repeats}: repeats the jobs of a sweep; type -m as well")
    return composed


def configure_run(process: ProcessState, composed: DictConfig, arguments: Arguments) -> ConfiguredRun | None:
    """Load or validate the configuration of a run, and lock its folder.

    Returns:
        The run; None if it needs no training.
    """
    folder = Path(composed.hydra.run.dir)
    path = display_path(folder)
    overrides, resume = arguments.overrides, arguments.resume
    is_resumed = resume is Resume.REQUIRED or (resume is Resume.IF_POSSIBLE and has_run_to_continue(folder))
    if not is_resumed:
        values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        config = validate(Config, values)
    else:
        if resume is Resume.IF_POSSIBLE:
            echo(f"resume=auto: resuming {path}")
        global_overrides, overrides = split_global_overrides(folder, overrides)
        config = load_recorded_config(folder, overrides)
        overrides = [*global_overrides, *overrides]
    process.lock_folder(folder, "hydra.run.dir", [f"resume={path}"], refuse_existing=resume is Resume.NEVER)
    if is_resumed and print_if_completed(folder, config):
        return None
    config = replace(config, resume=str(folder) if is_resumed else None)
    with read_write(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(folder.absolute())
    process.resources.enter_context(env_override(composed.hydra.job.env_set))
    return ConfiguredRun(config, folder.absolute(), [text for text in overrides if not is_hydra_override(text)])


def broadcast_run(process: ProcessState, run: ConfiguredRun | None) -> ConfiguredRun | None:
    """Send the run of rank 0 to all ranks. Each rank keeps its own `data.root`: it can be on another machine."""
    values: dict[str, Any] = {"folder": str(run.folder), "config": to_json_values(run.config)} if run else {}
    shared = process.world.broadcast_object(lambda: values)
    if process.world.is_main or not shared:
        return run
    if data_root := find_value("data.root", process.argv):
        shared["config"]["data"]["root"] = data_root
    folder = Path(shared["folder"])
    handler = logging.FileHandler(folder / f"rank-{process.world.rank}.log", encoding="utf-8")
    handler.setFormatter(PrintableFormatter("%(asctime)s  %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    return ConfiguredRun(validate(Config, shared["config"]), folder, [])


def train_run(trainer_class: type[Trainer], process: ProcessState, run: ConfiguredRun) -> Result:
    """Train a run, and log where its results are."""
    trainer = trainer_class(run.config, run.folder, run.overrides, process.stop, process.world)
    result = trainer.fit()
    if process.world.is_main:
        path = display_path(run.folder)
        log.info("Results: %s", path)
        if any(options["name"] == "tensorboard" for options in trainer.logger_options):
            # TensorBoard names a run after its folder, below the folder that is typed.
            log.info("View them with\n    tensorboard --logdir %s", shlex.quote(display_path(run.folder.parent)))
    return result
