"""The highest accuracy is given with its uncertainty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.records import DATASET, Records, epoch, the_only, write
from vitmnist.report.accuracy import highest_accuracy


def accuracies(depth: int, *by_seed: float, **record: Any) -> Records:
    return [
        {"epochs": [epoch(2.0, eval_acc=value)], "config": {"seed": seed, "model.depth": depth}, **record}
        for seed, value in enumerate(by_seed)
    ]


ACCURACY: dict[str, tuple[Records, str]] = {
    "one seed": (
        accuracies(3, 97.0) + accuracies(6, 97.1) + accuracies(9, 90.0),
        "Highest median accuracy: model.depth=6, 97.10% (95% interval 96.75–97.41 of 10,000 images; one seed). Within "
        "its uncertainty: model.depth=3. Not enough seeds to tell it from model.depth=9: 7 in common are needed.",
    ),
    "six seeds, always higher": (
        accuracies(3, *(90 + n / 8 for n in range(6))) + accuracies(6, *(90.25 + n / 8 for n in range(6))),
        "Highest median accuracy: model.depth=6, 90.56% (95% interval 89.97–91.12 of 10,000 images; 90.25–90.88 over 6 "
        "seeds). With the same seeds it is above model.depth=3 by 0.25 to 0.25 points (96.9%).",
    ),
    "six seeds, once lower": (
        accuracies(3, 90.0, *[90.0] * 5) + accuracies(6, 89.0, *[91.0] * 5),
        "Highest median accuracy: model.depth=6, 91.00% (95% interval 90.42–91.55 of 10,000 images; 89.00–91.00 over 6 "
        "seeds). Within its uncertainty: model.depth=3.",
    ),
    "lower on the seeds that both have": (
        accuracies(3, *[90.0] * 6) + accuracies(6, *[89.0] * 6, *[91.0] * 7),
        "Highest median accuracy: model.depth=6, 91.00% (95% interval 90.42–91.55 of 10,000 images; 89.00–91.00 over "
        "13 seeds). With the same seeds it is below model.depth=3 by 1.00 to 1.00 points (96.9%).",
    ),
    "unknown number of images": (
        [one for n in (3, 6) for one in accuracies(n, 90.0 + n, dataset={**DATASET, "test_size": None})],
        "Highest median accuracy: model.depth=6, 96.00% (number of evaluated images unknown, so no interval; one "
        "seed). Not enough seeds to tell it from model.depth=3: 6 in common are needed.",
    ),
    "the same with each loader": (
        [
            {"loader": loader, "batch_size": size, "epochs": [epoch(2.0, eval_acc=size / 4)]}
            for loader in ("ram", "disk")
            for size in (100, 200)
        ],
        "Highest median accuracy: batch_size=200, 50.00% (95% interval 49.02–50.98 of 10,000 images; one seed). Not "
        "enough seeds to tell it from batch_size=100: 8 in common are needed.",
    ),
    "one configuration": (accuracies(3, 97.0, 98.0), ""),
}


@pytest.mark.parametrize(("records", "expected"), ACCURACY.values(), ids=ACCURACY)
def test_the_highest_accuracy_is_named_with_its_uncertainty(records: Records, expected: str, tmp_path: Path) -> None:
    assert highest_accuracy(the_only(write(tmp_path, records))) == expected
