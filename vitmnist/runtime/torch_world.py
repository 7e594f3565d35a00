"""One of several ranks, connected by `torch.distributed`."""

import io
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Work
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitmnist.errors import ConfigError, PeerError, TrainingError, classify_error, first_line
from vitmnist.runtime.world import Value, World

POLL_S = 0.002
"""The interval at which a waiting rank handles signals, in seconds."""
SETUP_TIMEOUT = timedelta(hours=6)
"""The longest time that the ranks of a machine wait for the rank that decodes the dataset."""


class TorchWorld(World):
    """One of several ranks; raises `ConfigError` if the others cannot be reached."""

    def __init__(self) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # The groups of training, for CPU tensors (gloo) and for tensors on the run's device (NCCL on GPUs). Until
        # `connect` creates them, None stands for the default group, with gloo.
        self._group: Any = None
        self._device_group: Any = None
        try:
            store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=5)))
            # torchrun keeps its store across restarts, so each start needs its own prefix.
            self._store = PrefixStore(f"vitmnist/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            distributed.init_process_group(
                "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=SETUP_TIMEOUT
            )
            self.barrier()  # From here on, all ranks are connected, so any rank can fail, even the host of the store.
        except (RuntimeError, ValueError, KeyError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConfigError(
                f"the {os.environ['WORLD_SIZE']} processes cannot meet at {address}: {first_line(error)}; "
                "start them with torchrun, and if the port is in use name another one with --master-port=PORT"
            ) from error

    def broadcast_object(self, make: Callable[[], Value], source: int = 0) -> Value:
        # torch's broadcast_object_list would unpickle anything; torch.load with weights_only does not.
        buffer = io.BytesIO()
        if self.rank == source:
            torch.save(make(), buffer)
        size = torch.tensor(len(buffer.getvalue()))
        self._wait(distributed.broadcast(size, source, self._group, async_op=True))
        # On other ranks, the buffer is empty, so zeros make room for the content.
        content = torch.frombuffer(bytearray(buffer.getvalue().ljust(int(size), b"\0")), dtype=torch.uint8)
        self._wait(distributed.broadcast(content, source, self._group, async_op=True))
        value: Value = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
        return value

    def connect(self, device: torch.device, timeout_s: float) -> None:
        self.barrier()  # Compiling and other set-up can take some ranks longer than the timeout.
        timeout = timedelta(seconds=timeout_s)
        self._group = self._device_group = distributed.new_group(timeout=timeout, backend="gloo")
        if device.type == "cuda":
            # NCCL's watchdog ends the process at its timeout. By then gloo has raised the error that is recorded.
            self._device_group = distributed.new_group(timeout=timeout + timedelta(minutes=2), backend="nccl")

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor, group=self._device_group)
        return tensor

    def max_over_ranks(self, values: Sequence[int]) -> list[int]:
        maxima = torch.tensor(values)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, self._group)
        return [*map(int, maxima)]

    def broadcast_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            self._wait(distributed.broadcast(buffer, 0, self._device_group, async_op=True))

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=self._device_group, gradient_as_bucket_view=True)

    def find_first_failure(self, error: BaseException) -> BaseException:
        failure = classify_error(error)
        if failure.status == "interrupted" or isinstance(error, PeerError) or not distributed.is_initialized():
            return error
        # A rank that fails stores its message before its connections break, so the first message names the cause.
        try:
            message = self._store.compare_set("failed", "", f"{self.rank} {failure.message}").decode()
            distributed.destroy_process_group()  # Ranks that wait for this one fail now.
        except RuntimeError:  # Without torchrun, the store ends with rank 0.
            return TrainingError("rank 0 has ended: see its message; if it has none, it was killed")
        rank, _, reason = message.partition(" ")
        return error if rank == str(self.rank) else PeerError(f"rank {rank} failed: {reason}")

    def disconnect(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    @staticmethod
    def _wait(work: Work | None) -> None:
        """Poll in Python: signals are handled between two polls."""
        while work and not work.is_completed():
            time.sleep(POLL_S)
        if work:
            work.wait()
