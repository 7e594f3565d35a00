"""One of several ranks, connected by `torch.distributed`.

Tensors go through its process group. All other values go as JSON through its key-value store, which works before the
process group exists and after it has failed.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitmnist.errors import ConfigError, PeerError, first_line
from vitmnist.runtime.distributed import SingleProcess

POLL_S = 0.02
REPORT_S = 2.0  # a failing rank reports its reason before it exits, but its connections may break earlier
SETUP_S = 6 * 3600.0  # one rank of a machine may have to decode a large data set while the others wait


class TorchDistributed(SingleProcess):
    """One of several ranks.

    Raises:
        ConfigError: the other ranks cannot be reached.
    """

    def __init__(self) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        try:
            store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        except (DistError, ValueError, KeyError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConfigError(
                f"the {os.environ['WORLD_SIZE']} processes cannot meet at {address}: {first_line(error)}; "
                "start them with torchrun, and if the port is in use name another one with --master-port=PORT"
            ) from error
        # torchrun keeps its store across restarts, so each start needs keys of its own.
        self._store = PrefixStore(f"vitmnist/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self._exchanges = 0
        self._connected = False
        self._pending: tuple[Tensor, Any] | None = None

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        key = self._next_key()
        return self.publish(key, make()) if self.is_main else self.wait_for(key)

    def all_gather_object(self, value: Any) -> list[Any]:
        key = self._next_key()
        self.publish(f"{key}/{self.rank}", value)
        return [self.wait_for(f"{key}/{rank}") for rank in range(self.size)]

    def publish(self, key: str, value: Any) -> Any:
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def wait_for(self, key: str) -> Any:
        deadline = time.monotonic() + SETUP_S
        try:
            while not self._store.check([key]):
                if failed := self._first_failure():
                    raise PeerError(f"rank {failed['rank']}: {failed['reason']}")
                if time.monotonic() > deadline:
                    raise PeerError(f"another rank did not get as far as this one within {SETUP_S / 3600:g} hours")
                time.sleep(POLL_S)
            return json.loads(self._store.get(key))
        except RuntimeError as error:
            raise PeerError(f"the key-value store of the ranks is gone: {first_line(error)}") from error

    def _next_key(self) -> str:
        self._exchanges += 1
        return str(self._exchanges)

    @contextmanager
    def first_on_machine(self) -> Iterator[bool]:
        key = f"{self._next_key()}/{self.rank - self.local_rank}"  # the machine's first rank
        if self.local_rank:
            self.wait_for(key)
            yield True
        else:
            yield False
            self.publish(key, "done")

    def connect(self, device: torch.device, timeout_s: float) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._connected = True

    def broadcast_tensors(self, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        # torch's broadcast_object_list would unpickle anything; torch.load with weights_only does not.
        buffer = io.BytesIO()
        if self.is_main:
            torch.save(make(), buffer)
        size = self.broadcast_object(lambda: len(buffer.getvalue()))
        content = torch.frombuffer(bytearray(buffer.getvalue() or size), dtype=torch.uint8)
        distributed.broadcast(content, 0)
        values: dict[str, Any] | None = torch.load(
            io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True
        )
        return values

    def all_gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(gathered, tensor)
        return gathered

    def barrier(self) -> None:
        self.all_reduce_sum(torch.zeros(()))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, values: Sequence[int], at_once: bool = False) -> list[int]:
        maxima, pending = [0] * len(values), self._pending
        if pending:
            pending[1].wait()
            maxima = pending[0].tolist()
        tensor = torch.tensor(values)
        # Asynchronous, so that it overlaps with the computation of the next step.
        work = distributed.all_reduce(tensor, distributed.ReduceOp.MAX, async_op=not at_once)
        self._pending = None if at_once else (tensor, work)
        return [max(pair) for pair in zip(maxima, tensor.tolist(), strict=True)] if at_once else maxima

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    def report_failure(self, reason: str) -> bool:
        try:
            return bool(self.publish("failed", {"rank": self.rank, "reason": reason})["rank"] == self.rank)
        except RuntimeError:  # the store went with the rank that hosted it, which failed first
            return False

    def root_cause(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):  # asked to stop
            return error
        is_connection = self._connected and _is_connection_error(error)
        deadline = time.monotonic() + (REPORT_S if is_connection else 0)
        while not (failed := self._first_failure()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if failed:
            return error if failed["rank"] == self.rank else PeerError(f"rank {failed['rank']}: {failed['reason']}")
        if is_connection:
            return PeerError(
                "another rank has ended without giving a reason, did not answer for distributed.timeout_s, or cannot "
                f"be reached; torchrun's output names it ({_connection_reason(error)})"
            )
        return error

    def disconnect(self) -> None:
        if self._connected:
            self._connected = False
            distributed.destroy_process_group()

    def _first_failure(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._store.get("failed")) if self._store.check(["failed"]) else None
        except RuntimeError:
            return None


def _is_connection_error(error: BaseException) -> bool:
    """Whether the process group raised an error because another rank does not answer."""
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def _connection_reason(error: BaseException) -> str:
    """The informative part of a connection error; NCCL gives its reason in the line after `Last error`."""
    reasons = [later for line, later in pairwise(str(error).splitlines()) if line.startswith("Last error")]
    first = re.sub(r"^\[\S+\] ", "", first_line(error)).partition(". ")[0]  # without the place in gloo's source
    return " ".join([first, *reasons])
