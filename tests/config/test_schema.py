"""The schema and the files of `conf/`: every key typed, explained and recorded, one file for each member."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from vitmnist.config import CONF, is_under
from vitmnist.config.compose import compose
from vitmnist.config.schema import (
    IGNORED_KEYS,
    Config,
    flatten_keys,
    iterate_metadata,
    iterate_registries,
    to_json_values,
)
from vitmnist.config.validation import validate
from vitmnist.data.datasets.base import DATASETS
from vitmnist.loaders.base import LOADERS
from vitmnist.models import MODELS


def test_the_text_of_a_record_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    for text in ("${oc.env:SECRET}", r"a\\${seed}", "${"):
        recorded = to_json_values(validate(Config, compose([]))) | {"init": text, "init_skip": [text]}
        config = validate(Config, recorded)
        assert (config.init, config.init_skip) == (text, [text])


def test_only_a_key_that_declares_free_keys_is_one_value() -> None:
    flat = flatten_keys({"lr_scale": {"*": 1}, "data": {"lr_scale": {"*": 1}}})
    assert flat == {"lr_scale": "{'*': 1}", "data.lr_scale.*": 1}


def test_no_ignored_key_contains_one_that_affects_the_result_or_the_time() -> None:
    """A report would otherwise pool runs that differ in how often they are saved."""
    affecting = [key for key, metadata in iterate_metadata() if metadata.affects != "nothing"]
    assert "checkpoint.every_minutes" in affecting
    assert not [key for key in affecting if is_under(key, IGNORED_KEYS)]


REGISTRIES = tuple(registry for _, registry in iterate_registries())
FILES = sorted(CONF.rglob("*.yaml"))


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_every_member_has_its_file_and_every_file_its_member(registry) -> None:
    folder = CONF / registry.group
    assert sorted(file.stem for file in folder.glob("*.yaml")) == [*registry.members()]
    for file in folder.glob("*.yaml"):
        values = yaml.safe_load(file.read_text())
        assert values.pop("name") == file.stem
        subgroups = {key for default in values.pop("defaults", []) for key in default if default != "_self_"}
        keys = set(values) | {key.partition("@")[2].partition(".")[0] for key in subgroups if "@" in key}
        options = registry.members()[file.stem].declaration
        assert keys == {field.name for field in fields(options)}, file
        if registry in (DATASETS, LOADERS):
            defaults = asdict(options())  # what `make_loader` and `load_dataset` take where nothing is said
            for key, value in values.items():
                assert value == defaults[key] or "${" in str(value), (file, key)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_opens_with_its_use_and_every_key_has_a_comment(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    opening = [line for line in lines[: next(i for i, line in enumerate(lines) if not line)] if line[:1] == "#"]
    assert any("python train.py" in line for line in opening)
    if file.parent != CONF:
        group = file.parent.relative_to(CONF).as_posix()
        assert any(f"{group}={file.stem}" in line for line in opening)
    section = ""
    for index, line in enumerate(lines):
        key = re.match(r"( *)(?:- )?([\w/@]+(?: /[\w]+)?):(.*)", line)
        if not key:
            continue
        section = key[2] if not key[1] else section
        opens_a_block = not key[3].split("#")[0].strip()
        if section != "hydra" and not opens_a_block and "override /" not in line:
            assert "#" in line or lines[index - 1].lstrip().startswith("#"), f"{file.name}: {line}"


@pytest.mark.parametrize("model", MODELS.members())
def test_every_experiment_takes_every_model(model: str) -> None:
    """It changes the options of a model only in a file for this model."""
    typed = [f"model={model}", "data.dataset.path=pictures"]
    _, unchanged = MODELS.resolve(compose(typed[:1]).model)
    for experiment in [file.stem for file in (CONF / "experiment").glob("*.yaml")]:
        composed = compose([f"experiment={experiment}", *typed[: 2 if experiment == "pictures" else 1]])
        is_changed = MODELS.resolve(validate(Config, composed).model)[1] != unchanged
        has_file = (CONF / "experiment" / "model" / f"{experiment}_{model}.yaml").exists()
        assert is_changed == has_file, experiment
