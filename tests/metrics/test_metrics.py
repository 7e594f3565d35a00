"""`metrics` selects the metrics of a run, with their options."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from tests.conftest import AddMembers, Printed, result_of
from vitmnist.config.validation import config_field
from vitmnist.inference.trained_model import load_model
from vitmnist.metrics import METRICS, BatchMetricInfo
from vitmnist.registry import Member


@dataclass
class TopKOptions:
    k: int = config_field(5, at_least=1)


def count_top_k(logits: Tensor, labels: Tensor, *, k: int) -> Tensor:
    return (logits.topk(k, dim=1).indices == labels[:, None]).sum()


def test_a_run_computes_the_selected_metrics_and_an_evaluation_others(
    quick: list[str], tmp_path: Path, succeed: Printed, refuse: Printed, add_members: AddMembers
) -> None:
    add_members(METRICS, top_k=Member(TopKOptions, count_top_k, BatchMetricInfo(unit="%", tag="k", direction="max")))
    metrics = "metrics=[macro_f1,{name: top_k, k: 10}]", "monitor=macro_f1"
    succeed(*quick, *metrics, "data.holdout=7", "hydra.run.dir=run")
    result = result_of(tmp_path / "run")
    names = {"eval_macro_f1", "eval_loss", "eval_s", "eval_top_k"}
    assert {name for name in result["epochs"][-1] if name.startswith("eval_")} == names
    assert result["epochs"][-1]["train_top_k"] == result["test"]["test_top_k"] == 100
    evaluated = load_model(tmp_path / "run").evaluate(overrides=["metrics=[acc,{name: top_k, k: 1}]"])
    assert evaluated.metrics == {"acc": evaluated.accuracy, "top_k": evaluated.accuracy}
    changed = "metrics=[macro_f1,{name: top_k, k: 1}]"
    assert "the run began with another configuration: metrics=" in refuse("resume=run", "epochs=9", changed)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("[ac]", "metrics.0.name=ac: not known; did you mean 'acc'?"),
        ("[acc,acc]", "metrics: acc is selected twice"),
        ("[{name: acc, k: 1}]", "metrics.0.k: there is no such key; allowed: none"),
        ("[macro_f1]", "monitor=eval_acc: is not selected; add it to metrics, or set monitor"),
    ],
)
def test_a_selection_that_cannot_be_used_is_one_message(
    selection: str, message: str, quick: list[str], refuse: Printed
) -> None:
    assert message in refuse(*quick, f"metrics={selection}")
