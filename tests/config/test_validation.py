"""Options are checked: numbers are finite and within the bounds that a field declares."""

import math
from dataclasses import dataclass

import pytest

from vitmnist.config.validation import config_field, validate
from vitmnist.errors import ConfigError


@dataclass
class Steps:
    cap: float
    factors: list[float] = config_field(at_least=0)


def test_a_misspelled_bound_is_an_error_when_the_field_is_declared() -> None:
    with pytest.raises(TypeError, match="atleast"):
        config_field(atleast=0)


def test_numbers_are_finite_and_elements_of_a_list_within_its_bounds() -> None:
    assert validate(Steps, {"cap": -1, "factors": [3, 1, 2]}).factors == [3, 1, 2]
    for cap, factor, message in ((0, -1, "factors=-1.0: must be at least 0"), (math.nan, 1, "cap=nan: must be finite")):
        with pytest.raises(ConfigError, match=f"^loss.{message}"):
            validate(Steps, {"cap": cap, "factors": [1, factor]}, "loss")
