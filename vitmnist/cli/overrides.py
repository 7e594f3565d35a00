"""Overrides in Hydra's grammar: their keys, and folders of any name as their values."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from vitmnist.errors import ConfigError

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")


def key_of(override: str) -> str:
    """The key or group that an override names."""
    return override.lstrip("+~").partition("=")[0]


def quoted(text: str) -> str:
    """Text as a quoted string of Hydra's grammar, in which a backslash is special before a quote and at the end."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and r"\'"), text) + "'"


def searchpath(config_dir: Path | str | None) -> list[str]:
    """`--config-dir` as an override, for a configuration that is composed without Hydra's command line."""
    return [f"hydra.searchpath=[{quoted(Path(config_dir).resolve().as_uri())}]"] if config_dir else []


def check_name(folder: Path, advice: str = "rename it") -> None:
    """Raise `ConfigError` for the name of a folder that a terminal would obey, or Hydra resolve."""
    name = str(folder)
    if "${" in name or any(unicodedata.category(letter) == "Cc" for letter in name):
        raise ConfigError(f"{name!r}: the name of a folder must not contain control characters or ${{; {advice}")


def value_of(key: str, overrides: list[str]) -> str | None:
    """The value of an override as text; None if it was not typed or is null."""
    typed = [override for override in overrides if key_of(override) == key]
    value = OverridesParser.create().parse_override(typed[-1]).value() if typed else None
    return None if value is None else str(value)


def quoted_folder(override: str) -> str:
    """The override of a folder with its value quoted if it is not: a name may contain commas, quotes and spaces."""
    key, _, value = override.partition("=")
    is_quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
    if key not in FOLDERS or value in ("", "null") or is_quoted:
        return override
    return f"{key}={quoted(os.path.expanduser(value))}"
