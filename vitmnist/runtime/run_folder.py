"""The output folder of a run or sweep: its lock, and whether it has a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitmnist.errors import ConfigError, ExitCode
from vitmnist.runtime.file_lock import try_lock
from vitmnist.runtime.files import display_path

LOCK_NAME = ".lock"
"""The name of the file in the folder of a run or sweep that its process locks."""
CHECKPOINTS = "checkpoints/*.pt"
"""The pattern of the checkpoints in the folder of a run."""


class InUseError(ConfigError):
    """The output folder is in use by another run or sweep."""

    exit_code = ExitCode.UNFINISHED


@contextmanager
def lock_folder(folder: Path, key: str = "hydra.run.dir", *, refuse_existing: bool = False) -> Iterator[None]:
    """Create the folder of a run or sweep if there is none, and lock it within the block.

    The lock is on the file `.lock`, and the file stays. The system releases the lock when this process ends.

    Args:
        key: the configuration key of the folder.

    Raises:
        ConfigError: the folder cannot be created or written to, or holds records and `refuse_existing` is true.
        InUseError: another process, or another part of this process, has locked the folder.
    """
    path = display_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        release = try_lock(folder.resolve() / LOCK_NAME)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; set another folder with {key}=FOLDER") from error
    if release is None:
        raise InUseError(f"{path}: in use by another run; wait for it, or stop it")
    try:
        if refuse_existing and has_records(folder):
            raise ConfigError(
                f"{key}={path}: holds records already, which would be overwritten; set another folder, or resume with "
                "resume=auto"
            )
        yield
    finally:
        release()


def has_records(folder: Path) -> bool:
    """Whether the folder of a run or sweep has a `result.json` or a checkpoint."""
    return any(any(folder.rglob(name)) for name in ("result.json", CHECKPOINTS))


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint, complete or not."""
    return any(folder.glob(CHECKPOINTS))
