"""The configuration: its schema, composition and validation; here, the keys of overrides."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent

# In a wheel, conf/ is inside the package; in a source tree, it is next to the package.
CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())


def is_group(key: str) -> bool:
    """Whether a key is a config group, so that an override of it chooses a member."""
    return any((CONF / key).glob("*.yaml"))


def parse_key(override: str) -> str:
    """Return the key or group of an override."""
    return override.lstrip("+~").partition("=")[0]


def is_hydra_override(override: str) -> bool:
    """Whether an override belongs to Hydra's own configuration."""
    return parse_key(override).startswith("hydra")


def is_under(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key equals one of `sections` or lies below one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def without_keys(overrides: Iterable[str], keys: Collection[str]) -> list[str]:
    """Remove the overrides of some keys."""
    return [override for override in overrides if parse_key(override) not in keys]
