"""Reads the dataset and builds the model of a run from its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitmnist.augment.preprocess import get_input_size
from vitmnist.config.schema import Config
from vitmnist.data.datasets.base import DATASETS, Dataset, build_dataset
from vitmnist.data.hold_out import hold_out_and_normalize
from vitmnist.errors import ConfigError, classify_error, format_error
from vitmnist.models import MODELS, PretrainedOptions
from vitmnist.runtime.world import World
from vitmnist.training.fine_tuning import load_matching_weights, load_pretrained


def resolve_dataset_options(config: Config) -> Config:
    """Replace `auto` among the options of the dataset by what its images need, so that records have the value."""
    _, options = DATASETS.resolve(config.data.dataset)
    return replace(config, data=replace(config.data, dataset=config.data.dataset | options.resolve_auto()))


def read_dataset(config: Config, world: World) -> Dataset:
    """Read the dataset, and apply the hold-out or the fold, the channel statistics and `limit_batches`.

    On each machine, the first rank downloads or decodes it before the others read it.
    """
    if world.local_rank:
        world.barrier()
    dataset = build_dataset(config.data.dataset, config.data.root)
    if not world.local_rank:
        world.barrier()
    dataset = hold_out_and_normalize(dataset, config.data)
    return dataset.draw_subset(config.limit_batches * config.batch_size) if config.limit_batches else dataset


def build_model(
    config: Config, shape: Sequence[int], num_classes: int, device: torch.device, weights: Mapping[str, Tensor] | None
) -> nn.Module:
    """Build the model on its device with the weights that `init` or `model.weights` names, and try it on two images."""
    channels, height, width = shape
    input_shape = channels, *get_input_size(config.data, height, width)
    torch.manual_seed(config.seed)  # Weights are initialised on the CPU, and thus identical on every device.
    name = f"{config.model['name']} {config.model.get('architecture', '')}".strip()
    try:
        model = MODELS.build(config.model, input_shape, num_classes)
        if weights is not None and find_pretrained(config):
            load_pretrained(model, weights, config.init_skip, num_classes)
        elif weights is not None:
            load_matching_weights(model, weights, config.init_skip)
        _check_outputs(name, model.to(device), torch.zeros(2, *input_shape, device=device), num_classes)
    # PyTorch and model libraries raise these types for a wrong input size. Any other type is a bug in the model.
    except (RuntimeError, ValueError, AssertionError) as error:
        if (failure := classify_error(error)).cause:
            raise
        if failure.is_user_error:
            raise ConfigError(f"model={name}: {failure.message}") from error
        raise ConfigError(
            f"model={name}: fails on images {list(input_shape)}: {format_error(error).rstrip('.')}; set "
            "data.dataset.size or data.crop_size to a size that the model takes, or choose another model "
            "(HYDRA_FULL_ERROR=1 shows the traceback)"
        ) from error
    return model


def _check_outputs(name: str, model: nn.Module, images: Tensor, num_classes: int) -> None:
    """Raise `ConfigError` unless the model returns `[N, classes]`; extra outputs would train without an error."""
    with torch.no_grad():
        logits = model.eval()(images)  # In evaluation mode, no state changes.
    model.train()
    if not isinstance(logits, Tensor) or logits.shape != (len(images), num_classes):
        shown = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"model={name}: it returned {shown} for {len(images)} images of {num_classes} classes; it must return "
            f"logits [{len(images)}, {num_classes}]"
        )


def find_pretrained(config: Config) -> PretrainedOptions | None:
    """Return the options of the model if they name pretrained weights."""
    _, options = MODELS.resolve(config.model)
    return options if isinstance(options, PretrainedOptions) and options.weights else None
