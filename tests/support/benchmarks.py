"""Arguments with which each benchmark takes seconds, and the first cells of its table."""

from tests.support.pages import FEW

IMAGES = ["--train-size=60", "--batch-size=20", "--root=data"]
BENCHMARKS = {
    "epoch": ([*IMAGES, "--rounds=1", "--only", "hand", "fast"], ["hand-written loop", "gpu_slice, trainer=fast"]),
    "loaders": ([*IMAGES, "--rounds=1"], ["plain loop x[permutation[i:j]]", "ram", "gpu_slice", "cache"]),
    "step": (["--rounds=1", "--seconds=0.01", "--batch-size=4", "--root=data", "--only=fp32, eager"], ["fp32, eager"]),
    "pictures": (
        ["--folder=files", "--pictures=30", "--batches=1", "--sides=8", "--rounds=1", "--seconds=0.01"],
        ["decoding alone, 1 thread", "`disk`", "torchvision v2 per sample", "`ram`, `imagenet`"],
    ),
    "startup": (["--rounds=1", "--only=--cfg"], ["`import torch`", "`train.py --cfg job`"]),
    "time_to_accuracy": (["--seeds=1", "model.depth=1", *FEW], ["warm", "warm-cache process", "cold process"]),
}
