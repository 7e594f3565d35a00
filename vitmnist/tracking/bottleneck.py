"""Finds what limited the training of a run, from its record."""

from vitmnist.metrics.epoch_record import epochs_since_last_start, summarize
from vitmnist.metrics.epoch_table import DATA_WAIT_PCT, HOST_LEAD_S, TRAIN_S
from vitmnist.timing.table import Bottleneck
from vitmnist.tracking.result import Result


def find_bottleneck(result: Result) -> tuple[Bottleneck, float, int] | None:
    """Return what limited a run, the percentage of training spent waiting for data, and the number of steps.

    None if the record lacks the configuration, the dataset, or an epoch whose waiting was measured.
    """
    waiting_pct, config, dataset = summarize(result.epochs, DATA_WAIT_PCT), result.config, result.dataset
    if waiting_pct is None or config is None or dataset is None:
        return None
    full, short = divmod(dataset["train_size"], config["batch_size"])
    batches = full if config["data"]["drop_last"] else full + bool(short)
    lead_s, train_s = summarize(result.epochs, HOST_LEAD_S), summarize(result.epochs, TRAIN_S)
    host_lead = None
    # A short last batch runs without the graph. While Python launches it, the GPU catches up, so the lead says nothing.
    ends_without_graph = has_graph(result) and batches > full
    if lead_s is not None and train_s and str(result.device).startswith("cuda") and not ends_without_graph:
        host_lead = lead_s / (train_s / batches)
    steps = len(epochs_since_last_start(result.epochs)) * batches
    return Bottleneck.of(waiting_pct, steps, host_lead), waiting_pct, steps


def has_graph(result: Result) -> bool:
    """Whether a run captured its step in a CUDA graph."""
    return bool((result.trainer or {}).get("graph"))


def advise_on_launches(result: Result) -> str:
    """Return advice for a run that is launch-bound."""
    return "a larger batch_size helps" if has_graph(result) else "trainer=fast or a larger batch_size helps"
