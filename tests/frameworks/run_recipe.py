"""Run a script with and without `from_dataloader`, in one and in two ranks, and record the batches of each rank.

    python -m tests.frameworks.run_recipe SCRIPT FOLDER MODULE…

The modules are imported once, and each rank is a fork of this process. FOLDER gets `VARIANT-RANKS-RANK.json`.
"""

import hashlib
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitmnist
from tests.support.processes import free_port

# The replaced text of each variant, and the numbers of ranks.
VARIANTS = {
    "plain": ({}, (1, 2)),
    "workers": ({"shuffle=True)": "shuffle=True, num_workers=1)"}, (1,)),
    "distributed": ({"no_aug=True": "no_aug=True, distributed=True"}, (2,)),  # The argument of timm
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


def main() -> None:
    script, folder, *modules = sys.argv[1:]
    for module in (*modules, "torchvision", "vitmnist.replacement.from_dataloader"):
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    text = Path(script).read_text(encoding="utf-8")
    for name, (changes, sizes) in VARIANTS.items():
        if not all(before in text for before in changes):
            continue
        source = text
        for before, after in changes.items():
            source = source.replace(before, after)
        for kind, replaces in (("original", lambda loader: loader), ("replaced", vitmnist.from_dataloader)):
            vitmnist.from_dataloader = replaces
            for ranks in sizes:
                port = free_port()
                files = [Path(folder, f"{name}-{ranks}-{rank}.{kind}.json") for rank in range(ranks)]
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


if __name__ == "__main__":
    main()
