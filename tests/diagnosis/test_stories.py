"""Each story of docs/diagnose.md has the bottleneck that the page names, and another one after its change."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import apply_diff, blocks, write_block
from tests.support.pictures import PHOTOS, draw_photos
from tests.support.processes import REPOSITORY, run_python

PAGE = REPOSITORY / "docs" / "diagnose.md"
SCRIPT = "docs/examples/photos.py"
FEW = ["--steps=20", "--warm-up=2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts of the page and the example, and with 160 of its pictures."""
    for content in blocks("python", PAGE):
        if content.startswith("# "):
            write_block(tmp_path, content)
    shutil.copytree(PHOTOS.parent, tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    draw_photos(160)
    return tmp_path


def changes(script: str) -> list[str]:
    """The diffs of a script, in the order of the page."""
    return [diff for diff in blocks("diff", PAGE) if diff.startswith(f"# {script}\n")]


def run(folder: Path, *arguments: str) -> str:
    """The output of Python, which must exit with code 0."""
    process = run_python(*arguments, folder=folder)
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def observe(folder: Path, script: str, *more: str) -> str:
    """The output of the page's command for a script."""
    documented = re.findall(rf"^\$ vitmnist (diagnose .*) {script}\b", PAGE.read_text(), re.MULTILINE)
    (options,) = set(documented)
    return run(folder, "-m", "vitmnist", *options.split(), *more, script)


def measure(folder: Path, script: str) -> str:
    """The output of a script that calls `diagnose`, with fewer batches and a longer time limit."""
    text, call = (folder / script).read_text(), "diagnose(loader, step, "
    assert text.count(call) == 1
    (folder / "few.py").write_text(text.replace(call, f"{call}batches=20, seconds=600, "))
    return run(folder, "few.py")


def verdict(printed: str) -> tuple[str, int]:
    """The bottleneck (input-bound, balanced or compute-bound), and the percentage of the time spent waiting."""
    ((bottleneck, share),) = re.findall(r"([\w-]+): (\d+)% of the time is spent waiting", printed)
    return bottleneck, int(share)


@pytest.mark.slow  # Each process imports torch.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "before"), [("norms.py", "compute-bound"), ("signals.py", "input-bound")])
def test_a_script_has_another_bottleneck_after_its_change(folder: Path, script: str, before: str) -> None:
    """On busy cores, the new verdict may be "balanced", so the shares of waiting are compared too."""
    bottleneck, waiting_pct = verdict(observe(folder, script, *FEW))
    assert bottleneck == before
    for diff in changes(script):
        apply_diff(folder, diff)
    # Use all steps of the page: 20 steps of a few ms are too few if a core is busy for 0.1 s.
    bottleneck, changed_pct = verdict(observe(folder, script))
    assert bottleneck in ("compute-bound", "balanced")
    assert (changed_pct > waiting_pct) == (before == "compute-bound")


@pytest.mark.slow  # It measures three ways to load.
@pytest.mark.timeout(300)
def test_photos_are_input_bound_until_they_are_decoded_once(folder: Path) -> None:
    first, *rest = changes(SCRIPT)
    apply_diff(folder, first)
    printed = measure(folder, SCRIPT)
    assert verdict(printed)[0] == "input-bound"
    for row in ("as it is", "num_workers=2", "from_dataloader"):
        assert re.search(rf"^{row} +\d+% +[\d.]+ s", printed, re.MULTILINE), printed
    for diff in rest:
        apply_diff(folder, diff)
    assert verdict(measure(folder, SCRIPT))[0] != "input-bound"


def test_the_page_and_the_example_have_the_command_of_the_readme() -> None:
    lines = "".join(blocks("bash", REPOSITORY / "README.md")).splitlines()
    (command,) = (line for line in lines if "vitmnist diagnose" in line)
    assert f"$ {command}\n" in PAGE.read_text()
    assert f"\n    {command}\n" in PHOTOS.read_text()


@pytest.mark.slow  # It draws many pictures.
@pytest.mark.timeout(300)
def test_the_command_of_the_readme_works_in_a_fresh_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds the bottleneck, and leaves only the pictures, which git ignores and the next start uses."""
    assert PHOTOS.read_text().count("PICTURES = 2000\n") == 1
    script = tmp_path / SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text(PHOTOS.read_text().replace("PICTURES = 2000\n", "PICTURES = 400\n"))
    (command,) = (line for line in "".join(blocks("bash", REPOSITORY / "README.md")).splitlines() if SCRIPT in line)
    printed = run(tmp_path, "-m", *command.split())
    assert verdict(printed)[0] == "input-bound"
    assert f"  change  {SCRIPT}:59   loader = vitmnist.from_dataloader(loader)" in printed
    assert {file.name for file in tmp_path.iterdir()} == {"docs", "photos"}
    pictures = {file: file.stat().st_mtime_ns for file in tmp_path.glob("photos/*/*.jpg")}
    assert len(pictures) == 400
    for name in ("photos", "photos.unfinished"):
        subprocess.run(["git", "check-ignore", "--quiet", f"{name}/a.jpg"], cwd=REPOSITORY, check=True)
    monkeypatch.chdir(tmp_path)
    draw_photos(400)
    assert not capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("photos/*/*.jpg")} == pictures
