"""What the processes that tests fork have imported already."""

import atexit
import gc

import matplotlib.backends.backend_agg  # noqa: F401
import torch._dynamo
import torch.nn.parallel  # noqa: F401

import vitmnist.report.plots
import vitmnist.trainer  # noqa: F401

atexit.register(gc.unfreeze)  # libraries report frozen objects as leaks
gc.freeze()  # or the first collection of each process would copy the memory of all these objects
