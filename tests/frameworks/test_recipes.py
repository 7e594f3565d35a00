"""The recipes of docs/recipes.md train on the same batches to the same weights with and without `from_dataloader`."""

import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitmnist
from tests.support.pages import blocks, write_block
from tests.support.pictures import draw_photos
from tests.support.processes import REPOSITORY, free_port

PICTURES = 64
EPOCHS = 2
# For each variant, what it replaces in a script that has it, and the numbers of ranks
VARIANTS = {
    "plain": ("", "", (1, 2)),
    "workers": ("shuffle=True)", "shuffle=True, num_workers=1)", (1,)),
    "distributed": ("no_aug=True", "no_aug=True, distributed=True", (2,)),  # The argument of timm
}


def train(source: str, file: Path, ranks: int, rank: int, port: int) -> None:
    """One rank of a script, in the environment that torchrun makes."""
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "recipe"}
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in {**group, **address}.items()})
    os.environ.update(PL_TRAINER_DEVICES=str(ranks), PL_TRAINER_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    seen: list[Any] = []
    cross_entropy = nn.functional.cross_entropy

    def recorded(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, labels, **options)
        seen.append((labels.tolist(), loss.item()))
        return loss

    nn.functional.cross_entropy = recorded
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "distributed=True" in source:
        torch.distributed.init_process_group("gloo")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "recipe", "exec"), names)
    weights = b"".join(value.numpy().tobytes() for value in names["model"].state_dict().values())
    dataset = type(names["loader"].dataset).__name__
    record = {"seen": seen, "weights": hashlib.sha256(weights).hexdigest(), "dataset": dataset}
    file.write_text(json.dumps(record), encoding="utf-8")


def run_recipe(script: str, folder: Path, modules: list[str]) -> None:
    """Run a script with and without `from_dataloader`, and write the batches of each rank to `VARIANT-RANKS-RANK.json`.

    The modules are imported once, and each rank is a fork of this process.
    """
    output = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    for module in (*modules, "torchvision", "vitmnist.replacement.from_dataloader"):
        importlib.import_module(module)
    gc.freeze()  # The first collection of each fork would copy the memory of all these objects.
    fork = multiprocessing.get_context("fork")
    text = (folder / script).read_text(encoding="utf-8")
    for name, (before, after, sizes) in VARIANTS.items():
        if before not in text:
            continue
        source = text.replace(before, after)
        for kind, replaces in (("original", lambda loader: loader), ("replaced", vitmnist.from_dataloader)):
            vitmnist.from_dataloader = replaces
            for ranks in sizes:
                port = free_port()
                files = [folder / f"{name}-{ranks}-{rank}.{kind}.json" for rank in range(ranks)]
                processes = [
                    fork.Process(target=train, args=(source, file, ranks, rank, port))
                    for rank, file in enumerate(files)
                ]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join(100)
                    if process.exitcode:
                        sys.exit(f"{name}, {kind}, {ranks} ranks: exit code {process.exitcode}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts of the page and 64 pictures."""
    for content in blocks("python", REPOSITORY / "docs" / "recipes.md"):
        if content.startswith("# "):
            write_block(tmp_path, content)
    monkeypatch.chdir(tmp_path)
    draw_photos(PICTURES)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "modules", "variants"),
    [
        ("with_accelerate.py", ["accelerate"], {"plain-1", "plain-2", "workers-1"}),
        ("with_lightning.py", ["lightning"], {"plain-1", "plain-2", "workers-1"}),
        ("with_transformers.py", ["transformers.trainer", "transformers.models.vit"], {"plain-1", "plain-2"}),
        ("with_timm.py", ["timm.data"], {"plain-1", "plain-2", "distributed-2"}),
        ("with_albumentations.py", ["albumentations"], {"plain-1", "plain-2", "workers-1"}),
        ("with_monai.py", ["monai"], {"plain-1", "plain-2", "workers-1"}),
    ],
)
def test_a_recipe_trains_on_the_batches_of_the_original(
    script: str, modules: list[str], variants: set[str], folder: Path
) -> None:
    is_random = script in ("with_albumentations.py", "with_monai.py")
    if is_random and not find_spec(*modules):
        pytest.skip("needs vitmnist[recipes]")
    process = multiprocessing.get_context("forkserver").Process(target=run_recipe, args=(script, folder, modules))
    process.start()
    process.join(220)
    assert process.exitcode == 0, (folder / "output.log").read_text()
    records: dict[str, Any] = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    ranks = {name.removesuffix(".original") for name in records if name.endswith(".original")}
    assert {name[: name.rindex("-")] for name in ranks} == variants
    for name in ranks:
        original, replaced = records[f"{name}.original"], records[f"{name}.replaced"]
        kind = "TransformedDataset" if is_random else "RowDataset"
        assert replaced.pop("dataset") == kind != original.pop("dataset")
        assert original == replaced
        # timm shards only with `distributed=True`. A script without a framework does not shard.
        is_whole = is_random or (script == "with_timm.py" and name.startswith("plain"))
        part = 2 if "-2-" in name and not is_whole else 1
        assert sum(len(labels) for labels, _ in original["seen"]) == EPOCHS * PICTURES // part
