"""What each loader costs as the set and the number of GPUs grow: arithmetic on stated assumptions, and a simulation.

    python benchmarks/scale.py              the tables of docs/scale.md
    python benchmarks/scale.py --measure    and what drawing an epoch's permutation costs on this machine

Nothing here was measured on such machines. Whoever has one puts its figures into `Cluster` and `Sample`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import OrderedDict
from dataclasses import dataclass

import torch
from tabulate import tabulate

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
SETS = (50 * MB, 500 * MB, 5 * GB, 50 * GB, 500 * GB, 5 * TB)
GPUS = (1, 8, 64, 1000)
INDEX = 8  # bytes of an index in a permutation


@dataclass(frozen=True)
class Cluster:
    """Assumptions about the machines; bandwidths in bytes a second."""

    gpus: int = 8
    """GPUs of a machine, each with a process of its own."""
    gpu_memory: float = 80 * GB
    gpu_share: float = 0.5
    """The share of a GPU's memory that the model leaves."""
    host_memory: float = 1 * TB
    host_share: float = 0.5
    """The share of the host's memory that is free for data, the page cache included."""
    cores: int = 96
    bus: float = 25 * GB
    """From host to GPU, for each GPU."""
    disk: float = 6 * GB
    """The machine's own disk."""
    network: float = 3 * GB
    """Between a machine and the storage that all share."""


@dataclass(frozen=True)
class Sample:
    """Assumptions about the set: pictures of 224 × 224 × 3 bytes once decoded."""

    stored: float = 110 * KB
    """Bytes of a picture's file."""
    decoded: float = 224 * 224 * 3
    decode_s: float = 0.004
    """Seconds of one core to open and decode a picture."""
    trained_per_s: float = 2500.0
    """Pictures that a GPU trains on in a second."""


@dataclass(frozen=True)
class Cost:
    """A loader's needs, in bytes and seconds.

    Args:
        gpu_memory: of each GPU.
        host_memory: of each machine, for all its processes.
        fetched: over the network to each machine, once.
        start_s: until the first batch.
        bus: from the host to each GPU in an epoch.
        network: to each machine in an epoch.
        epoch_s: of training and loading.
        why_not: what there is too little of; empty where it can be used.
    """

    loader: str
    gpu_memory: float
    host_memory: float
    fetched: float
    start_s: float
    bus: float
    network: float
    epoch_s: float
    why_not: str


def costs(size: float, gpus: int, cluster: Cluster, sample: Sample) -> list[Cost]:
    """What each loader needs for a set of `size` decoded bytes on so many GPUs, the simplest first."""
    machines = math.ceil(gpus / cluster.gpus)
    local = min(gpus, cluster.gpus)
    samples = size / sample.decoded
    indices = INDEX * samples  # every process draws the whole permutation
    train = samples / gpus / sample.trained_per_s
    # Of several machines each reads another random part in every epoch, and finds of it what its memory holds.
    host = cluster.host_memory * cluster.host_share
    answered = hit_share(host / size) if machines == 1 else min(host / size, 1.0)
    from_disk = (size / machines) * (1 - answered) / cluster.disk
    decoding = samples / machines * sample.decode_s / cluster.cores
    stored = samples / machines * sample.stored

    def cost(
        loader: str,
        gpu: float,
        memory: float,
        fetched: float,
        bus: float,
        loading: tuple[float, ...],
        network: float = 0.0,
    ) -> Cost:
        """`loading`: what takes so many seconds of an epoch beside the training; of `ram` it comes on top."""
        moved = gpu / cluster.bus if gpu else 0.0
        epoch = train + sum(loading) if loader == "ram" else max(train, *loading)
        short = "GPU memory" if gpu > cluster.gpu_memory * cluster.gpu_share else "host memory" if memory > host else ""
        return Cost(loader, gpu, memory, fetched, fetched / cluster.network + moved, bus, network, epoch, short)

    over_bus = size / gpus
    copies = local * (size + indices)
    batches = over_bus / cluster.bus
    return [
        cost("gpu_slice", size + indices / gpus, local * indices, size, indices / gpus, (0.0,)),
        cost("ram", 0.0, copies, size, over_bus, (batches,)),
        cost("prefetch of ram", 0.0, copies, size, over_bus, (batches,)),
        cost("prefetch of cache", 0.0, local * indices, size, over_bus, (batches, from_disk)),
        # It delivers float32, four bytes for each of the others'.
        cost(
            "disk", 0.0, local * indices, 0.0, 4 * over_bus, (4 * batches, decoding, stored / cluster.network), stored
        ),
    ]


def choose(table: list[Cost]) -> Cost | None:
    """The loader that serves: of those that fit and are within 5% of the shortest epoch, the simplest."""
    fit = [cost for cost in table if not cost.why_not]
    shortest = min((cost.epoch_s for cost in fit), default=0.0)
    return next((cost for cost in fit if cost.epoch_s <= 1.05 * shortest), None)


def hit_share(memory: float) -> float:
    """The share of reads that the page cache answers, where it holds the share `memory` of the set.

    Each epoch reads every page once, in a new random order, and the page that was used longest ago makes room. A page
    at place p of one epoch and q of the next (as shares of it) is still there if 1 - p(1 - q) of the set, what was read
    in between, fits: integrated over p and q.
    """
    if memory >= 1:
        return 1.0
    return memory + (1 - memory) * math.log(1 - memory)


def simulated_hits(memory: float, pages: int = 2000, epochs: int = 12, seed: int = 0) -> float:
    """The same, counted: a cache of the pages used last, over shuffled epochs; the first two warm it up."""
    generator = torch.Generator().manual_seed(seed)
    cache: OrderedDict[int, None] = OrderedDict()
    room, hits = int(memory * pages), 0
    for epoch in range(epochs):
        for page in torch.randperm(pages, generator=generator).tolist():
            if page in cache:
                hits += epoch >= 2
                cache.move_to_end(page)
                continue
            cache[page] = None
            if len(cache) > room:
                cache.popitem(last=False)
    return hits / ((epochs - 2) * pages)


def bytes_for_people(size: float) -> str:
    """`50 MB`."""
    for unit, name in ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def time_for_people(seconds: float) -> str:
    """`1.5 h`."""
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{1000 * seconds:.3g} ms"


def serving(cluster: Cluster, sample: Sample) -> str:
    """Which loader serves, by size of the set and number of GPUs."""
    rows = []
    for size in SETS:
        cells = []
        for gpus in GPUS:
            cost = choose(costs(size, gpus, cluster, sample)) if size / sample.decoded >= gpus else None
            cells.append(f"{cost.loader}, {time_for_people(cost.epoch_s)}" if cost else "fewer images than GPUs")
        rows.append([bytes_for_people(size), bytes_for_people(INDEX * size / sample.decoded), *cells])
    return str(
        tabulate(
            rows,
            ["set", "permutation", *(f"{gpus:,} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)],
            tablefmt="github",
        )
    )


def in_detail(size: float, gpus: int, cluster: Cluster, sample: Sample) -> str:
    """Every loader's costs for one size and number."""
    rows = [
        [
            cost.loader,
            bytes_for_people(cost.gpu_memory),
            bytes_for_people(cost.host_memory),
            bytes_for_people(cost.fetched),
            time_for_people(cost.start_s),
            bytes_for_people(cost.bus),
            bytes_for_people(cost.network),
            time_for_people(cost.epoch_s),
            f"no: {cost.why_not}" if cost.why_not else "yes",
        ]
        for cost in costs(size, gpus, cluster, sample)
    ]
    header = [
        "loader",
        "memory of a GPU",
        "of a machine",
        "fetched by a machine",
        "start-up",
        "bus, GPU and epoch",
        "network, machine and epoch",
        "epoch",
        "fits",
    ]
    return str(tabulate(rows, header, tablefmt="github"))


def decoding_once(cluster: Cluster, sample: Sample) -> str:
    """How long one machine decodes, once, to fill a cache."""
    times = [
        f"{bytes_for_people(size)}: {time_for_people(size / sample.decoded * sample.decode_s / cluster.cores)}"
        for size in SETS
    ]
    return ", ".join(times)


def caching() -> str:
    """How much of a set a page cache answers, by formula and by simulation."""
    rows = [
        [f"{memory:.0%}", f"{hit_share(memory):.1%}", f"{simulated_hits(memory):.1%}"]
        for memory in (0.25, 0.5, 0.75, 0.9, 0.95)
    ]
    return str(tabulate(rows, ["set in memory", "reads answered, formula", "simulated"], tablefmt="github"))


def permutations() -> str:
    """What drawing an epoch's permutation takes on this machine; the median of three."""
    rows = []
    for samples in (60_000, 1_000_000, 10_000_000, 30_000_000):
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            torch.randperm(samples)
            taken.append(time.perf_counter() - started)
        rows.append([f"{samples:,}", bytes_for_people(INDEX * samples), time_for_people(sorted(taken)[1])])
    return str(tabulate(rows, ["samples", "permutation", "drawn in"], tablefmt="github"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="also time the drawing of permutations here")
    arguments = parser.parse_args()
    cluster, sample = Cluster(), Sample()
    print("Which loader serves, and its epoch:\n")
    print(serving(cluster, sample))
    for size, gpus in ((5 * GB, 8), (500 * GB, 64), (5 * TB, 64)):
        print(f"\nA set of {bytes_for_people(size)} on {gpus} GPUs:\n")
        print(in_detail(size, gpus, cluster, sample))
    print(f"\nDecoding once, by one machine: {decoding_once(cluster, sample)}")
    print("\nWhat the page cache answers where a part of the set fits into memory:\n")
    print(caching())
    if arguments.measure:
        print("\nDrawing an epoch's permutation on this machine:\n")
        print(permutations())


if __name__ == "__main__":
    main()
