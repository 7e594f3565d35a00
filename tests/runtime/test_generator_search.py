"""Every generator that a sample can draw from is found, and its state can be restored."""

import random
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from vitmnist.runtime.generator_search import find_generators

NUMBERS = np.random.default_rng(4)
helper = ModuleType("helper")
helper.numbers = np.random.default_rng(5)


class OwnNumbers:
    """Draws in a method that `__call__` calls, from generators of the object, its class, and two modules."""

    of_class = random.Random(2)

    def __init__(self) -> None:
        self.of_object = np.random.RandomState(1)

    def __call__(self) -> list[float]:
        return self.draw()

    def draw(self) -> list[float]:
        return [numbers.random() for numbers in (self.of_object, self.of_class, NUMBERS, helper.numbers)]


def closure(numbers: torch.Generator) -> Callable[[], float]:
    return lambda: float(torch.rand((), generator=numbers))


DRAWS: dict[str, tuple[Callable[[], object], set[str]]] = {
    "attributes and variables": (OwnNumbers(), {"RandomState", "Random", "Generator"}),
    "generator expression": (lambda: sum(NUMBERS.random() for _ in "a"), {"Generator"}),
    "closure": (closure(torch.Generator()), {"Generator"}),
}


@pytest.mark.parametrize(("draw", "names"), DRAWS.values(), ids=DRAWS)
def test_generators_are_found_wherever_a_function_can_use_them(draw: Callable[[], object], names: set[str]) -> None:
    found = [*find_generators([draw])]
    assert {f"a {name} of its own" for name in names} <= {name for name, _ in found}
    states = [(set_state, get_state()) for _, (get_state, set_state) in found]
    first = draw()
    for set_state, state in states:
        set_state(state)
    assert draw() == first
