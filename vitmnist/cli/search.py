"""Continues a stored search by Optuna: `n_trials` counts the completed ones of all starts."""

from __future__ import annotations

import sys

from filelock import FileLock, Timeout
from omegaconf import DictConfig, open_dict, read_write

from vitmnist.errors import ConfigError

_lock: FileLock | None = None  # held until this process ends


def continue_search(config: DictConfig) -> None:
    """Reduce `n_trials` by the completed trials of a study in an SQLite file; exits if none are left.

    Trials that a killed process has left running become failed.

    Raises:
        ConfigError: another process uses the file, so that it is unknown which trials still run.
        OSError: no lock file can be written next to it.
    """
    global _lock  # noqa: PLW0603
    sweeper = config.hydra.sweeper
    storage, name, n_trials = (sweeper.get(key) for key in ("storage", "study_name", "n_trials"))
    scheme, _, database = str(storage).partition("?")[0].partition(":///")
    if scheme != "sqlite" or database in ("", ":memory:") or not name:
        return
    import optuna  # only here: an extra installs it
    from optuna.trial import TrialState

    try:
        _lock = FileLock(f"{database}.lock")
        _lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"hydra.sweeper.storage={storage}: in use by another search; wait for it, or stop it"
        ) from error
    if name not in {summary.study_name for summary in optuna.get_all_study_summaries(storage)}:
        return
    study = optuna.load_study(name, storage)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    done = len(study.get_trials(states=(TrialState.COMPLETE,)))
    if done >= n_trials:
        print(f"all {n_trials} trials of {name} in {storage} are done; a higher hydra.sweeper.n_trials adds more")
        sys.exit()
    with read_write(config), open_dict(config):
        sweeper.n_trials = n_trials - done
