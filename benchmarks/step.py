"""Times a training step with different precisions, compiled code and CUDA graphs, and implementations of attention.

    python benchmarks/step.py --batch-size 500 5000 --output benchmarks/results/step.md
    python benchmarks/step.py --only bf16 attention

The first rows time a step of the articles' ViT on MNIST with Adam, from a batch on the device to the new weights. The
other rows time attention alone, forward and backward, for the model's shape `[B, 8, 17, 8]`.

    µs        time per call: wall clock of consecutive calls, from an idle device to an idle device
    host µs   time until a single call returns; if it exceeds the µs per call, the device is idle in between
    kernels   number of kernels that a call launches on the device, counted by torch's profiler

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
from rounds import (
    create_parser,
    format_report,
    format_spread,
    format_table,
    main,
    positive_int,
    raise_clocks,
    take_turns,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from vitmnist.errors import UserError, first_line
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.timer import synchronize
from vitmnist.tracking.environment import describe_environment

Work = Callable[[], object]
ATTENTION_SHAPE = (8, 17, 8)  # Heads, tokens and head dimension of the articles' model
BACKENDS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def list_steps() -> dict[str, list[str]]:
    """Return the overrides of every kind of step, by label."""
    ways = {"eager": [], "compiled": ["trainer.compile=true"], "graph": ["trainer.graph=true"]}
    return {
        f"{precision}, {name}": [f"trainer.precision={precision}", "trainer.fused=true", *way]
        for precision in ("fp32", "tf32", "bf16", "fp16")
        for name, way in ways.items()
    }


def build_step(overrides: list[str], stack: ExitStack) -> Work:
    """Build a function that takes a step on the same batch in every call."""
    _, step, loader, _ = build_run(overrides, stack)
    batch = next(step.batches(loader, 0))
    return lambda: step(batch)


def build_attention(batch: int, device: torch.device, dtype: torch.dtype, backend: SDPBackend | None) -> Work:
    """Build a function that computes attention and its gradients; without a backend, with plain matrix products."""
    shape = (batch, *ATTENTION_SHAPE)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=dtype)

    def work() -> None:
        if backend is None:
            output = (q @ k.transpose(-2, -1) * ATTENTION_SHAPE[-1] ** -0.5).softmax(dim=-1) @ v
        else:
            with sdpa_kernel(backend):
                output = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(output, (q, k, v), upstream)

    def work_with_any_kernel() -> None:
        # A step enables deterministic algorithms for the process, and some backends have none.
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            work()
        finally:
            torch.use_deterministic_algorithms(before)

    return work_with_any_kernel


def list_attentions(batch: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    """Return the builder of each implementation of attention, by label."""
    builders: dict[str, Callable[[], Work]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = f"attention, {str(dtype).removeprefix('torch.')}"
        builders[f"{name}, batched products"] = partial(build_attention, batch, device, dtype, None)
        for backend in BACKENDS:
            label = f"{name}, {backend.name.lower().removesuffix('_attention')}"
            builders[label] = partial(build_attention, batch, device, dtype, backend)
    return builders


def measure_call(work: Work, device: torch.device, budget_s: float) -> float:
    """Return the mean seconds of consecutive calls: as many as fit the budget, but at least three."""
    synchronize(device)
    calls, started = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - started < budget_s:
        for _ in range(10 if device.type == "cuda" else 1):  # The host runs ahead; this limits the queue.
            work()
            calls += 1
        synchronize(device)
    return (time.perf_counter() - started) / calls


def measure_host(work: Work, device: torch.device) -> float:
    """Return the median time until a call returns. The device is idle before each call."""
    times = []
    for _ in range(20):
        synchronize(device)
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    synchronize(device)
    return median(times)


def measure_on_cuda(work: Work, device: torch.device) -> tuple[str, str]:
    """Return the cells of the table: host µs, and the number of kernels and copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        synchronize(device)
    launched = sum(event.device_type.name == "CUDA" for event in profile.events())
    return f"{1e6 * measure_host(work, device):,.0f}", str(launched)


def measure(
    builders: dict[str, Callable[[], Work]], device: torch.device, rounds: int, budget_s: float
) -> list[list[str]]:
    """Return a row for each builder: label, µs per call, host µs and kernels, or why it cannot be built."""
    works: dict[str, Work] = {}
    rows: dict[str, list[str]] = {}
    for name, build in tqdm(builders.items(), desc="set-up"):
        try:
            works[name] = build()
            works[name]()
        except (RuntimeError, UserError) as error:
            works.pop(name, None)
            rows[name] = [name, f"fails: {first_line(error)}", "–", "–"]

    def turn(work: Work, number: int) -> float:
        raise_clocks(work, device)
        return 1e6 * measure_call(work, device, budget_s)

    times = take_turns({name: partial(turn, work) for name, work in works.items()}, rounds) if works else {}
    for name, work in works.items():
        on_device = measure_on_cuda(work, device) if device.type == "cuda" else ("–", "–")
        rows[name] = [name, format_spread(times[name], 0), *on_device]
    return [rows[name] for name in builders]


def compare(arguments: argparse.Namespace) -> str:
    """Measure every batch size and return the report."""
    device = choose_device(arguments.device)
    parts = []
    for size in arguments.batch_size:
        common = ["data/loader=gpu_slice", f"data.root={json.dumps(arguments.root)}", f"device={device}"]
        with ExitStack() as stack:
            builders: dict[str, Callable[[], Work]] = {
                name: partial(build_step, [*common, f"batch_size={size}", *overrides], stack)
                for name, overrides in list_steps().items()
            }
            builders |= list_attentions(size, device)
            texts = arguments.only or [""]
            chosen = {name: build for name, build in builders.items() if any(text in name for text in texts)}
            rows = measure(chosen, device, arguments.rounds, arguments.seconds)
        parts += [f"## Batch size {size}", format_table(["step", "µs", "host µs", "kernels"], rows)]
    method = f"Medians and ranges of {arguments.rounds} rounds."
    return format_report("A training step", describe_environment(device), method, *parts)


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--batch-size", type=positive_int, nargs="+", default=[500, 5000])
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of a candidate's turn in a round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="candidates whose name contains one of these")
    parser.add_argument("--root", default="~/.cache/vitmnist", help="folder for downloaded files")
    main(parser, compare)
