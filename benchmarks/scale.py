"""What each loader costs as the set and the number of GPUs grow: arithmetic on stated assumptions, and a simulation.

    python benchmarks/scale.py    the tables of docs/speed.md

Nothing here was measured on such machines. To model yours, put its figures into `Cluster` and `Sample`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from tabulate import tabulate

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
SETS = (50 * MB, 500 * MB, 5 * GB, 50 * GB, 500 * GB, 5 * TB)
GPUS = (1, 8, 64, 1000)
INDEX = 8  # bytes of an int64 index in a permutation


@dataclass(frozen=True)
class Cluster:
    """Assumptions about the machines. Memory in bytes, bandwidths in bytes per second."""

    gpus: int = 8
    """GPUs per machine, one process each."""
    gpu_memory: float = 80 * GB
    gpu_share: float = 0.5
    """Share of a GPU's memory that is free for data."""
    host_memory: float = 1 * TB
    host_share: float = 0.5
    """Share of the host's memory that is free for data, including the page cache."""
    cores: int = 96
    bus: float = 25 * GB
    """From the host to each GPU."""
    disk: float = 6 * GB
    """Of the local disk."""
    network: float = 3 * GB
    """Between a machine and the shared storage."""


@dataclass(frozen=True)
class Sample:
    """Assumptions about the data: images of 224 × 224 × 3 bytes when decoded."""

    stored: float = 110 * KB
    """Bytes per image file."""
    decoded: float = 224 * 224 * 3
    decode_s: float = 0.004
    """Seconds one core needs to open and decode an image."""
    trained_per_s: float = 2500.0
    """Images per second that one GPU trains on."""


@dataclass(frozen=True)
class Cost:
    """What a loader needs, in bytes and seconds.

    Args:
        gpu_memory: Per GPU.
        host_memory: Per machine, all processes together.
        fetched: Over the network to each machine, once.
        start_s: Until the first batch.
        bus: From the host to each GPU per epoch.
        network: To each machine per epoch.
        epoch_s: Training and loading.
        lacking: Which memory is too small; empty if the loader can be used.
    """

    loader: str
    gpu_memory: float
    host_memory: float
    fetched: float
    start_s: float
    bus: float
    network: float
    epoch_s: float
    lacking: str


def costs(size: float, gpus: int, cluster: Cluster, sample: Sample) -> list[Cost]:
    """What each loader needs for a set of `size` decoded bytes, the simplest loader first."""
    machines = math.ceil(gpus / cluster.gpus)
    local = min(gpus, cluster.gpus)
    samples = size / sample.decoded
    indices = INDEX * samples  # every process draws the whole permutation
    train = samples / gpus / sample.trained_per_s
    # One machine reads every page once per epoch. Each of several machines reads a new random part per epoch.
    host = cluster.host_memory * cluster.host_share
    cached = hit_share(host / size) if machines == 1 else min(host / size, 1.0)
    from_disk = (size / machines) * (1 - cached) / cluster.disk
    decoding = samples / machines * sample.decode_s / cluster.cores
    stored = samples / machines * sample.stored
    fetching = stored / cluster.network

    def cost(
        loader: str,
        gpu: float,
        memory: float,
        fetched: float,
        bus: float,
        loading: tuple[float, ...],
        network: float = 0.0,
    ) -> Cost:
        """`loading`: seconds per epoch of each stage that overlaps with training; `ram` does not overlap."""
        moved = gpu / cluster.bus if gpu else 0.0
        epoch = train + sum(loading) if loader == "ram" else max(train, *loading)
        lacking = "host memory" if memory > host else ""
        if gpu > cluster.gpu_memory * cluster.gpu_share:
            lacking = "GPU memory"
        return Cost(loader, gpu, memory, fetched, fetched / cluster.network + moved, bus, network, epoch, lacking)

    over_bus = size / gpus
    copies = local * (size + indices)
    batches = over_bus / cluster.bus
    return [
        cost("gpu_slice", size + indices / gpus, local * indices, size, indices / gpus, (0.0,)),
        cost("ram", 0.0, copies, size, over_bus, (batches,)),
        cost("prefetch of ram", 0.0, copies, size, over_bus, (batches,)),
        cost("prefetch of cache", 0.0, local * indices, size, over_bus, (batches, from_disk)),
        # float32: four times the bytes of the other loaders.
        cost("disk", 0.0, local * indices, 0.0, 4 * over_bus, (4 * batches, decoding, fetching), stored),
    ]


def choose(table: list[Cost]) -> Cost | None:
    """The simplest of the loaders that fit and are within 5% of the shortest epoch."""
    fit = [cost for cost in table if not cost.lacking]
    shortest = min((cost.epoch_s for cost in fit), default=0.0)
    return next((cost for cost in fit if cost.epoch_s <= 1.05 * shortest), None)


def hit_share(memory: float) -> float:
    """Hit rate of a page cache that holds a share `memory` of the set.

    Each epoch reads every page once, in a new random order, and the least recently used page is evicted. A page at
    position p of one epoch and q of the next (as shares of an epoch) is still cached if the pages read in between,
    1 - p(1 - q) of the set, fit. The result is the integral over p and q.
    """
    if memory >= 1:
        return 1.0
    return memory + (1 - memory) * math.log(1 - memory)


def simulated_hits(memory: float, pages: int = 2000, epochs: int = 12, seed: int = 0) -> float:
    """`hit_share` by simulation: an LRU cache over shuffled epochs, of which the first two warm it up."""
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


def format_bytes(size: float) -> str:
    """`50 MB`."""
    for unit, name in ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def format_time(seconds: float) -> str:
    """`1.5 h`."""
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{1000 * seconds:.3g} ms"


def best_loaders(cluster: Cluster, sample: Sample) -> str:
    """Table of the best loader by set size and number of GPUs."""
    rows = []
    for size in SETS:
        cells = []
        for gpus in GPUS:
            cost = choose(costs(size, gpus, cluster, sample)) if size / sample.decoded >= gpus else None
            cells.append(f"{cost.loader}, {format_time(cost.epoch_s)}" if cost else "fewer images than GPUs")
        rows.append([format_bytes(size), format_bytes(INDEX * size / sample.decoded), *cells])
    return str(
        tabulate(
            rows,
            ["set", "permutation", *(f"{gpus:,} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)],
            tablefmt="github",
        )
    )


def all_loaders(size: float, gpus: int, cluster: Cluster, sample: Sample) -> str:
    """Table of the costs of all loaders for one set size and number of GPUs."""
    rows = [
        [
            cost.loader,
            format_bytes(cost.gpu_memory),
            format_bytes(cost.host_memory),
            format_bytes(cost.fetched),
            format_time(cost.start_s),
            format_bytes(cost.bus),
            format_bytes(cost.network),
            format_time(cost.epoch_s),
            f"no: {cost.lacking}" if cost.lacking else "yes",
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


def decoding_times(cluster: Cluster, sample: Sample) -> str:
    """How long one machine takes to decode each set once, to fill a cache."""
    times = [
        f"{format_bytes(size)}: {format_time(size / sample.decoded * sample.decode_s / cluster.cores)}" for size in SETS
    ]
    return ", ".join(times)


def hit_rates() -> str:
    """Table of the hit rate of a page cache, by formula and by simulation."""
    rows = [
        [f"{memory:.0%}", f"{hit_share(memory):.1%}", f"{simulated_hits(memory):.1%}"]
        for memory in (0.25, 0.5, 0.75, 0.9, 0.95)
    ]
    return str(tabulate(rows, ["set in memory", "reads answered, formula", "simulated"], tablefmt="github"))


def main() -> None:
    cluster, sample = Cluster(), Sample()
    print("Which loader serves, and its epoch:\n")
    print(best_loaders(cluster, sample))
    for size, gpus in ((5 * GB, 8), (500 * GB, 64), (5 * TB, 64)):
        print(f"\nA set of {format_bytes(size)} on {gpus} GPUs:\n")
        print(all_loaders(size, gpus, cluster, sample))
    print(f"\nDecoding once, by one machine: {decoding_times(cluster, sample)}")
    print("\nWhat the page cache answers where a part of the set fits into memory:\n")
    print(hit_rates())


if __name__ == "__main__":
    main()
