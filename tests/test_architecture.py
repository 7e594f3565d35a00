"""docs/architecture.md is true: its examples train and pass our tests, and each module has a test module."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import result_of
from tests.support.pages import apply_diff, blocks, small, write_block
from tests.support.processes import REPOSITORY, run_python

# Modules without a test module of their own, because the tests of another one, or of a promise, would fail with them.
TESTED_IN = {
    "vitmnist/__main__.py": "tests/cli/test_command.py",
    "vitmnist/checkpoint/manager.py": "tests/cli/test_resume.py",
    "vitmnist/cli/process.py": "tests/cli/test_command.py",
    "vitmnist/cli/report.py": "tests/report/test_write.py",
    "vitmnist/cli/start.py": "tests/cli/test_train_function.py",
    "vitmnist/config/compose.py": "tests/config/test_schema.py",
    "vitmnist/data/sources.py": "tests/loaders/test_make_loader.py",
    "vitmnist/diagnosis/observed_loader.py": "tests/diagnosis/test_stopwatch.py",
    "vitmnist/diagnosis/script_report.py": "tests/diagnosis/test_observer.py",
    "vitmnist/inference/inputs.py": "tests/inference/test_trained_model.py",
    "vitmnist/loaders/decoded.py": "tests/loaders/test_base.py",
    "vitmnist/metrics/epoch_table.py": "tests/metrics/test_epoch_record.py",
    "vitmnist/models/cnn.py": "tests/training/test_fine_tuning.py",
    "vitmnist/registry.py": "tests/config/test_schema.py",
    "vitmnist/replacement/decoded_dataset.py": "tests/replacement/test_from_dataloader.py",
    "vitmnist/replacement/original_dataloader.py": "tests/replacement/test_from_dataloader.py",
    "vitmnist/replacement/row_dataset.py": "tests/replacement/test_from_dataloader.py",
    "vitmnist/runtime/buffers.py": "tests/loaders/test_auto.py",
    "vitmnist/runtime/file_lock.py": "tests/runtime/test_run_folder.py",
    "vitmnist/runtime/signals.py": "tests/cli/test_resume.py",
    "vitmnist/runtime/timer.py": "tests/training/test_loop.py",
    "vitmnist/runtime/torch_world.py": "tests/cli/test_torchrun.py",
    "vitmnist/runtime/world.py": "tests/cli/test_torchrun.py",
    "vitmnist/store/image_codec.py": "tests/replacement/test_sample_dataset.py",
    "vitmnist/store/json_codec.py": "tests/replacement/test_sample_dataset.py",
    "vitmnist/store/pickle_codec.py": "tests/replacement/test_sample_dataset.py",
    "vitmnist/store/read_in_chunks.py": "tests/replacement/test_sample_dataset.py",
    "vitmnist/store/rows.py": "tests/store/test_cache_file.py",
    "vitmnist/store/samples.py": "tests/replacement/test_sample_dataset.py",
    "vitmnist/store/tree.py": "tests/replacement/test_sample_dataset.py",
    "vitmnist/timing/benchmark.py": "tests/diagnosis/test_measure.py",
    "vitmnist/timing/table.py": "tests/diagnosis/test_measure.py",
    "vitmnist/tracking/bottleneck.py": "tests/tracking/test_log.py",
    "vitmnist/tracking/environment.py": "tests/cli/test_train.py",
    "vitmnist/training/batch.py": "tests/training/test_step.py",
}


def test_every_module_has_a_test_module() -> None:
    """An `__init__.py` is tested with the modules of its package."""
    modules = [path.relative_to(REPOSITORY / "vitmnist") for path in REPOSITORY.glob("vitmnist/**/[!_]*.py")]
    modules.append(Path("__main__.py"))
    tests = REPOSITORY / "tests"
    untested = {path for path in modules if not (tests / path.parent / f"test_{path.name}").exists()}
    assert {f"vitmnist/{path.as_posix()}" for path in untested} == TESTED_IN.keys()
    assert [file for file in TESTED_IN.values() if not (REPOSITORY / file).exists()] == []


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
    members += ["data/sampler=shuffled_once", "metrics=[acc,{name: top_k, k: 3}]"]
    parts = ["config", "models/test_vit.py", "optim", "loaders/test_base.py", "loaders/test_auto.py"]
    parts += ["loaders/test_make_loader.py", "training/test_build.py", "training/test_loop.py"]
    parts += ["metrics/test_classification.py", "augment/test_operations.py", "test_own_project.py"]
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
    assert result["epochs"][0]["eval_acc"] <= result["epochs"][0]["eval_top_k"] <= 100
    assert "eval_top_k" in (folder / "run" / "epochs.csv").read_text()
    assert len((folder / "run" / "epochs.jsonl").read_text().splitlines()) == 1
