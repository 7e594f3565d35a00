"""Writes the configuration reference: every group, member and key, from `conf/` and the options dataclasses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import get_args, get_type_hints

import yaml
from yaml import MappingNode, Node, SequenceNode

from vitmnist.config import CONF
from vitmnist.config.schema import Config, TrainerConfig
from vitmnist.config.validation import BOUNDS, allowed_kinds
from vitmnist.data.augment import OPERATIONS
from vitmnist.data.augment.compose import AugmentOptions
from vitmnist.data.datasets import DATASETS
from vitmnist.data.loaders import LOADERS
from vitmnist.models import MODELS
from vitmnist.optim import OPTIMIZERS, SCHEDULES

REGISTRIES = (MODELS, DATASETS, LOADERS, OPTIMIZERS, SCHEDULES)
SCHEMAS = {"data/augment": AugmentOptions, "trainer": TrainerConfig}  # of groups whose members have the same keys
PRESETS = ("experiment", "hparams_search", "hydra/launcher")  # groups whose members set keys of others
INTRODUCTION = """\
Every key of this project with its default, its meaning, and the values that it may have.
[Command line](docs/command-line.md) explains how keys and groups are typed. An unknown key, a value of another type, or
one out of bounds is an error.
"""


@dataclass(frozen=True)
class Entry:
    """A key of a YAML file. `path` has a number for each place in a list."""

    path: tuple[str, ...]
    value: str
    comment: str


def configuration_page() -> str:
    """The Markdown of the page."""
    defaults = _default_members()
    own = [entry for entry in _entries(CONF / "config.yaml") if entry.path[0] not in ("defaults", "hydra")]
    parts = ["# Configuration", INTRODUCTION, "## Keys of no group { #top-level }"]
    parts += [_definition(entry, "", Config) for entry in own]
    for group in (*(registry.group for registry in REGISTRIES), *SCHEMAS, *PRESETS):
        default = f"The default is `{defaults[group]}`." if group in defaults else "No member is the default."
        parts += [f"## `{group}` {{ #{_anchor(group)} }}", default]
        for file in sorted((CONF / group).glob("*.yaml")):
            parts += _member(group, file)
        if group == "data/augment":
            parts += ["### Operations { #operations }", "The parameters of `data.augment.operations`.", *_operations()]
    return "\n\n".join(parts) + "\n"


def _default_members() -> dict[str, str]:
    """The members that `config.yaml` chooses, by group."""
    groups = [item for item in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"] if isinstance(item, dict)]
    return {group: member for item in groups for group, member in item.items() if member}


def _anchor(*names: str) -> str:
    return "-".join(names).replace("/", "-")


def _member(group: str, file: Path) -> list[str]:
    """The heading, description, commands and keys of a member."""
    description, commands = _opening(file)
    parts = [f"### `{file.stem}` {{ #{_anchor(group, file.stem)} }}", description, f"```bash\n{commands}\n```"]
    if group in PRESETS:
        _, _, body = file.read_text().partition("\n\n")
        return [*parts, f"```yaml\n{body}```"]
    options = {registry.group: registry for registry in REGISTRIES}
    schema = options[group].options_of(file.stem) if group in options else SCHEMAS[group]
    place = group.replace("/", ".")
    return [*parts, *(_definition(entry, place, schema) for entry in _entries(file) if entry.path != ("name",))]


def _opening(file: Path) -> tuple[str, str]:
    """The description and the commands in the comment that opens a file."""
    lines = [line[2:] for line in takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())]
    prose = " ".join(line for line in lines if line and line[0] not in " @")
    description = prose.partition(" — ")[2] or prose
    commands = (line[2:] for line in lines if line.startswith("  "))
    remarked = [re.sub(r"(\S) {3,}(\S)", r"\1  # \2", line) for line in commands]
    return _escaped(description[0].upper() + description[1:]), "\n".join(remarked)


def _entries(file: Path) -> list[Entry]:
    text = file.read_text()
    root = yaml.compose(text)
    return list(_walk(root, (), text.splitlines())) if root else []


def _walk(node: Node, path: tuple[str, ...], lines: list[str]) -> Iterator[Entry]:
    """The keys below a node; one that opens a block only if it has a comment."""
    if isinstance(node, SequenceNode):
        for place, item in enumerate(node.value):
            yield from _walk(item, (*path, str(place)), lines)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if isinstance(value, (SequenceNode, MappingNode)) and not value.flow_style:
                if comment := _comment(key, lines):
                    yield Entry(inner, "", comment)
                yield from _walk(value, inner, lines)
            else:
                start, end = value.start_mark, value.end_mark
                yield Entry(inner, lines[start.line][start.column : end.column], _comment(value, lines))


def _comment(node: Node, lines: list[str]) -> str:
    """The comment that ends the line of a node, and goes on in the lines below it."""
    found = re.search(r"# (.*)", lines[node.end_mark.line][node.end_mark.column :])
    if not found:
        return ""
    below = takewhile(lambda line: re.match(r" +# ", line), lines[node.end_mark.line + 1 :])
    return " ".join([found[1], *(line.lstrip(" #") for line in below)])


def _definition(entry: Entry, place: str, schema: type) -> str:
    """What is typed for a key below `place` to have its default, what it means, and the values that it may have."""
    key = ".".join([place, *entry.path] if place else entry.path)
    if entry.path[0] == "defaults":
        group, _, inner = entry.path[-1].lstrip("/").partition("@")
        key, kind = f"{group}@{place}.{inner}", "a member of the group"
    elif "operations" in entry.path[:-1]:
        kind = "see [Operations](#operations)"
    else:
        for name in entry.path[:-1]:
            schema = get_type_hints(schema)[name]
        kind = _described(schema, entry.path[-1])
    if entry.value == "???":
        return _term(f"`{key}` (required)", entry.comment, kind)
    return _term(f"`{key}={entry.value}`" if entry.value else f"`{key}`", entry.comment, kind)


def _term(term: str, comment: str, kind: str) -> str:
    return f"{term}\n:   {_escaped(comment)}{'<br>' if comment else ''}*{kind}*"


def _described(schema: type, name: str) -> str:
    """The type and the bounds of a field of a dataclass."""
    kind = get_type_hints(schema)[name]
    (metadata,) = (field.metadata for field in fields(schema) if field.name == name)
    enums = [one for one in (get_args(kind) or (kind,)) if isinstance(one, type) and issubclass(one, Enum)]
    kinds = [", ".join(member.value for member in enum) for enum in enums]
    limits = {bound: f"{limit:,}".removesuffix(".0") for bound, limit in metadata.items() if bound in BOUNDS}
    bounds = " and ".join(f"{bound} {limit}" for bound, limit in limits.items())
    return ", ".join(filter(None, [" or ".join(filter(None, [*kinds, allowed_kinds(kind)])), bounds]))


def _operations() -> list[str]:
    """The parameters of each operation, with their defaults."""
    terms = []
    for name in OPERATIONS.names():
        schema = OPERATIONS.options_of(name)
        terms.append(f"**{name}** — {_escaped(schema.__doc__ or '')}")
        for parameter, default in asdict(schema()).items():
            terms.append(_term(f"`{name}`: `{parameter}={json.dumps(default)}`", "", _described(schema, parameter)))
    return terms


def _escaped(text: str) -> str:
    return re.sub(r"[*_<|\[\]]", r"\\\g<0>", text)
