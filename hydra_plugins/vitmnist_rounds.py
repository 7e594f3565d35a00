"""A sweeper for `repeats`: Hydra finds its plugins in this namespace package."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper


class RoundsSweeper(BasicSweeper):
    """Hydra's own sweeper, with the jobs of each round in an order drawn from the seed.

    In a fixed order, a machine that slows down steadily would favour the first job of each round.
    """

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        """The overrides of the next jobs."""
        assert self.config is not None
        jobs = super().get_job_batch()
        draw = Random(f"{self.config.seed} {self.batch_index}")
        return sorted(jobs, key=lambda job: (_round_of(job), draw.random()))


def _round_of(job: Sequence[str]) -> int:
    return next(int(one.partition("=")[2]) for one in job if one.startswith("repeat="))
