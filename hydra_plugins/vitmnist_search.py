"""A sweeper that searches: Optuna proposes the values of a trial, a launcher of Hydra runs it as a job.

A journal in the sweep's folder has a line for the start of each trial, with its values, and one for its end. In
between, the state of the trial is in the records of its job, so a search that is killed at any point continues from
there.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, configure_log
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from vitmnist.cli.arguments import key_of
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path, write_atomic
from vitmnist.tracking.epoch_table import search_objective
from vitmnist.tracking.result import JOURNAL, SEARCH_RESULT, read_run

if TYPE_CHECKING:  # Hydra imports this module at every start, but only a search needs Optuna
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


class SearchSweeper(Sweeper):
    """Runs trials in batches of `n_jobs`, proposed together; conf/hydra/sweeper/optuna.yaml describes the arguments."""

    config: DictConfig
    hydra_context: HydraContext
    launcher: Launcher

    def __init__(self, n_trials: int, n_jobs: int, params: DictConfig) -> None:
        self.n_trials, self.n_jobs, self.params = n_trials, n_jobs, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `sweep`; `task_function` is the `Job` of vitmnist/cli/sweep.py."""
        self.hydra_context, self.config, self.stop = hydra_context, config, task_function.stop  # type: ignore[attr-defined]
        self.folder, self.metric = Path(config.hydra.sweep.dir), search_objective(config)
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until `n_trials` have ended, then write the best one."""
        for key, value in {"n_trials": self.n_trials, "n_jobs": self.n_jobs}.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"hydra.sweeper.{key}={value}: must be one whole number, at least 1")
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        space, fixed = self._parse(arguments)
        study = self._open(space, fixed)
        for first in range(0, self.n_trials, self.n_jobs):
            last = min(first + self.n_jobs, self.n_trials)
            while len(study.trials) < last:
                self._begin(study, space, fixed)
            batch = study.trials[first:last]
            if all(trial.state.is_finished() for trial in batch):
                continue
            # Launchers number the jobs of a batch in sequence. That of a trial that has ended returns at once.
            returned = self.launcher.launch([_overrides(trial) for trial in batch], initial_job_idx=first)
            for trial, job in zip(batch, returned, strict=True):
                if not trial.state.is_finished():
                    _end(study, trial, job)
            if self.stop.request:
                return
        self._write_best(study)

    def _parse(self, arguments: list[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
        """What to search by key, and the other overrides. What is typed takes the place of the same key in `params`."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        known: dict[str, Override] = {}
        for override in parser.parse_overrides([*(f"{key!s}={self.params[key]}" for key in self.params), *arguments]):
            key = override.get_key_element()
            known = {other: one for other, one in known.items() if key_of(other) != key_of(key)}
            known[key] = override
        known.pop("resume", None)
        space = {key: _distribution(override) for key, override in known.items() if override.is_sweep_override()}
        if "seed" in space:
            raise ConfigError("seed: a search compares trials of one seed; sweep the best values over seeds with -m")
        if not space:
            raise ConfigError("hydra/sweeper=optuna: nothing to search; type KEY=interval(LOW,HIGH) or KEY=choice(A,B)")
        return space, [str(override.input_line) for key, override in known.items() if key not in space]

    def _open(self, space: dict[str, BaseDistribution], fixed: list[str]) -> Study:
        """The search in the sweep's folder, or a new one; raises `ConfigError` if it is for other keys or metrics."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = self.folder / JOURNAL
        Path(f"{journal}.lock").unlink(missing_ok=True)  # of a killed start: the sweep's folder is locked by this one
        if journal.exists():  # a full disk may have cut the last line
            os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        if not optuna.get_all_study_names(storage):
            direction: Any = f"{self.metric.direction}imize"
            optuna.create_study(storage=storage, study_name=self.metric.name, direction=direction)
        study = optuna.load_study(storage=storage, study_name=None)
        differing = set() if study.study_name == self.metric.name else {"sweep.objective"}
        for trial in study.trials:  # so Hydra is given nothing from a journal that was not typed
            differing |= {key for key in space | trial.distributions if space.get(key) != trial.distributions.get(key)}
            differing |= {key_of(one) for one in {*fixed} ^ {*trial.user_attrs["fixed"]}}
        if differing:
            raise ConfigError(
                f"{display_path(self.folder)}: holds a search with another {', '.join(sorted(differing))}; type the "
                "same as before, or name another folder with hydra.sweep.dir=FOLDER"
            )
        return study

    def _begin(self, study: Study, space: dict[str, BaseDistribution], fixed: list[str]) -> None:
        """Record the next trial, whose values follow from the seed and the trials before, whether resumed or not."""
        from optuna import create_study, samplers
        from optuna.trial import TrialState, create_trial

        seed = Random(f"{self.config.seed} {len(study.trials)}").getrandbits(32)
        # They are drawn in a copy in memory, because Optuna records them one by one.
        copy = create_study(direction=study.direction, sampler=samplers.TPESampler(seed=seed))
        copy.add_trials(study.trials)
        begun: dict[str, Any] = {"state": TrialState.RUNNING, "distributions": space, "user_attrs": {"fixed": fixed}}
        trial = create_trial(params=copy.ask(space).params, **begun)
        self.validate_batch_is_legal([_overrides(trial)])
        study.add_trial(trial)

    def _write_best(self, study: Study) -> None:
        """Write the best trial to a file, with the sentence for the report, which ends the sweep."""
        found: dict[str, Any] = {"summary": f"No trial has a value of {study.study_name}."}
        if any(trial.value is not None for trial in study.trials):
            best = study.best_trial
            shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in best.params.items()}
            text = f"Best of {len(study.trials)} trials by {study.study_name}: {best.value:.6g} {self.metric.unit}"
            text = f"{text.rstrip()} in trial {best.number}, with {' '.join(f'{key}={shown[key]}' for key in shown)}."
            found = {"best_params": best.params, "best_value": best.value, "best_trial": best.number, "summary": text}
        write_atomic(self.folder / SEARCH_RESULT, yaml.safe_dump(found, sort_keys=False).encode())


def _overrides(trial: FrozenTrial) -> list[str]:
    """The overrides of the job of a trial; the same in every start, and with them the name of its folder."""
    return [*trial.user_attrs["fixed"], *(f"{key}={value}" for key, value in trial.params.items())]


def _distribution(override: Override) -> BaseDistribution:
    """What `tag(log, interval(0.001, 0.1))`, `choice(1, 2)` and the like search."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    try:
        if not isinstance(value, IntervalSweep):
            return CategoricalDistribution(list(override.sweep_string_iterator()))
        kind: Any = IntDistribution if "int" in value.tags else FloatDistribution
        return cast("BaseDistribution", kind(value.start, value.end, log="log" in value.tags))
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: cannot be searched: {error}") from error


def _end(study: Study, trial: FrozenTrial, job: JobReturn) -> None:
    """Record the value of a trial, or that it failed. One that was interrupted is left as it is, to be resumed."""
    from optuna.trial import TrialState

    value, hydra = job.return_value, cast(DictConfig, job.hydra_cfg).hydra
    if value is not None or read_run(Path(hydra.runtime.output_dir)).status in ("completed", "failed", "unreadable"):
        study.tell(trial.number, value, TrialState.FAIL if value is None else TrialState.COMPLETE)
