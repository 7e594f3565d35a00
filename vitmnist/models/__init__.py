"""The registry of models. Each module here registers a model, built with (options, image `[C, H, W]`, num_classes)."""

from dataclasses import dataclass

from torch import Tensor, nn

from vitmnist.registry import ConfigGroup

MODELS = ConfigGroup[object, [tuple[int, int, int], int], nn.Module]("model", __package__)
"""Options may derive from `PretrainedOptions`.

A model may define `no_weight_decay` (`make_decay_groups` in vitmnist/optim/optimizers.py), `layer_pattern` or
`group_matcher` (`find_layers` in vitmnist/training/fine_tuning.py).
"""


@dataclass
class PretrainedOptions:
    """Base class of the options of an architecture whose pretrained weights `weights` names: default, or a file."""

    architecture: str
    weights: str | None = None

    def download(self) -> dict[str, Tensor]:
        """Return the weights named `default`, from a cache if they are there; raises `DataError`."""
        raise NotImplementedError
