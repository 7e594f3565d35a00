"""The configuration: its schema, and how it is composed and checked."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent

# A wheel carries conf/ inside the package; in a source tree it is next to it.
CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())
