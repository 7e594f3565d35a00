"""Errors for the person who can mend them: each message says what was wrong, what is allowed, what to type."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Shown as its message alone, without a traceback."""


class ConfigError(UserError):
    """A value of the configuration that cannot be used; the message names its key."""


class UnknownKeyError(ConfigError):
    """A key that the configuration does not have."""

    def __init__(self, key: str, siblings: Iterable[str], value: object) -> None:
        self.key, self.siblings, self.value = key, list(siblings), value
        super().__init__(key, self.siblings, value)  # so that it can be pickled

    def __str__(self) -> str:
        return f"{self.key}: there is no such key; {choices(self.key.rpartition('.')[2], self.siblings)}"


class DataError(UserError):
    """A data file that is missing, damaged or not what it claims to be; the message names the file."""


class LoadingError(UserError):
    """A loader that delivers no more batches."""


class TrainingError(UserError):
    """Training that cannot go on, such as a loss that is not finite."""


class PeerError(UserError):
    """Another process of the same run has failed, and has said why; this one cannot go on without it."""


def choices(wrong: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest of the allowed names, then all of them."""
    names = sorted(allowed)
    return f"{nearest(wrong, names)} allowed: {', '.join(names) or 'none'}".lstrip()


def nearest(wrong: str, allowed: Iterable[str]) -> str:
    """The question whether the nearest of the allowed names was meant, in any case; empty if none is near."""
    names = {name.lower(): name for name in allowed}
    near = get_close_matches(wrong.lower(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """An error's message without the details that OmegaConf writes below it."""
    return str(error).partition("\n")[0]
