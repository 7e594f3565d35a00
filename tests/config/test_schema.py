"""The schema and the files of `conf/`: every key typed, explained and recorded. Folders are named after overrides."""

import re
import sys
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from vitmnist.augment.base import OPERATIONS
from vitmnist.config import CONF, is_under
from vitmnist.config.compose import compose, make_job_name, make_run_label
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
from vitmnist.registry import import_members


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
        options = registry.members()[file.stem].options_type
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


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "defaults"),
        (["data/loader=gpu_slice", "batch_size=5000"], "gpu_slice-batch_size_5000"),
        (["model=cnn", "optimizer.lr=0.01", "+x=1"], "cnn-lr_0.01-x_1"),
        (["data/loader=prefetch", "data/loader@data.loader.base=disk"], "prefetch-base_disk"),
        (["data.root=/some/where", "model.x=a b/c", "~model"], "x_a_b_c-no_model"),
        (["init=" + "y" * 90], "init_" + "y" * 35),
        (["name=base", "tags=[pets]", "notes=well", "data.root=x"], "defaults"),
        (['init=<>:"|?*', "optimizer.lr=0."], "init_-lr_0"),
    ],
)
def test_folders_are_named_after_the_overrides(overrides: list[str], label: str) -> None:
    assert make_run_label(overrides) == label


def test_a_job_is_named_after_its_own_overrides_and_needs_no_quotes() -> None:
    typed = ["data.dataset.path=/ä/modern & old/{}", "optimizer.lr=1e+3", "model=cnn", "epochs=1"]
    assert make_job_name(7, typed, ["model", "epochs"]) == "7-path_modern_old_-lr_1e_3"
    assert make_job_name(7, typed[2:], ["model", "epochs"]) == "7"
    assert len(make_job_name(1000, 20 * typed, [])) <= 45


def test_a_module_is_found_by_being_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added.py").touch()
    for registry in (OPERATIONS, *REGISTRIES):
        package = import_module(registry.package)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        import_members.cache_clear()
        registry.members()
        assert sys.modules.pop(f"{registry.package}.added").__file__ == str(tmp_path / "added.py")


def test_a_registered_name_is_not_taken_again() -> None:
    """This also holds for a `partial`, which has no name."""
    DATASETS.members()
    with pytest.raises(ValueError, match="data/dataset: 'fashion_mnist' is registered already"):
        DATASETS.register("fashion_mnist")(print)
