"""A start imports what it needs and nothing else; importing takes most of the time of a short run."""

from pathlib import Path

from tests.conftest import PLAIN
from tests.support.processes import run_python

RUN = "from vitmnist.cli.train import main; sys.argv = ['train.py', *{arguments}]; main()"
QUESTIONS = """
import os, sys
from vitmnist.cli.train import main

for question in (["--help"], ["--cfg", "job"], ["--info", "defaults"], ["--version"], ["-sc", "query=bash"]):
    sys.argv = ["train.py", *question]
    os.environ["COMP_LINE"] = "vitmnist data/loader=g"  # what tab completion is asked to complete
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
assert not {"torch", "matplotlib", "tensorboard", "PIL"} & set(sys.modules)
"""
HEAVY = {"hydra", "omegaconf", "tensorboard", "matplotlib", "scipy", "einops", "vitmnist.config", "vitmnist.training"}
SCRIPT = """
import atexit, sys, time
assert "torch" not in sys.modules  # Torch reads environment variables that the script may set before it imports torch.
import torch
from torch.utils.data import DataLoader, TensorDataset

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)

for _ in DataLoader(Slow(torch.zeros(60, 3)), batch_size=2):
    pass
print(*sys.modules)
atexit.register(lambda: print(*sys.modules))
"""


def python(program: str, folder: Path) -> str:
    ended = run_python("-c", program, folder=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_each_step_of_a_start_imports_only_what_it_needs(quick: list[str], tmp_path: Path) -> None:
    """In one interpreter, up to the end of a run that draws images."""
    data = ["data/dataset=mnist", "data.dataset.train_size=60", "data.dataset.test_size=20", "epochs=1"]
    arguments = [argument for argument in quick if argument != PLAIN] + data
    absent = {
        "import vitmnist": {"torch"},
        "from vitmnist import from_dataloader": HEAVY | {"vitmnist.loaders"},
        "from vitmnist import audit, diagnose": HEAVY,
        "from vitmnist import load_dataset, make_loader": {
            *("torch._dynamo", "torchvision", "matplotlib", "tensorboard", "hydra", "datasets")
        },
        "import vitmnist.trainer": {"torch._dynamo", "torchvision", "matplotlib", "hydra"},
        RUN.format(arguments=arguments): {"matplotlib", "torchvision", "markdown"},
    }
    record = "open('modules', 'a').write(' '.join(sys.modules) + '\\n')"
    python("import sys\n" + "\n".join(f"{statement}\n{record}" for statement in absent), tmp_path)
    imported = [set(line.split(" ")) for line in (tmp_path / "modules").read_text().splitlines()]
    for (statement, names), modules in zip(absent.items(), imported, strict=True):
        assert not names & modules, statement
    assert "torch" in imported[1]
    assert "tensorboard" in imported[-1]


def test_help_and_completion_do_not_import_torch(tmp_path: Path) -> None:
    printed = python(QUESTIONS, tmp_path)
    assert "data/loader" in printed
    assert "batch_size: 500" in printed
    assert "data/loader=gpu_slice" in printed


def test_a_diagnosed_script_loads_the_loaders_for_its_report_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = "import sys; from vitmnist.__main__ import main; sys.argv[1:] = ['diagnose', 'script.py']; main()"
    at_end_of_script, at_exit = (set(line.split()) for line in python(program, tmp_path).splitlines())
    assert not (HEAVY | {"vitmnist.loaders"}) & at_end_of_script
    assert not HEAVY & at_exit
    assert "vitmnist.diagnosis.candidates" in at_exit
