"""Writes the configuration reference: the YAML file of every group member, whose comments explain its keys."""

import json
from dataclasses import asdict
from pathlib import Path

from vitmnist.augment.base import OPERATIONS
from vitmnist.config import CONF

INTRODUCTION = """\
# Configuration

Every key of this project with its default and its meaning, as in the files below `conf/`.
[Command line](docs/command-line.md) explains how to set keys and groups. An unknown key, a value of another type, or
one out of bounds is an error that says what is allowed.
"""


def configuration_page() -> str:
    """The Markdown of the page: `config.yaml`, then each group with its members."""
    parts = [INTRODUCTION, "## Keys of no group { #top-level }", _listing(CONF / "config.yaml")]
    files = sorted(CONF.glob("*/**/*.yaml"))
    for folder in dict.fromkeys(file.parent for file in files):
        group = folder.relative_to(CONF).as_posix()
        parts.append(f"## `{group}` {{ #{_anchor(group)} }}")
        for file in (file for file in files if file.parent == folder):
            parts += [f"### `{file.stem}` {{ #{_anchor(group, file.stem)} }}", _listing(file)]
    parts += ["## Operations { #operations }", "What `data.augment.operations` may name, with the default parameters."]
    for name, member in OPERATIONS.members().items():
        parts.append(f"**{name}** — {member.options_type.__doc__}\n\n`{json.dumps(asdict(member.options_type()))}`")
    return "\n\n".join(parts) + "\n"


def _anchor(*names: str) -> str:
    return "-".join(names).replace("/", "-")


def _listing(file: Path) -> str:
    return f"```yaml\n{file.read_text(encoding='utf-8')}```"
