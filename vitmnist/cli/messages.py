"""Errors of Hydra and OmegaConf in one line, and what to set for keys that people of other trainers type."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from vitmnist.cli.arguments import value_of
from vitmnist.config import CONF
from vitmnist.config.compose import compose
from vitmnist.config.validation import refused_value
from vitmnist.config.values import flatten
from vitmnist.errors import Failure, MissingExtraError, UnknownKeyError, allowed_names, classify

# Hydra's launchers that come with a plugin, which an extra installs.
PLUGINS = ("joblib", "submitit_local", "submitit_slurm")


def describe(error: BaseException, typed: Sequence[str] = ()) -> Failure:
    """How an exception, perhaps about the overrides `typed`, is reported: `classify`, and the errors of Hydra.

    An unknown key, an unknown member and a value of the wrong type get an advice; Hydra's other errors are shown as
    they are, in one line.
    """
    text, cause = " ".join(str(error).split()), error.__cause__ or error.__context__
    if isinstance(error, UnknownKeyError):
        text = _unknown_key(error, typed)
    elif text.startswith("Could not override 'data'"):  # such as data=cifar10: there are only groups in `data`
        text = _unknown_key(UnknownKeyError("data", []), typed)
    elif isinstance(error, MissingConfigException):
        group, _, wrong = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and wrong in PLUGINS:  # typed, or what our own hydra/launcher=parallel builds on
            text = str(MissingExtraError(f"{group}={wrong}", "launchers"))
        elif error.options:
            text = f"{group}={wrong}: there is no such member; {allowed_names(wrong, error.options)}"
    elif isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        file = re.match(r"In '(.+?)'", text)  # that has the key; otherwise it was typed
        text = (f"{file[1]}.yaml: " if file else "") + _refused_override(cause, typed)
    elif isinstance(error, OmegaConfBaseException):
        text = refused_value(error)
    elif not isinstance(error, HydraException | YAMLError):
        return classify(error)
    return Failure(text)


def _refused_override(cause: OmegaConfBaseException, typed: Sequence[str]) -> str:
    """`batch_size=many` or `lr=0.01`: a wrong type or an unknown key."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))  # an index of a list, as it is typed
    if "/" in key:
        groups = {file.parent.relative_to(CONF).as_posix() for file in CONF.glob("*/**/*.yaml")}
        return f"{key}: there is no such config group; {allowed_names(key, groups)}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        return _unknown_key(UnknownKeyError(key, [str(name) for name in cause.parent_node if name != "hydra"]), typed)
    return refused_value(cause)


def _unknown_key(unknown: UnknownKeyError, typed: Sequence[str]) -> str:
    """`num_workers=4`, `lr=0.01`: also looks for the last name in other sections of the default configuration."""
    leaf = unknown.key.rpartition(".")[2]
    for names, advice in FAMILIAR_KEYS.items():
        if leaf in names.split():
            value = value_of(unknown.key, typed) or "VALUE"
            return f"{unknown.key}: {advice.replace('{}', value)}"
    values = flatten(OmegaConf.to_container(compose([])))  # type: ignore[arg-type]
    near = [key for key in values if f".{key}".endswith(f".{leaf}") and key != unknown.key]
    return f"{unknown.key}: there is no such key; did you mean {' or '.join(near[:3])}?" if near else str(unknown)


FAMILIAR_KEYS = {
    "experiment hparams_search": "begin this file with # @package _global_, or it sets no key",
    "data dataset datamodule": "set data/dataset={}",
    "augment augmentation transforms": "set data/augment={}",
    "loader dataloader": "set data/loader={}",
    "net arch backbone": "set model={}",
    "opt optimizer": "set optimizer={}, and its options by optimizer.lr=0.001 and the like",
    "sched scheduler lr_scheduler": "set schedule={}",
    "criterion loss_fn": "set loss={}",
    "callbacks": "there are none; patience=N stops early, checkpoint.every_minutes=N saves within an epoch",
    "debug": "there is no such group; experiment=smoke takes seconds, HYDRA_FULL_ERROR=1 shows tracebacks",
    "paths": "set data.root=FOLDER for datasets, hydra.run.dir=FOLDER for results",
    "max_epochs num_epochs": "set epochs={}",
    "max_steps min_epochs max_time": "set epochs=N, max_minutes=N or patience=N",
    "fast_dev_run": "set epochs=1, and data.dataset.train_size=N, below the number of images",
    "limit_train_batches limit_val_batches": "set data.dataset.train_size=N data.dataset.test_size=N",
    "val_split validation_split train_val_test_split": "set data.holdout=0.1, a share of each class",
    "train test": "leave it out: every run is trained and evaluated",
    "num_workers workers": "set data.loader.num_workers={}, with data/loader=disk",
    "data_dir directory": "set data.dataset.path={} with data/dataset=image_folder; for downloads data.root={}",
    "img_size image_size input_size": "set data.dataset.size={}, with data/dataset=image_folder",
    "num_classes in_chans": "leave it out: the dataset says so",
    "accumulate_grad_batches grad_accum_steps": "set batch_size=N for a whole step, trainer.micro_batch=N for a pass",
    "gradient_clip_val clip_grad": "set trainer.clip_norm={}",
    "learning_rate base_lr": "set optimizer.lr={}",
    "accelerator": "set device=cuda or device=cpu",
    "devices gpus strategy sync_batchnorm": "start a process for each GPU by torchrun --nproc-per-node=N",
    "ckpt_path resume_from_checkpoint": "set resume={}, the folder of a run",
    "initial_checkpoint pretrained": "set init=FILE.safetensors, or the folder of a run",
    "tags task_name": "there is no such key; hydra.run.dir=FOLDER names a run",
    "log_every_n_steps": "set log.every_steps={}",
}
"""Advice for keys that people of other trainers type, by the last name of the key; `{}` is the value that was typed."""
