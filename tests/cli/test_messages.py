"""Each mistake on the command line gets one message, and leaves no records."""

import pickle
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from tests.conftest import Printed, Train
from vitmnist.cli.messages import classify_cli_error
from vitmnist.config import CONF
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.errors import ExitCode
from vitmnist.runtime.run_folder import lock_folder
from vitmnist.tracking.runs import find_runs
from vitmnist.training.checks import check_config

MISTAKES = {  # found when the values are composed and checked
    "data/loader=gpu_slise": "data/loader=gpu_slise: there is no such member; did you mean 'gpu_slice'? allowed: ",
    "bach_size=3": "bach_size: there is no such key; did you mean 'batch_size'? allowed: ",
    "model.detph=3": "model.detph: there is no such key; did you mean 'depth'?",
    "+model._target_=os.system": "model._target_: there is no such key",
    "~optimizer.lr": "optimizer.lr is missing",
    "~model": "Interpolation key 'model' not found",
    "batch_size=many": "batch_size=many: must be int",
    "model.patch_size=four": "model.patch_size=four: must be int",
    "data.loader=ram": "data.loader=ram: this is a config group; set data/loader=NAME",
    "batch_size=${nope}": r"batch_size: Interpolation key 'nope' not found",
    "optimizer.lr=inf": "optimizer.lr=inf: must be finite",
    "trainer.micro_batch=1.5": "trainer.micro_batch=1.5: must be int | auto | null",
    "ema_decay=0": "ema_decay=0.0: must be above 0 and below 1",
    "data/augment=cifar data.augment.operations.3.p=1": "data.augment.operations[3]: list index out of range",
    "data/dataset=image_folder": "data.dataset.path is missing",
    "data/dataset=image_folder data.dataset.path=. data.dataset.mode=red": "expected one of [grey, rgb, auto]",
    "lr=1": "lr: there is no such key; did you mean optimizer.lr?",
    "data.name=mnist": "did you mean name or model.name or data.dataset.name?",
    # Keys of other trainers.
    "fast_dev_run=true": "fast_dev_run: there is no such key; set limit_batches=10",
    "trainer.limit_val_batches=2": "trainer.limit_val_batches: there is no such key; set limit_batches",
    "+debug=1": "debug: there is no such key; set limit_batches=10",
    "task_name=a": "task_name: there is no such key; set name",
}
SEARCH, LR = "hydra/sweeper=optuna hydra.mode=MULTIRUN", "optimizer.lr=interval(0.0001,0.01)"
MISTAKES_OF_RUNS = {  # found when the command line is parsed or a run is set up
    "optimizer.name=adamw": "optimizer.name=adamw: keeps the options of another member; set optimizer=NAME",
    "model=vitt": "model=vitt: there is no such member; did you mean 'vit'? allowed: ",
    "model=null": "Config group override must be a string or a list",
    "~data.augment.operations.1 data/augment=cifar": "(HYDRA_FULL_ERROR=1 shows the traceback)",
    "epochs=1,2": "epochs=1,2: is a sweep; add -m to run it, or brackets around the values of a list; in Python",
    "data/loader@data.loader.base=disk": "Could not override 'data/loader@data.loader.base'. Did you mean",
    "batch_size=24 data.drop_last=true": "batch_size=24 exceeds the 23 images",
    "data.root=/nowhere logger=[tensorboard,{name:wandb,team:us}]": "logger.1.team: there is no such key",  # at once
    "schedule=cosine epochs=2 schedule.warmup_epochs=2": "schedule.warmup_epochs=2: must be below epochs=2",
    "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0": "optimizer.nesterov=true needs optimizer.momentum",
    "patience=2": "patience=2: needs a validation split",
    "device=cuda:99": "device=cuda:99: torch sees ",
    "data/loader=auto data.loader.candidates=[rem]": "data.loader.candidates=rem: not known; did you mean 'ram'?",
    "data/dataset=image_folder data.dataset.path=nowhere": "data.dataset.path=nowhere: there is no such folder",
    "--config-dir=own": "cnn.yaml would be ignored: the project has a file of that name; rename it",
    "--epochs 3": "--epochs: there is no such option; set keys without dashes, as in epochs=3",
    "hydra.run.dir=file/run": "file/run: Not a directory; set another folder with hydra.run.dir=FOLDER",
    "data.root=~/mnist": """data.root=~/mnist: cannot be parsed; quote text with special characters: 'data.root="~/""",
    "epochs": "epochs: must be KEY=VALUE",
    "epochs=range(a)": "TypeError while evaluating 'range(a)'",
    # Given weights, and learning rates by parameter.
    r"init=no\${where}": "init=no${where}: there is no such folder of a run, .safetensors, .pt or .pth file",
    "init=cut.safetensors": "cut.safetensors: is damaged",
    "init=code.pt": "its content is not only plain values and tensors",
    "model=cnn lr_scale={heads.*:0.1}": "lr_scale: 'heads.*' fits no parameter; the model has features.0.wei",
    "lr_scale={*:0}": "freezes all parameters",
    # Sweeps.
    "repeats=3": "repeats=3: repeats the jobs of a sweep; add -m",
    "-m data/loader=ram,rom": "data/loader=rom: there is no such member; did you mean 'ram'? allowed: ",
    "-m seed=1,2 hydra.sweep.dir=used": "set another folder, or resume with resume=auto",
    # Searches.
    "hparams_search=accuracy repeats=2": "repeats: has no effect in a search; set repeats=1",
    f"{SEARCH} optimizer.lr=0.1": "hydra/sweeper=optuna: nothing to search; set KEY=interval(LOW,HIGH) or",
    f"{SEARCH} optimizer.lr=interval(2,1)": "optimizer.lr=interval(2,1): cannot be searched: ",
    f"{SEARCH} {LR} hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials=0: must be a whole number, at least 1",
    f"{SEARCH} {LR} monitor=speed": "monitor=speed: is not among the metrics of an epoch; ",
}
OF_SWEEPS = ("-m", "repeats", "hparams_search", "hydra/sweeper")  # The messages of these mistakes are one line.
FILES = {  # files that exist before the command
    "file": b"",
    "used/0/result.json": b"{}",
    "cut.safetensors": b"cut",
    "code.pt": pickle.dumps(print, 2),
    "own/model/cnn.yaml": b"width: 4",
}


def test_a_mistake_in_the_values_is_one_message() -> None:
    wrong = {}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for mistake, expected in MISTAKES.items():
            try:
                config = validate(Config, compose("config", ["data/dataset=kmnist", *mistake.split()]))
                check_config(config, torch.device("cpu"))
                wrong[mistake] = "is accepted"
            except Exception as error:
                failure = classify_cli_error(error)
                if not failure.is_user_error or expected not in failure.message or "\n" in failure.message:
                    wrong[mistake] = failure.message
    assert wrong == {}


@pytest.mark.parametrize("mistake", MISTAKES_OF_RUNS)
def test_a_mistake_gets_one_message_and_leaves_no_records(
    mistake: str, tiny_root: Path, tmp_path: Path, refuse: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    message = refuse("data/dataset=kmnist", f"data.root={tiny_root}", *mistake.split()).strip()
    assert message.startswith("error: ")
    assert MISTAKES_OF_RUNS[mistake] in message
    assert message.count("\n") <= (not mistake.startswith(OF_SWEEPS))
    left = {path for path in tmp_path.rglob("*") if path.is_file()} - {tmp_path / name for name in FILES}
    assert {path.name for path in left} <= {".lock", "vitmnist.log", "multirun.yaml"}
    assert find_runs([tmp_path]) == [tmp_path / "used" / "0"]


def test_the_traceback_can_be_requested_and_keeps_the_exit_code(
    train_here: Train, refuse: Printed, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refuse(*quick, "+model.xyz=3") == "error: model.xyz: there is no such key; allowed: width\n"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with lock_folder(tmp_path / "here"):
        for arguments in (["hydra.run.dir=here"], ["-m", "hydra.sweep.dir=here"]):
            ended = train_here(*quick, *arguments)
            assert ended.returncode == ExitCode.UNFINISHED
            assert "Traceback" in ended.stderr
            assert "InUseError: here: in use by another run" in ended.stderr
