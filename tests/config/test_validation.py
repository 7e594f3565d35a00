"""The configuration: every key typed and explained, and every mistake in it named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from vitmnist.config.labels import run_label
from vitmnist.config.schema import Config, DataConfig
from vitmnist.config.validation import validate
from vitmnist.data.datasets import DATASETS
from vitmnist.data.loaders import LOADERS
from vitmnist.errors import ConfigError
from vitmnist.models import MODELS
from vitmnist.models.vit import ViTOptions
from vitmnist.optim import OPTIMIZERS, SCHEDULES

CONF = REPOSITORY / "conf"
REGISTRIES = (DATASETS, LOADERS, MODELS, OPTIMIZERS, SCHEDULES)
FILES = sorted(CONF.rglob("*.yaml"))
VIT = {"patch_size": 7, "dim": 64, "depth": 6, "heads": 8, "head_dim": 8, "mlp_dim": 128}


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_every_member_has_its_file_and_every_file_its_member(registry) -> None:
    folder = CONF / registry.group
    assert sorted(file.stem for file in folder.glob("*.yaml")) == registry.names()
    for file in folder.glob("*.yaml"):
        values = yaml.safe_load(file.read_text())
        assert values.pop("name") == file.stem
        subgroups = {key for default in values.pop("defaults", []) for key in default if default != "_self_"}
        keys = set(values) | {key.partition("@")[2].partition(".")[0] for key in subgroups if "@" in key}
        options = registry.options_of(file.stem)
        assert keys == {field.name for field in fields(options)}, file
        if registry in (DATASETS, LOADERS):
            defaults = asdict(options())  # what `make_loader` and `load_dataset` take where nothing is said
            for key, value in values.items():
                assert value == defaults[key] or "${" in str(value), (file, key)


def test_a_module_is_found_by_being_in_its_package(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "vitmnist", tmp_path / "vitmnist", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CONF, tmp_path / "conf")
    packages = ("vitmnist.data.augment", "vitmnist.data.loaders", "vitmnist.models", "vitmnist.optim")
    for package in packages:
        (tmp_path / package.replace(".", "/") / "added.py").write_text("print(__name__)")
    ended = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(packages)}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert sorted(ended.stdout.decode().split()) == [f"{package}.added" for package in packages]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_file_opens_with_its_use_and_every_key_has_a_comment(file: Path) -> None:
    lines = file.read_text().splitlines()
    opening = [line for line in lines[: next(i for i, line in enumerate(lines) if not line)] if line[:1] == "#"]
    assert any("python train.py" in line for line in opening)
    if file.parent != CONF:
        group = file.parent.relative_to(CONF).as_posix()
        assert any(f"{group}={file.stem}" in line for line in opening)
    section = ""
    for number, line in enumerate(lines):
        key = re.match(r"( *)(?:- )?([\w/@]+(?: /[\w]+)?):(.*)", line)
        if not key:
            continue
        section = key[2] if not key[1] else section
        opens_a_block = not key[3].split("#")[0].strip()
        if section != "hydra" and not opens_a_block and "override /" not in line:
            assert "#" in line or lines[number - 1].lstrip().startswith("#"), f"{file.name}: {line}"


def test_top_level_keys_are_the_schema() -> None:
    values = yaml.safe_load((CONF / "config.yaml").read_text())
    groups = {key for default in values.pop("defaults") if isinstance(default, dict) for key in default}
    data = set(values.pop("data")) | {group.partition("/")[2] for group in groups if group.startswith("data/")}
    top = (set(values) | groups | {"data"}) - {"hydra", "experiment", "hparams_search"}
    assert {key for key in top if "/" not in key} == {field.name for field in fields(Config)}
    assert data == {field.name for field in fields(DataConfig)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**VIT, "detph": 3}, r"^model\.detph: there is no such key; did you mean 'depth'\? allowed: depth, dim"),
        ({**VIT, "_target_": "os.system"}, r"^model\._target_: there is no such key"),
        ({**VIT, "depth": "x"}, r"^model\.depth=x: must be a whole number$"),
        ({**VIT, "depth": 1.5}, r"^model\.depth=1\.5: must be a whole number$"),
        ({**VIT, "depth": None}, r"^model\.depth=null: must be a whole number$"),
        ({**VIT, "depth": 0}, r"^model\.depth=0: must be at least 1$"),
        ({**VIT, "depth": "???"}, r"^model\.depth is missing"),
        ({key: VIT[key] for key in VIT if key != "depth"}, r"^model\.depth is missing"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(ViTOptions, values, "model")
    assert validate(ViTOptions, {**VIT, "depth": "3"}, "model") == ViTOptions(depth=3)


def test_bounds_refuse_what_is_not_a_number() -> None:
    schema, values = OPTIMIZERS.options_of("adam"), OPTIMIZERS.complete({"name": "adam"})
    del values["name"]
    with pytest.raises(ConfigError, match="lr=nan: must be above 0"):
        validate(schema, {**values, "lr": float("nan")})
    with pytest.raises(ConfigError, match=r"beta1=1\.0: must be at least 0 and below 1"):
        validate(schema, {**values, "beta1": 1.0})


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "defaults"),
        (["data/loader=gpu_slice", "batch_size=5000"], "gpu_slice-bs5000"),
        (["model=cnn", "optimizer.lr=0.01", "+x=1"], "cnn-lr0.01-x1"),
        (["data/loader=prefetch", "data/loader@data.loader.base=disk"], "prefetch-basedisk"),
        (["data.root=/some/where", "model.x=a b/c", "~model"], "xa_b_c-no_model"),
        (
            ["data.dataset.path=/data/pictures/of/flowers/and/of/many/trees", "model=cnn", f"+x={'y' * 40}", "seed=7"],
            "path_data_p_wers_and_of_many_trees-cnn-xyyyyyyyyyy_yyyyyyyyyyyyyyyyyyyyyy-seed7",
        ),
    ],
)
def test_folders_are_named_after_what_was_typed(overrides: list[str], label: str) -> None:
    assert run_label(overrides) == label


@given(st.lists(st.text()))
def test_any_override_makes_a_folder_name(overrides: list[str]) -> None:
    label = run_label(overrides)
    assert 0 < len(label) <= 80
    assert re.fullmatch(r"[\w.+-]+", label)
