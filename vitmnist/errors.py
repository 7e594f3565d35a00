"""Errors that the user can fix: each message says what is wrong, what is allowed and what to type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from traceback import walk_tb

CALL_METHODS = ("__call__", "forward")  # The methods by which transforms and collate functions are called.


class ExitCode(IntEnum):
    """What the program exits with; docs/command-line.md explains each. 0 is done; signals have their own."""

    FAILED = 1
    USAGE = 2  # argparse has it too
    UNFINISHED = 75  # EX_TEMPFAIL of BSD's sysexits.h, "try again later"
    INTERRUPTED = 130  # what a shell shows after Ctrl-C
    PIPE_CLOSED = 141  # what a shell shows after SIGPIPE


class UserError(Exception):
    """Shown as its message alone, without a traceback."""

    exit_code: int = ExitCode.FAILED


class ConfigError(UserError):
    """A configuration value that cannot be used; the message names its key."""


class UnknownKeyError(ConfigError):
    """A key that the configuration does not have."""

    def __init__(self, key: str, siblings: list[str]) -> None:
        self.key, self.siblings = key, siblings
        super().__init__(key, siblings)  # all arguments, so that it can be pickled

    def __str__(self) -> str:
        return f"{self.key}: there is no such key; {allowed_names(self.key.rpartition('.')[2], self.siblings)}"


class DataError(UserError):
    """A data file is missing, damaged or of the wrong kind; the message names the file."""


class LoadingError(UserError):
    """A loader cannot deliver the next batch."""


class TrainingError(UserError):
    """Training cannot continue, for example because the loss is not finite."""


class ExportError(UserError):
    """An exported model does not predict what the original does."""


class MissingExtraError(UserError):
    """A package that only an extra installs is missing; the message has the command that installs it."""

    def __str__(self) -> str:
        missing, extra = self.args
        return f"{missing} is not installed; type pip install 'vitmnist[{extra}]'"


class PeerError(UserError):
    """Another rank of the same run has failed; the message gives its reason."""


def allowed_names(wrong: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest allowed name, then all of them."""
    names = sorted(allowed)
    return f"{nearest(wrong, names)} allowed: {', '.join(names) or 'none'}".lstrip()


def listed(names: Iterable[str]) -> str:
    """The first ten of some names, or lines, that may come from a file."""
    every = list(names)
    return ", ".join(map(printable, every[:10])) + f", … ({len(every)} in all)" * (len(every) > 10)


def nearest(wrong: str, allowed: Iterable[str]) -> str:
    """`did you mean …?` with the closest allowed name, ignoring case; empty if none is close."""
    names = {name.lower(): name for name in allowed}
    near = get_close_matches(wrong.lower(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else ""


def printable(text: str | Path) -> str:
    """Escape what is not printable, such as ESC, in a file name or text of unknown origin, for a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def first_line(error: BaseException) -> str:
    """The first line of a message, without the details that OmegaConf and torch add below it."""
    return str(error).strip().partition("\n")[0]


def described(error: BaseException) -> str:
    """The message of a `UserError`; the type and the first line of any other."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn any error into a `DataError` that says what failed, and the transform or function that raised it."""
    try:
        yield
    except UserError as error:
        raise DataError(f"{what}: {error}") from error
    except Exception as error:  # reading a sample may fail in any way
        frames = [frame for frame, _ in walk_tb(error.__traceback__)][2:]  # without those of this block
        calls = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name in CALL_METHODS]
        names = [type(call).__name__ for call in calls if call is not None] or [
            frame.f_code.co_name for frame in frames
        ]
        raise DataError(f"{what}: {''.join(f'{name} raised ' for name in names[-1:])}{described(error)}") from error
