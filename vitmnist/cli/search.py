"""Continues a stored search by Optuna: `n_trials` counts those of all starts; killed trials are marked as failed."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import IO

from omegaconf import DictConfig, open_dict, read_write

from vitmnist.errors import ConfigError

KILLED = "killed"  # a user attribute of the study: the numbers of trials that do not count

_lock: IO[str] | None = None  # held until this process ends


def continue_search(config: DictConfig) -> None:
    """Reduce `n_trials` by the finished trials of a study in an SQLite file; exits if none are left.

    Raises:
        ConfigError: another process uses the file, so that it is unknown which trials still run; or no file can be
            written next to it.
    """
    sweeper = config.hydra.sweeper
    storage, name, n_trials = (sweeper.get(key) for key in ("storage", "study_name", "n_trials"))
    scheme, _, database = str(storage).partition("?")[0].partition(":///")
    if scheme != "sqlite" or database in ("", ":memory:") or not name:
        return
    import optuna  # only here: an extra installs it

    _lock_study(Path(f"{database}.lock"), storage)
    if name not in {summary.study_name for summary in optuna.get_all_study_summaries(storage)}:
        return
    study = optuna.load_study(name, storage)
    running = [trial.number for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,))]
    killed = [*study.user_attrs.get(KILLED, []), *running]
    study.set_user_attr(KILLED, killed)
    for number in running:
        study.tell(number, state=optuna.trial.TrialState.FAIL)
    done = sum(trial.state.is_finished() and trial.number not in killed for trial in study.get_trials())
    if done >= n_trials:
        print(f"all {n_trials} trials of {name} in {storage} are done; a higher hydra.sweeper.n_trials adds more")
        sys.exit()
    with read_write(config), open_dict(config):
        sweeper.n_trials = n_trials - done


def _lock_study(path: Path, storage: str) -> None:
    global _lock  # noqa: PLW0603
    try:
        _lock = path.open("a")
        fcntl.lockf(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_locked = isinstance(error, BlockingIOError)
        reason = "in use by another search; wait for it, or stop it" if is_locked else f"{path}: {error.strerror}"
        raise ConfigError(f"hydra.sweeper.storage={storage}: {reason}") from error
