"""The examples of docs/architecture.md are complete: they pass the tests of the project, and train."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import result_of
from tests.support.pages import apply_diff, blocks, small, write_block
from tests.support.processes import REPOSITORY, run_python


def extended_copy(folder: Path) -> Path:
    """A copy of the project with the examples of docs/architecture.md."""
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".*_cache", "outputs")
    shutil.copytree(REPOSITORY, folder, ignore=ignored, dirs_exist_ok=True)
    page = REPOSITORY / "docs" / "architecture.md"
    for content in blocks("python", page) + blocks("yaml", page):
        if content.startswith("# "):
            write_block(folder, content)
    for diff in blocks("diff", page):
        apply_diff(folder, diff)
    return folder


CHECK = """
import json, sys
import pytest
from vitmnist.cli.train import main

trained, tests = map(json.loads, sys.argv[1:])
sys.argv = ["train.py", *trained]
main()
sys.exit(pytest.main(tests))
"""  # one process, because importing torch takes seconds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_documented_examples_are_trained_and_pass_our_own_tests(tmp_path: Path) -> None:
    """Which check, besides the contract of a loader, that nothing takes today's members for all there are."""
    folder = extended_copy(tmp_path)
    members = ["model=mlp", "data/dataset=stripes", "data/loader=indexed", "logger=[tensorboard,json_lines]"]
    members += ["data/augment=compose", "data.augment.operations=[{name: invert, p: 0.2}]"]
    members += ["data/sampler=shuffled_once"]
    parts = ["config", "models/test_models.py", "optim", "loaders/test_base.py", "loaders/test_auto.py"]
    parts += ["training/test_loop.py", "test_api.py"]
    # The other models and loaders are tested where they are, and so is what depends on no member.
    elsewhere = "takes_every_model or meets_the_contract or compiled or deterministic or traceback"
    chosen = f"mlp or indexed or not ({elsewhere} or forkserver or killed or plateau)"
    trained = small([*members, "hydra.run.dir=run"], folder)
    # Other tests use the other cores.
    tests = ["-q", "-n", "0", "-k", chosen, *(f"tests/{part}" for part in parts)]
    layers = ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    for check in (layers, ("-c", CHECK, json.dumps(trained), json.dumps(tests))):
        checked = run_python(*check, folder=folder, timeout=800, PYTHONPATH=str(folder))
        assert checked.returncode == 0, (checked.stdout + checked.stderr)[-5000:]
    result = result_of(folder / "run")
    config = result["config"]
    assert (config["model"]["name"], config["data"]["loader"]["name"]) == ("mlp", "indexed")
    assert config["data"]["sampler"] == {"name": "shuffled_once"}
    assert result["epochs"][0]["eval_acc"] <= result["epochs"][0]["eval_top5"] <= 100
    assert "eval_top5" in (folder / "run" / "epochs.csv").read_text()
    assert len((folder / "run" / "epochs.jsonl").read_text().splitlines()) == 1
