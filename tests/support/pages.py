"""Reads the code blocks and commands of the documentation, and applies its diffs."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import BRIEF, PLAIN
from tests.support.processes import REPOSITORY

README = REPOSITORY / "README.md"
PAGES = [README, REPOSITORY / "benchmarks" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES += [REPOSITORY / "CONTRIBUTING.md"]
FEW = ["epochs=1", "data.dataset.train_size=40", "data.dataset.test_size=20", "data.root=data"]


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


def commands(start: str, *pages: Path) -> list[list[str]]:
    """The arguments of every command in a bash block of some pages (default: all), each once; `A && B` is two."""
    text = "".join(block for page in pages or PAGES for block in blocks("bash", page)).replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    parts = dict.fromkeys(part.strip() for line in lines for part in line.split("&&"))
    return [shlex.split(part.partition(" > ")[0])[len(start.split()) :] for part in parts if part.startswith(start)]


def draw(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((30, 20), 64).save(file)


def small(arguments: list[str], folder: Path) -> list[str]:
    """The arguments with few images and one repeat, and with the image files that they name."""
    if "data.dataset.path=pictures" in arguments:
        draw(*(folder / "pictures" / f"class {number % 2}" / f"{number}.png" for number in range(110)))
    if "data.dataset.path=scans.npz" in arguments:
        images, labels = np.random.default_rng(0).integers(0, 256, (80, 28, 28), np.uint8), np.arange(80) % 2
        parts = {"images": images[:60], "labels": labels[:60], "test_images": images[60:], "test_labels": labels[60:]}
        np.savez(folder / "scans.npz", **parts)
    if "data.dataset.path=beans" in arguments:
        datasets = pytest.importorskip("datasets")
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["sick", "well"])})
        values = {"image": 110 * [Image.effect_noise((30, 20), 64)], "label": 55 * [0, 1]}
        datasets.Dataset.from_dict(values, features).save_to_disk(folder / "beans")
    if "experiment=flowers" in arguments:
        (experiment,) = blocks("yaml", REPOSITORY / "docs" / "command-line.md")
        file = folder / "mine" / "experiment" / "flowers.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(experiment)
        draw(*(folder / "flowers" / f"class {number % 2}" / f"{number}.png" for number in range(110)))
    few = [] if {"--help", "--cfg"} & set(arguments) else [*FEW, PLAIN, "repeats=1"]
    few += ["batch_size=20"] if "experiment=smoke" in arguments else []  # half of its jobs
    few += ["model.patch_size=32"] if "data.crop_size=224" in arguments else []  # few tokens
    is_timed = {"data/loader=auto", "experiment=pictures"} & set(arguments)
    return [*arguments, *few, *(BRIEF if is_timed else [])]
