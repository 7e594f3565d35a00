"""Restores the global state of a Python process after `vitmnist.train`."""

import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging.config import DictConfigurator
from typing import Any, cast

import torch
from hydra.conf import HydraConf
from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from vitmnist.config.compose import separate_hydra
from vitmnist.data.randomness import preserved_random_state


@contextmanager
def preserved_process() -> Iterator[None]:
    """Restore on exit the random states and the state of torch, Hydra, logging, warnings and the environment."""
    with warnings.catch_warnings(), preserved_random_state(), separate_hydra(), ExitStack() as restored:
        _restore_torch(restored)
        _restore_logging(restored)
        restored.callback(_restore_environment, dict(os.environ))
        # A progress bar creates a lock, which fixes the start method of processes.
        start_method = multiprocessing.get_start_method(allow_none=True)
        restored.callback(multiprocessing.set_start_method, start_method, force=True)
        yield


def _restore_torch(restored: ExitStack) -> None:
    flags, name = torch.utils.deterministic, "fill_uninitialized_memory"
    restored.callback(setattr, flags, name, getattr(flags, name))
    restored.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if torch.cuda.is_initialized():
        restored.callback(torch.cuda.set_device, torch.cuda.current_device())
        restored.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    else:
        restored.callback(_reset_cuda, torch.initial_seed())


def _reset_cuda(seed: int) -> None:
    """Reset CUDA to the state before its first use, when each GPU has the seed of the CPU's generator.

    Reading this state beforehand would occupy memory on each GPU.
    """
    torch.cuda.manual_seed_all(seed)
    if torch.cuda.is_initialized():
        torch.cuda.set_device(0)


def _restore_logging(restored: ExitStack) -> None:
    """Restore the handlers and levels of all loggers, and close handlers that are new."""
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in (logging.root, *named):
        restored.callback(_restore_handlers, logger, [*logger.handlers])
        restored.callback(logger.setLevel, logger.level)
        restored.callback(setattr, logger, "propagate", logger.propagate)


def _restore_handlers(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    for handler in set(logger.handlers).difference(handlers):
        handler.close()
    logger.handlers[:] = handlers


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def configure_run_log(hydra: HydraConf) -> None:
    """Configure the log as Hydra does, but without closing the handlers of the program."""
    job_logging = cast(dict[str, Any], OmegaConf.to_container(hydra.job_logging, resolve=True))
    if job_logging["root"] is not None:
        RunLogConfigurator(job_logging).configure()
    configure_log(OmegaConf.create({"root": None}), hydra.verbose)  # Set the levels that `hydra.verbose` names.


class RunLogConfigurator(DictConfigurator):
    """Configures logging; unlike `logging.config.dictConfig`, it does not close all handlers of the process."""

    def configure(self) -> None:
        for section, make in (
            ("formatters", self.configure_formatter),
            ("filters", self.configure_filter),
            ("handlers", self.configure_handler),
        ):
            members = self.config.get(section, {})
            for name in members:
                members[name] = make(members[name])
        for name in self.config.get("loggers", {}):
            self.configure_logger(name, self.config["loggers"][name])
        self.configure_root(self.config["root"])
