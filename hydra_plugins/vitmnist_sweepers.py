"""The sweepers for `repeats` and for searches with Optuna. Hydra finds its plugins in this namespace package.

The sweepers keep no state. A job that has ended returns at once, with the result in its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, configure_log
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from vitmnist.config import parse_key
from vitmnist.errors import ConfigError, MissingExtraError
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.runtime.files import write_atomic
from vitmnist.tracking.runs import read_run

# Hydra imports this module at every start, but only a search needs Optuna.
if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution


class RoundsSweeper(BasicSweeper):
    """Hydra's basic sweeper, but with the jobs of each round in a random order that depends on the seed.

    With a fixed order, a machine that slows down steadily would favour the first job of each round.
    """

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        """Return the overrides of the next jobs."""
        assert self.config is not None
        jobs = super().get_job_batch()
        draw = Random(f"{self.config.seed} {self.batch_index}")
        return sorted(jobs, key=lambda job: (_round_of(job), draw.random()))


def _round_of(job: Sequence[str]) -> int:
    return next(int(override.partition("=")[2]) for override in job if override.startswith("repeat="))


class SearchSweeper(Sweeper):
    """Runs trials in batches of `n_jobs`, proposed together; conf/hydra/sweeper/optuna.yaml describes the arguments.

    The values of a trial depend only on the seed and the results of earlier trials. A search that is started again
    proposes the same trials, up to the first job that has not ended.
    """

    config: DictConfig
    hydra_context: HydraContext
    launcher: Launcher

    def __init__(self, n_trials: int, n_jobs: int, params: DictConfig) -> None:
        self.n_trials, self.n_jobs, self.params = n_trials, n_jobs, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `sweep`; `task_function` is the `Job` of vitmnist/cli/sweep.py."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until `n_trials` have ended, then write the best one."""
        for key, value in {"n_trials": self.n_trials, "n_jobs": self.n_jobs}.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"hydra.sweeper.{key}={value}: must be a whole number, at least 1")
        if self.config.repeats > 1:
            raise ConfigError("repeats: has no effect in a search; set repeats=1, or sweep over listed values")
        try:
            import optuna
        except ImportError as error:
            raise MissingExtraError("hydra/sweeper=optuna", "search") from error
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        space, fixed = self._parse(arguments)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        is_highest = find_metric(self.config.monitor, "monitor").direction == "max"
        study = optuna.create_study(
            direction="maximize" if is_highest else "minimize",
            sampler=optuna.samplers.TPESampler(seed=self.config.seed),
        )
        for first in range(0, self.n_trials, self.n_jobs):
            trials = [study.ask(space) for _ in range(first, min(first + self.n_jobs, self.n_trials))]
            jobs = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            returned = self.launcher.launch(jobs, initial_job_idx=first)
            # The next trials depend on these results.
            if any(map(_is_unfinished, returned)):
                return
            for trial, job in zip(trials, returned, strict=True):
                state = optuna.trial.TrialState.FAIL if job.return_value is None else None
                study.tell(trial, job.return_value, state)
        self._write_best(study)

    def _parse(self, arguments: list[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
        """Return the search space by key, and the other overrides. An argument replaces the same key in `params`."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        texts = [*(f"{key!s}={self.params[key]}" for key in self.params), *arguments]
        overrides = {parse_key(override.get_key_element()): override for override in parser.parse_overrides(texts)}
        space = {key: _distribution(overrides[key]) for key in sorted(overrides) if overrides[key].is_sweep_override()}
        if "seed" in space:
            raise ConfigError("seed: a search compares trials of one seed; sweep the best values over seeds with -m")
        if not space:
            raise ConfigError("hydra/sweeper=optuna: nothing to search; set KEY=interval(LOW,HIGH) or KEY=choice(A,B)")
        return space, [str(override.input_line) for key, override in overrides.items() if key not in space]

    def _write_best(self, study: Study) -> None:
        """Write the best trial to a file, if any trial has a value."""
        if any(trial.value is not None for trial in study.trials):
            trial = study.best_trial
            best = {"best_params": trial.params, "best_value": trial.value, "best_trial": trial.number}
            content = yaml.safe_dump(best, sort_keys=False).encode()
            write_atomic(Path(self.config.hydra.sweep.dir) / "optimization_results.yaml", content)


def _distribution(override: Override) -> BaseDistribution:
    """Convert an override such as `tag(log, interval(0.001, 0.1))` or `choice(1, 2)` to a distribution of Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    try:
        if not isinstance(value, IntervalSweep):
            return CategoricalDistribution(list(override.sweep_string_iterator()))
        low, high, is_log = value.start, value.end, "log" in value.tags
        assert isinstance(low, int | float)
        assert isinstance(high, int | float)
        if "int" in value.tags:
            return IntDistribution(int(low), int(high), log=is_log)
        return FloatDistribution(low, high, log=is_log)
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: cannot be searched: {error}") from error


def _is_unfinished(job: JobReturn) -> bool:
    """Whether the job of a trial can be resumed: it was stopped, or another process trains it."""
    folder = Path(cast(DictConfig, job.hydra_cfg).hydra.runtime.output_dir)
    return job.return_value is None and read_run(folder).result.status in ("interrupted", "running")
