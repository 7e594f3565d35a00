"""Reads the code blocks of a page of the documentation, and applies its diffs."""

import re
from pathlib import Path


def blocks(language: str, page: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def write_block(folder: Path, content: str) -> None:
    """Write a block whose first line is the comment `# NAME` to the file of this name."""
    file = folder / content.partition("\n")[0].removeprefix("# ")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def apply_diff(folder: Path, diff: str) -> None:
    """Apply a diff whose first line is `# NAME` to the file of this name."""
    name, *lines = diff.splitlines()
    file = folder / name.removeprefix("# ")
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    assert file.read_text().count(before) == 1, f"{file}: {before}"
    file.write_text(file.read_text().replace(before, after))
