"""One of several ranks, connected by `torch.distributed`."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DistError, Work
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitmnist.errors import ConfigError, PeerError, classify, first_line
from vitmnist.runtime.world import Value, World

POLL_S = 0.002  # A waiting rank handles signals this often.
MEETING = timedelta(minutes=5)  # All ranks must be started within this time.
NCCL_LATER = timedelta(minutes=2)  # NCCL waits this much longer than gloo (see `connect`).
SETUP = timedelta(hours=6)  # The other ranks of a machine wait this long for the one that decodes the dataset.


class TorchWorld(World):
    """One of several ranks, connected by gloo for set-up; for training by a group of its own, on GPUs another by NCCL.

    Raises:
        ConfigError: the other ranks cannot be reached.
    """

    def __init__(self) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._group: Any = None  # None: the default group, which is gloo's
        self._device_group: Any = None  # for tensors on the run's device
        self._pending: tuple[Tensor, Work] | None = None
        try:
            store, self.rank, self.size = next(rendezvous("env://", timeout=MEETING))
            # torchrun keeps its store across restarts, so each start needs keys of its own.
            self._store = PrefixStore(f"vitmnist/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            distributed.init_process_group(
                "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=SETUP
            )
            self.barrier()  # all are connected: a rank that hosts the store may fail from here on
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
        content = torch.frombuffer(bytearray(buffer.getvalue() or int(size)), dtype=torch.uint8)
        self._wait(distributed.broadcast(content, source, self._group, async_op=True))
        value: Value = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
        return value

    def all_gather_object(self, value: Value) -> list[Value]:
        return [self.broadcast_object(lambda: value, source) for source in range(self.size)]

    def connect(self, device: torch.device, timeout_s: float) -> None:
        self.barrier()  # set-up, such as compiling, may take some ranks longer than others
        timeout = timedelta(seconds=timeout_s)
        self._group = self._device_group = distributed.new_group(timeout=timeout, backend="gloo")
        if device.type == "cuda":
            # NCCL's watchdog ends the process at its timeout. By then gloo has raised the error that is recorded.
            self._device_group = distributed.new_group(timeout=timeout + NCCL_LATER, backend="nccl")

    def barrier(self) -> None:
        self._wait(distributed.all_reduce(torch.zeros(()), group=self._group, async_op=True))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor, group=self._device_group)
        return tensor

    def all_reduce_max(self, values: Sequence[int], at_once: bool = False) -> list[int]:
        maxima, pending = [0] * len(values), self._pending
        if pending:
            pending[1].wait()
            maxima = pending[0].tolist()
        tensor = torch.tensor(values)
        # Asynchronous, so that it overlaps with the computation of the next step.
        work = distributed.all_reduce(tensor, distributed.ReduceOp.MAX, self._group, async_op=not at_once)
        self._pending = (tensor, work) if work else None
        return [max(pair) for pair in zip(maxima, tensor.tolist(), strict=True)] if at_once else maxima

    def broadcast_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            self._wait(distributed.broadcast(buffer, 0, self._device_group, async_op=True))

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=self._device_group, gradient_as_bucket_view=True)

    def root_cause(self, error: BaseException) -> BaseException:
        failure = classify(error)
        if failure.status == "interrupted" or isinstance(error, PeerError) or not distributed.is_initialized():
            return error
        closed = self._closed()
        is_of_peer = isinstance(error, DistError) or (isinstance(error, RuntimeError) and bool(closed))
        message = "" if is_of_peer and not failure.is_user_error else f"{self.rank} {failure.message}"
        # Without torchrun, rank 0 keeps the store.
        first = "" if 0 in closed else self._first_failure(message)
        rank, _, reason = first.partition(" ")
        if rank:
            return error if rank == str(self.rank) else PeerError(f"rank {rank} failed: {reason}")
        silent = f"rank {closed[0]}" if closed else "another rank"
        return PeerError(
            f"{silent} does not answer: it failed (see its own message), was killed, or hung for distributed.timeout_s"
        )

    def report_failure(self, error: BaseException, message: str) -> bool:
        get_error_handler().record_exception(PeerError(message))
        if self.is_main or not isinstance(error, PeerError) or not distributed.is_initialized():
            return True
        # Rank 0 shows it, unless it is the one that does not answer; before training it has said why it ended.
        return self._group is not None and 0 in self._closed()

    def disconnect(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _first_failure(self, message: str) -> str:
        """The first rank that failed by itself, a space, and its message: `message` if none has; empty if unknown."""
        with suppress(RuntimeError):  # rank 0 is ending
            return self._store.compare_set("failed", "", message).decode()
        return ""

    def _closed(self) -> list[int]:
        """The ranks whose connection has broken, or was given up after the timeout: gloo refuses to send to them."""
        closed = []
        for rank in set(range(self.size)) - {self.rank}:
            try:
                distributed.isend(torch.zeros(1), rank, self._group)
            except RuntimeError:
                closed.append(rank)
        return closed

    @staticmethod
    def _wait(work: Work | None) -> None:
        """Poll in Python, so that signals are handled meanwhile."""
        while work and not work.is_completed():
            time.sleep(POLL_S)
        if work:
            work.wait()
