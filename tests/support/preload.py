"""Imports for the processes that tests fork from."""

import atexit
import gc

import einops  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.nn.parallel  # noqa: F401

import tests.conftest  # noqa: F401
import vitmnist.report.plots  # noqa: F401
import vitmnist.tracking.loggers.tensorboard  # noqa: F401
import vitmnist.trainer  # noqa: F401
from vitmnist.config.compose import compose

compose([])  # Hydra scans its plugins, and its parsers fill their caches.
atexit.register(gc.unfreeze)  # Libraries report frozen objects as leaks.
gc.freeze()  # The first collection of each process would copy the memory of all these objects.
