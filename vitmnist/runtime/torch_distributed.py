"""One of several processes that train together, connected by `torch.distributed`.

Tensors are added up by its process group; everything else goes as JSON through its key-value store.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SPEAKING_S = 2.0  # whoever fails says why before it goes, but its connections may break first
SETTING_UP_S = 6 * 3600.0  # one rank of a machine may have a large set to decode while the others wait


class TorchDistributed(SingleProcess):
    """One of several processes.

    Raises:
        ConfigError: the others cannot be reached.
    """

    def __init__(self) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        try:
            store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        except (DistError, ValueError, KeyError) as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConfigError(
                f"the {os.environ['WORLD_SIZE']} processes cannot meet at {place}: {first_line(error)}; "
                "start them with torchrun, and if the port is in use name another one with --master-port=PORT"
            ) from error
        # torchrun keeps the store when it starts the processes again.
        self._store = PrefixStore(f"vitmnist/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self._shared = 0
        self._opened = False
        self._votes: tuple[Tensor, Any] | None = None

    def all_gather_object(self, value: Any) -> list[Any]:
        self._shared += 1
        keys = [f"{self._shared}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return [json.loads(self._await(key)) for key in keys]

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        self._shared += 1
        key = f"{self._shared}"
        if self.is_main:
            self._store.set(key, json.dumps(make()))
        return json.loads(self._await(key))

    @contextmanager
    def first_on_machine(self) -> Iterator[bool]:
        self._shared += 1
        key = f"{self._shared}/{self.rank - self.local_rank}"  # by the machine's first rank
        if self.local_rank:
            self._await(key)
            yield True
        else:
            yield False
            self._store.set(key, "done")

    def tell(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def ask(self, key: str) -> Any:
        return json.loads(self._await(key))

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
        self._opened = True

    def broadcast_tensors(self, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        content = b""
        if self.is_main:
            buffer = io.BytesIO()
            torch.save(make(), buffer)
            content = buffer.getvalue()
        size = self.broadcast_object(lambda: len(content))
        sent = torch.frombuffer(bytearray(content or size), dtype=torch.uint8)
        distributed.broadcast(sent, 0)
        made: dict[str, Any] | None = torch.load(
            io.BytesIO(sent.numpy().tobytes()), map_location="cpu", weights_only=True
        )
        return made

    def all_gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(gathered, tensor)
        return gathered

    def barrier(self) -> None:
        self.all_reduce_sum(torch.zeros(()))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, votes: Sequence[int], at_once: bool = False) -> list[int]:
        before, self._votes = self._votes, None
        counted = [0] * len(votes)
        if before:
            tensor, work = before
            work.wait()
            counted = tensor.tolist()
        now = torch.tensor(votes)
        work = distributed.all_reduce(now, distributed.ReduceOp.MAX, async_op=not at_once)
        if not at_once:
            self._votes = now, work
            return counted
        return [max(pair) for pair in zip(counted, now.tolist(), strict=True)]

    def wrap_ddp(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=True)

    def report_failure(self, reason: str) -> bool:
        own = json.dumps({"rank": self.rank, "reason": reason})
        try:
            first = json.loads(self._store.compare_set("failed", "", own))
            return bool(first["rank"] == self.rank)
        except RuntimeError:  # the store is gone, and with it whoever kept it, who was the first
            return False

    def root_cause(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):  # told to stop
            return error
        of_connection = self._opened and _is_of_connection(error)
        deadline = time.monotonic() + (SPEAKING_S if of_connection else 0)
        while not (failed := self._failed()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if failed:
            return error if failed["rank"] == self.rank else PeerError(f"rank {failed['rank']}: {failed['reason']}")
        if of_connection:
            return PeerError(
                "another rank has ended without a word, did not answer for distributed.timeout_s, or cannot be "
                f"reached; what torchrun prints names it ({_said(error)})"
            )
        return error

    def disconnect(self) -> None:
        if self._opened:
            self._opened = False
            distributed.destroy_process_group()

    def _await(self, key: str) -> bytes:
        """The value of a key, once it is there.

        Raises:
            PeerError: a rank has failed meanwhile, or it is not there after a long time.
        """
        deadline = time.monotonic() + SETTING_UP_S
        try:
            while not self._store.check([key]):
                if failed := self._failed():
                    raise PeerError(f"rank {failed['rank']}: {failed['reason']}")
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"another rank has not come as far as this one within {SETTING_UP_S / 3600:g} hours"
                    )
                time.sleep(POLL_S)
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise PeerError(f"the store of the ranks is gone: {first_line(error)}") from error

    def _failed(self) -> Mapping[str, Any] | None:
        try:
            if self._store.check(["failed"]):
                found: Mapping[str, Any] = json.loads(self._store.get("failed"))
                return found
        except RuntimeError:
            return None
        return None


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error is one that the process group raises where another rank does not answer."""
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def _said(error: BaseException) -> str:
    """What is worth reading of a connection's error: NCCL has its own reason in a later line."""
    lines = str(error).splitlines()
    reasons = [later for line, later in pairwise(lines) if line.startswith("Last error")]
    said, _, _ = re.sub(r"^\[\S+\] ", "", first_line(error)).partition(". ")  # without the place in gloo's source
    return " ".join([said, *reasons])
