"""Where the time of a training step goes: precisions, compiled code, CUDA graphs, and ways to compute attention.

    python benchmarks/step.py --batch-size 500 5000 --output benchmarks/results/step.md
    python benchmarks/step.py --only bf16 attention

Each way of computing a step of the articles' ViT over MNIST with Adam has a row, from the batch's indices to the new
weights; then each way of computing attention alone, forward and backward, for the model's shape `[B, 8, 17, 8]`.

    µs        per call: wall clock of consecutive calls, from an idle device to an idle device
    host µs   until a single call returns; where it is more than the µs per call, the device is idle in between
    kernels   that a call launches on the device, counted by torch's profiler

The last two are measured with CUDA only. All candidates run in one process and take turns; figures are medians of the
rounds, with their range.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from loops import build_run
from rounds import at_least_one, command_line, main, raise_clocks, report, spread, table, take_turns
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from vitmnist.errors import UserError, first_line
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment

Work = Callable[[], object]
ATTENTION = (8, 17, 8)  # heads, tokens, head dim of the articles' model
BACKENDS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def steps() -> dict[str, list[str]]:
    """Every way of computing a step, as overrides of `train.py`, by its label."""
    ways = {"eager": [], "compiled": ["trainer.compile=true"], "graph": ["trainer.graph=true"]}
    return {
        f"{precision}, {name}": [f"trainer.precision={precision}", "trainer.fused=true", *way]
        for precision in ("fp32", "tf32", "bf16", "fp16")
        for name, way in ways.items()
    }


def one_step(overrides: list[str], stack: ExitStack) -> Work:
    """A call that takes one step, always on the same batch of indices or images."""
    _, step, loader, _ = build_run(overrides, stack)
    batch = next(step.batches(loader, 0))
    return lambda: step(batch)


def attention(batch: int, device: torch.device, dtype: torch.dtype, backend: SDPBackend | None) -> Work:
    """A call that computes attention and its gradients; without a backend, by the formula written out."""
    shape = (batch, *ATTENTION)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=dtype)

    def work() -> None:
        if backend is None:
            output = (q @ k.transpose(-2, -1) * ATTENTION[-1] ** -0.5).softmax(dim=-1) @ v
        else:
            with sdpa_kernel(backend):
                output = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(output, (q, k, v), upstream)

    def work_by_any_kernel() -> None:
        # A step turns deterministic algorithms on for the process, and some backends have none.
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            work()
        finally:
            torch.use_deterministic_algorithms(before)

    return work_by_any_kernel


def attentions(batch: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    """The builder of each way of computing attention, by its label."""
    builders: dict[str, Callable[[], Work]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = f"attention, {str(dtype).removeprefix('torch.')}"
        builders[f"{name}, batched products"] = partial(attention, batch, device, dtype, None)
        for backend in BACKENDS:
            label = f"{name}, {backend.name.lower().removesuffix('_attention')}"
            builders[label] = partial(attention, batch, device, dtype, backend)
    return builders


def seconds_per_call(work: Work, device: torch.device, budget_s: float) -> float:
    """Mean of consecutive calls, as many as fit the budget but at least three."""
    synchronize(device)
    calls, started = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - started < budget_s:
        for _ in range(10 if device.type == "cuda" else 1):  # the host runs ahead; the queue must not grow for ever
            work()
            calls += 1
        synchronize(device)
    return (time.perf_counter() - started) / calls


def host_seconds(work: Work, device: torch.device) -> float:
    """Median over single calls of the time until the call returns; the device is idle before each."""
    times = []
    for _ in range(20):
        synchronize(device)
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    synchronize(device)
    return median(times)


def on_cuda(work: Work, device: torch.device) -> tuple[str, str]:
    """The table's cells: host µs, and the number of kernels and copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        synchronize(device)
    launched = sum(event.device_type.name == "CUDA" for event in profile.events())
    return f"{1e6 * host_seconds(work, device):,.0f}", str(launched)


def measure(
    builders: dict[str, Callable[[], Work]], device: torch.device, rounds: int, budget_s: float
) -> list[list[str]]:
    """A row for each builder: label, µs per call with range, host µs, kernels; or why it cannot be built."""
    works: dict[str, Work] = {}
    rows: dict[str, list[str]] = {}
    for name, build in tqdm(builders.items(), desc="set-up"):
        try:
            works[name] = build()
            works[name]()
        except (RuntimeError, UserError) as error:
            works.pop(name, None)
            rows[name] = [name, f"not possible: {first_line(error)}", "–", "–"]

    def turn(work: Work, number: int) -> float:
        raise_clocks(work, device)
        return 1e6 * seconds_per_call(work, device, budget_s)

    times = take_turns({name: partial(turn, work) for name, work in works.items()}, rounds) if works else {}
    for name, work in works.items():
        on_device = on_cuda(work, device) if device.type == "cuda" else ("–", "–")
        rows[name] = [name, spread(times[name], 0), *on_device]
    return [rows[name] for name in builders]


def compare(arguments: argparse.Namespace) -> str:
    """Measure every batch size and return the report."""
    device = choose_device(arguments.device)
    parts = []
    for size in arguments.batch_size:
        common = ["data/loader=gpu_slice", f"data.root={json.dumps(arguments.root)}", f"device={device}"]
        with ExitStack() as stack:
            builders: dict[str, Callable[[], Work]] = {
                name: partial(one_step, [*common, f"batch_size={size}", *own], stack) for name, own in steps().items()
            }
            builders |= attentions(size, device)
            texts = arguments.only or [""]
            chosen = {name: build for name, build in builders.items() if any(text in name for text in texts)}
            rows = measure(chosen, device, arguments.rounds, arguments.seconds)
        parts += [f"## Batch {size}", table(["step", "µs", "host µs", "kernels"], rows)]
    method = f"Medians and ranges of {arguments.rounds} rounds."
    return report("A training step", describe_environment(device), method, *parts)


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--batch-size", type=at_least_one, nargs="+", default=[500, 5000])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each candidate in each round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="candidates whose name contains one of these")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for downloaded files")
    main(parser, compare)
