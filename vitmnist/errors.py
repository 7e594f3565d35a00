"""Errors for the person who can mend them: each message says what was wrong, what is allowed, what to type."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Shown as its message alone, without a traceback."""


class ConfigError(UserError):
    """A value of the configuration that cannot be used; the message names its key."""


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
    near = get_close_matches(wrong, names, n=1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return f"{suggestion}allowed: {', '.join(names) or 'none'}"


def first_line(error: BaseException) -> str:
    """An error's message without the details that OmegaConf writes below it."""
    return str(error).partition("\n")[0]
