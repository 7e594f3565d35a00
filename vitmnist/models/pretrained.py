"""The models of torchvision and of timm, by name. They are built with random weights; only a new run reads others."""

import inspect
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from vitmnist.config.validation import config_field
from vitmnist.errors import ConfigError, MissingExtraError, as_data_error, suggest_names
from vitmnist.models import MODELS, PretrainedOptions

TWO_HEADED = ["googlenet", "inception_v3"]
"""Models of torchvision that, in training, also return the logits of auxiliary heads."""
BLOCKS = r"layer\d|stage\d|blocks\.\d|trunk_output\.\w+|encoder\.layers\.\w+|(features|layers)\.\d+(?=\.\w+\.)"
"""Names of torchvision's stages, or of the blocks of its ViT. The flat layers of VGG do not match."""
NO_WEIGHT_DECAY = ("class_token", "pos_embedding", "relative_position_bias_table")
OLD_NAMES = {
    r"(denselayer\d+\.\w+)\.(\d)\.": r"\1\2.",
    r"\.mlp\.linear_1\.": ".mlp.0.",
    r"\.mlp\.linear_2\.": ".mlp.3.",
}
"""Names in the files of torchvision's DenseNet and ViT, which torchvision replaces as it loads them."""
Weights = dict[str, Tensor]
DOWNLOAD = "model.weights=default (to read weights from a file instead, set model.weights=FILE)"


@dataclass
class TorchvisionOptions(PretrainedOptions):
    """See `conf/model/torchvision.yaml`."""

    architecture: str = "resnet18"

    def download(self) -> Weights:
        from torchvision.models import get_model_weights

        with as_data_error(DOWNLOAD):
            default = get_model_weights(self.architecture).DEFAULT
            return dict(default.get_state_dict(progress=False, check_hash=True, weights_only=True))


@MODELS.register("torchvision", TorchvisionOptions)
def build_torchvision(options: TorchvisionOptions, shape: tuple[int, int, int], num_classes: int) -> Any:
    """Build a network for images of `shape`; raises `ConfigError` if torchvision has no such model."""
    from torchvision import models

    name, known = options.architecture, models.list_models(module=models, exclude=TWO_HEADED)
    if name not in known:
        raise ConfigError(f"model.architecture={name}: {suggest_names(name, known)}")
    sizes: dict[str, Any] = {"vit": {"image_size": shape[1]}, "maxvit": {"input_size": shape[1:]}}
    model = models.get_model(name, num_classes=num_classes, **sizes.get(name.partition("_")[0], {}))
    if shape[0] != 3:
        stem = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        stem.in_channels, stem.weight = shape[0], nn.Parameter(adapt_input_channels(stem.weight.detach(), shape[0]))
    model.layer_pattern = BLOCKS
    model.no_weight_decay = [name for name, _ in model.named_parameters() if name.endswith(NO_WEIGHT_DECAY)]
    return model


@dataclass
class TimmOptions(TorchvisionOptions):
    """See `conf/model/timm.yaml`."""

    drop_path: float = config_field(0.0, at_least=0, below=1)

    def download(self) -> Weights:
        with as_data_error(DOWNLOAD):
            import timm

            timm.models.set_pretrained_check_hash(True)
            return dict(timm.create_model(self.architecture, pretrained=True).state_dict())


@MODELS.register("timm", TimmOptions)
def build_timm(options: TimmOptions, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build a model for images of `shape`; raises `ConfigError` if timm has no such model, or it has no `drop_path`."""
    if find_spec("timm") is None:
        raise MissingExtraError("timm", "timm")
    import timm

    name = options.architecture
    arguments: dict[str, Any] = {"img_size": shape[1:], "drop_path_rate": options.drop_path or None}
    if not timm.is_model(name):
        raise ConfigError(f"model.architecture={name}: timm has no such model; timm.list_models() returns all names")
    while True:
        try:
            return timm.create_model(name, in_chans=shape[0], num_classes=num_classes, **arguments)
        except TypeError as error:  # Most convolutional networks take any size, and have no argument for it.
            if "drop_path_rate" in str(error):
                raise ConfigError(f"model.drop_path={options.drop_path}: {name} has none; set it to 0") from error
            if "img_size" not in str(error) or not arguments.pop("img_size", None):
                raise


def adapt_input_channels(weight: Tensor, channels: int) -> Tensor:
    """Convert the weight of a convolution to other input channels; the output for grey images stays the same."""
    return weight.sum(dim=1, keepdim=True).repeat(1, channels, 1, 1) / channels


def fit_weights(weights: Weights, model: Any, num_classes: int) -> tuple[Weights, list[str]]:
    """Fit weights to the size and channels of the model's images; also return the names of a head for other classes."""
    module, head = inspect.getmodule(type(model)), []
    for old, new in OLD_NAMES.items():
        weights = {re.sub(old, new, name): value for name, value in weights.items()}
    if convert := getattr(module, "checkpoint_filter_fn", None):  # timm
        weights = convert(weights, model)
    elif "encoder.pos_embedding" in weights and (interpolate := getattr(module, "interpolate_embeddings", None)):
        weights = interpolate(model.image_size, model.patch_size, weights)
    stem = next((f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)), "")
    for name, value in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, value)  # Files from before torch 0.4.1 lack it; torch does the same.
        shape = weights[name].shape if name in weights else value.shape
        if name == stem and shape[1] != value.shape[1]:
            weights[name] = adapt_input_channels(weights[name], value.shape[1])
        elif shape[1:] == value.shape[1:] and shape[:1] != value.shape[:1] == (num_classes,):
            head.append(name)
    return weights, head
