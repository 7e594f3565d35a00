"""Arguments of the command line, and keywords of `vitmnist.train`, which become overrides."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from vitmnist.cli.arguments import to_overrides


def test_keywords_become_overrides() -> None:
    keys: dict[str, Any] = {
        "epochs": 3,
        "ema_decay": np.float64(0.5),
        "patience": None,
        "model": "cnn",
        "init_skip": ["head.*", "a b"],
        "lr_scale": {"*": 0.1, "blocks.[0-3], a b": 1},
        "device": "cpu",
        "data": {"loader": "disk", "drop_last": np.bool_(True), "dataset": {"path": Path("it is é")}},
        "data.loader.num_workers": 4,
        "data/augment": "shift",
        "resume": Path("it is"),
    }
    assert [*to_overrides(keys)] == [
        *("epochs=3", "ema_decay=0.5", "patience=null", "model=cnn", "init_skip=['head.*','a b']"),
        *(r"lr_scale={*:0.1,blocks.\[0-3\]\,\ a\ b:1}", "device=cpu", "data/loader=disk"),
        *("data.drop_last=true", "data.dataset.path='it is é'"),
        *("data.loader.num_workers=4", "data/augment=shift", "resume=it is"),
    ]


@pytest.mark.parametrize(
    "value",
    [
        *("", "null", "true", "1e3", "1_000", "a,b", "choice(1,2)", "it's", "[a]", "a\\", "é", "ø/x"),
        *("a ${b}", "${b}", r"\${b}", r"a\\${it's} ${", r"\b"),
        *(1e-05, 1e16, -3, True, [[]], [None, "3"], [{"a b": 1, r"(a)\d,[b]:{c}=": 2}]),
    ],
    ids=repr,
)
def test_a_value_arrives_as_it_is(value: object) -> None:
    (override,) = to_overrides({"key": value})
    parsed = OmegaConf.create({"key": OverridesParser.create().parse_override(override).value()})
    arrived = OmegaConf.to_container(parsed, resolve=True)["key"]
    assert arrived == value
    assert type(arrived) is type(value)
