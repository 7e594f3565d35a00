"""Continues a stored search by Optuna: `n_trials` counts the completed ones of all starts."""

from __future__ import annotations

from contextlib import ExitStack

from filelock import FileLock, Timeout
from omegaconf import DictConfig

from vitmnist.errors import ConfigError


def remaining_trials(sweeper: DictConfig, held: ExitStack) -> int | None:
    """`n_trials` less the completed trials of a study in an SQLite file; None without such a file.

    Trials that a killed process has left running become failed.

    Args:
        held: keeps other processes from the file until it is closed.

    Raises:
        ConfigError: another process uses the file, so that it is unknown which trials still run.
        OSError: no lock file can be written next to it.
    """
    storage, name, n_trials = (sweeper.get(key) for key in ("storage", "study_name", "n_trials"))
    scheme, _, database = str(storage).partition("?")[0].partition(":///")
    if scheme != "sqlite" or database in ("", ":memory:") or not name:
        return None
    import optuna  # only here: an extra installs it
    from optuna.trial import TrialState

    try:
        held.enter_context(FileLock(f"{database}.lock").acquire(timeout=0))
    except Timeout as error:
        raise ConfigError(
            f"hydra.sweeper.storage={storage}: in use by another search; wait for it, or stop it"
        ) from error
    if name not in {summary.study_name for summary in optuna.get_all_study_summaries(storage)}:
        return None
    study = optuna.load_study(name, storage)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    done = len(study.get_trials(states=(TrialState.COMPLETE,)))
    if done >= n_trials:
        print(f"all {n_trials} trials of {name} in {storage} are done; a higher hydra.sweeper.n_trials adds more")
    return max(int(n_trials) - done, 0)
