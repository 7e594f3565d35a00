"""Keys that people of Lightning, its Hydra template, timm and Keras type, and what to set here instead."""

from __future__ import annotations

_ADVICE = {
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

FAMILIAR_KEYS = {key: advice for keys, advice in _ADVICE.items() for key in keys.split()}
"""Advice by the last name of an unknown key; `{}` is the value that was typed."""
