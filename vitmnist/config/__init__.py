"""The configuration: its schema, and how it is composed and checked."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent

# A wheel carries conf/ inside the package; in a source tree it is next to it.
CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())


def is_group(key: str) -> bool:
    """Whether an override of this key chooses a member of a config group."""
    return any((CONF / key).glob("*.yaml"))
