"""Batches are normalised on their device as by torchvision, bit for bit, and augmented by a list of operations."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision import transforms
from torchvision.transforms import CenterCrop

from tests.support.operations import PRESETS, keys, operation, preset_of, read_preset
from vitmnist import make_loader
from vitmnist.augment.base import OPERATIONS, derive_keys
from vitmnist.augment.preprocess import Compose, Preprocess, build_augment, get_input_size
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config, DataConfig
from vitmnist.config.validation import validate
from vitmnist.data.channel_statistics import compute_statistics
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import TensorSet
from vitmnist.errors import ConfigError, DataError


@pytest.mark.parametrize("statistics", ["mnist", "random"])
def test_every_byte_is_normalised_as_in_torchvision(tiny: Dataset, statistics: str) -> None:
    mean, std = ((0.1307,), (0.3081,)) if statistics == "mnist" else compute_statistics(tiny.train.images)
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    split = replace(tiny.train, mean=mean, std=std)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    assert torch.equal(Preprocess(split)(values)[0], transform(Image.fromarray(values[0, 0].numpy())))


def test_float_images_pass_and_bytes_are_not_written_to(tiny: Dataset) -> None:
    """The dtype decides. Looking at values would wait for the device, and break a compiled graph."""
    preprocess = Preprocess(tiny.train)
    images = tiny.train.images.clone()
    normalised = preprocess(images)
    assert normalised.dtype == torch.float32
    assert torch.equal(images, tiny.train.images)
    for floats in (normalised, 9 * normalised, tiny.train.images / 255, normalised.half()):
        assert preprocess(floats) is floats
    assert torch._dynamo.explain(preprocess)(images).graph_break_count == 0


def test_images_stay_on_their_device_and_become_float32_with_any_default_dtype() -> None:
    """Images of this size are normalised in threads, into memory that is allocated before."""
    preprocess, images = Preprocess(mean=0.5, std=0.5), torch.zeros(2, 1, 256, 256, dtype=torch.uint8)
    with torch.device("meta"):  # as torch.set_default_device("cuda")
        assert torch.equal(preprocess(images), torch.full_like(images, -1, dtype=torch.float32))
    torch.set_default_dtype(torch.float64)
    try:
        assert {preprocess(part).dtype for part in (images, images[:, :, :8])} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_images_of_a_wrong_dtype_are_refused(tiny: Dataset, dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match=f"images: must be uint8, or floating point and normalised, found {dtype}"):
        Preprocess(tiny.train)(tiny.train.images.to(dtype))


def test_statistics_are_the_same_from_a_split_a_pair_and_by_name(tiny: Dataset) -> None:
    train = tiny.train
    expected = Preprocess(train)(train.images)
    for other in (
        Preprocess((train.images, train.labels)),
        Preprocess([train.images, train.labels]),
        Preprocess(mean=train.mean, std=train.std),
        Preprocess(mean=train.mean[0], std=train.std[0]),
    ):
        assert torch.equal(other(train.images), expected)
    with pytest.raises(ConfigError, match="no statistics of a map-style dataset; give mean= and std="):
        Preprocess(TensorDataset(train.images, train.labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[:, 0], r"found \[23, 28, 28\]; images.unsqueeze\(1\) adds the channels"),
        (lambda images: images.permute(0, 2, 3, 1), r"found \[23, 28, 28, 1\]; .*images.permute\(0, 3, 1, 2\) puts"),
        (lambda images: images.flatten(1), r"must be \[B, 1, H, W\], because mean and std .*, found \[23, 784\]"),
        (lambda images: images.expand(-1, 3, -1, -1), r"have 1 channel\(s\), found \[23, 3, 28, 28\]"),
    ],
    ids=["no channels", "channels last", "flattened", "too many channels"],
)
def test_images_that_do_not_fit_the_statistics_are_refused(
    tiny: Dataset, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    images = change(tiny.train.images)
    with pytest.raises(DataError, match=message):
        Preprocess(tiny.train)(images)
    if images.dim() == 4 and images.shape[1] != 3:
        with pytest.raises(DataError, match=r"must be \[B, C, H, W\]"):
            Preprocess((images, tiny.train.labels))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"mean": 0.1}, {"mean": [], "std": []}, {"mean": 120, "std": 60}, {"mean": float("nan"), "std": 1}],
)
def test_impossible_statistics_are_refused(arguments: dict) -> None:
    with pytest.raises(ConfigError, match="mean"):
        Preprocess(**arguments)


@pytest.fixture(scope="module")
def data() -> TensorSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (23, 3, 16, 20), generator=generator, dtype=torch.uint8)
    return TensorSet(images, torch.arange(23) % 5)


def test_operations_are_applied_in_order_with_the_keys_of_their_positions(data: TensorSet) -> None:
    values = [{"name": "horizontal_flip"}, {"name": "shift", "pixels": 3}, {"name": "horizontal_flip"}]
    found = Preprocess(data, Compose(values))(data.images, keys(23))
    expected = data.images
    for place, value in enumerate(values):
        expected = operation(**value)(expected.float(), derive_keys(keys(23), place))
    assert torch.equal(found, Preprocess(data)(expected.to(torch.uint8)))


def test_float_images_outside_of_0_to_1_are_clamped_before_they_are_augmented(data: TensorSet) -> None:
    """Images that were normalised with other statistics can be outside."""
    preprocess = Preprocess(data, Compose([{"name": "horizontal_flip", "p": 0.0}]))
    images = 3 * preprocess(data.images)
    pixels = (255 * (images * preprocess.std + preprocess.mean)).round().clamp(0, 255).to(torch.uint8)
    assert torch.equal(preprocess(images, keys(23)), preprocess(pixels))


def test_every_preset_is_a_list_of_operations_with_all_their_parameters() -> None:
    for preset in {*PRESETS} - {"compose"}:  # this one leaves parameters out
        values = read_preset(preset)
        assert values["name"] == preset
        for listed in values["operations"]:
            assert set(listed) == set(OPERATIONS.with_defaults(listed)), preset


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "none"])
@pytest.mark.parametrize("shuffle", ["sample", "batch", "balanced"])
def test_every_loader_gets_the_images_of_a_preset(data: TensorSet, preset: str, shuffle: str) -> None:
    """Loaders that deliver normalised images get the same ones, so the batches of a run do not depend on its loader."""
    preprocess = Preprocess(data, preset_of(preset), classes=5)
    epochs = []
    for name in ("gpu_slice", "ram", "prefetch", "disk"):
        options = {"num_workers": 0} if name == "disk" else {}
        with make_loader(name, data, batch_size=5, device="cpu", seed=3, shuffle=shuffle, **options) as loader:
            batches = zip(loader.epoch(1), preprocess.random_keys(loader.sampler, 1), strict=True)
            if preprocess.has_mixing:
                epochs.append(torch.cat([preprocess.mix_batch(*batch, keys)[0] for batch, keys in batches]))
            else:
                epochs.append(torch.cat([preprocess(images, keys) for (images, _), keys in batches]))
    assert all(torch.equal(epoch, epochs[0]) for epoch in epochs)
    normalised = Preprocess(data)(data.images)
    sampler = EpochSampler(23, 5, seed=3, shuffle=shuffle, labels=data.labels)
    assert not torch.equal(epochs[0], normalised[sampler.sample_ids(1) % 23])
    assert torch.equal(preprocess(data.images), normalised)  # without keys, as in an evaluation
    (batch, *_), (drawn, *_) = (sampler.sample_ids(1) % 23).split(5), preprocess.random_keys(sampler, 1)
    arguments = (data.labels[batch], drawn) if preprocess.has_mixing else (drawn,)
    again = (preprocess.mix_batch if preprocess.has_mixing else preprocess)(normalised[batch], *arguments)
    assert torch.equal((again[0] if preprocess.has_mixing else again), epochs[0][:5])


@pytest.mark.parametrize("preset", ["cifar", "crops", "imagenet", "trivial"])
def test_an_augmented_image_does_not_depend_on_its_batch_nor_on_threads_and_normalising(preset: str) -> None:
    """The first operations on large images run on bytes, in threads."""
    images = torch.randint(0, 256, (23, 3, 100, 120), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    operations = preset_of(preset).operations
    values = read_preset(preset)["operations"][: len(operations)]  # without mixing
    preprocess = Preprocess((images, torch.zeros(23)), Compose(values))
    expected = torch.cat([preprocess(image[None], key[None]) for image, key in zip(images, keys(23), strict=True)])
    assert torch.equal(preprocess(preprocess(images), keys(23)), expected)
    with torch.inference_mode():
        assert torch.equal(preprocess(images, keys(23)), expected)


def test_parameters_are_overridden_by_position_and_have_defaults() -> None:
    def build(*overrides: str) -> Compose:
        return build_augment(validate(Config, compose(overrides)).data)

    preset = build("data/augment=cifar", "data.augment.operations.2.p=0.25")
    assert (preset.operations[2].options.p, preset.operations[2].options.ratio) == (0.25, [0.3, 3.3])
    listed = build("data/augment=compose", "data.augment.operations=[{name: horizontal_flip}, {name: cutmix}]")
    assert (listed.operations[0].options.p, listed.mixing.alpha) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ("[{name: shift}, {name: mixpu}]", "operations.1.name=mixpu: not known; did you mean 'mixup'?"),
        ("[{name: color_jitter, contrats: 1}]", "operations.0.contrats: there is no such key; did you mean 'contrast'"),
        ("[{name: horizontal_flip, p: 1.5}]", "operations.0.p=1.5: must be at least 0 and at most 1"),
        ("[{name: horizontal_flip, p: often}]", "operations.0.p=often: must be float"),
        ("[{name: random_erasing, scale: [0.3, 0.1]}]", "scale=[0.3, 0.1]: must be two numbers, the lower one first"),
        ("[{name: random_erasing, scale: [0.3, 1.2]}]", "at least 0 and at most 1"),
        ("[{name: random_resized_crop, ratio: [1, .inf]}]", "operations.0.ratio=inf: must be finite"),
        ("[{name: random_resized_crop, ratio: 1}]", "operations.0.ratio=1: must be tuple[float, float]"),
        ("[{name: mixup, alpha: 0}]", "operations.0.alpha=0.0: must be above 0 and at most 10"),
        ("[{name: mixup}, {name: shift}]", "operations.0.name=mixup: mixes finished images; move it to the end"),
        ("[cutmix]", "operations.0=cutmix: must be {name: NAME}; did you mean 'cutmix'? allowed: "),
        ("flip", "data.augment.operations=flip: must be list[Any]"),
    ],
)
def test_an_error_names_the_position_of_the_operation(operations: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_augment(DataConfig(augment={"name": "compose", "operations": yaml.safe_load(operations)}))
    assert message in str(raised.value)


def test_the_preset_none_takes_no_operations_and_a_crop_size_is_a_size() -> None:
    with pytest.raises(ConfigError, match="name=none: is the empty list; for operations, set data/augment=compose"):
        build_augment(DataConfig(augment={"name": "none", "operations": [{"name": "shift"}]}))
    with pytest.raises(ConfigError, match=r"data.crop_size=big: must be a number of pixels, or"):
        build_augment(DataConfig(augment=read_preset("none"), crop_size="big"))


@pytest.mark.parametrize(("value", "size"), [(None, (16, 20)), (8, (8, 8)), ([6, 16], (6, 16))])
@pytest.mark.parametrize("preset", ["crops", "shift"])
def test_augmented_and_other_images_have_the_crop_size(
    data: TensorSet, preset: str, value: object, size: tuple[int, int]
) -> None:
    config = DataConfig(augment=read_preset(preset), crop_size=value)
    assert get_input_size(config, 16, 20) == size
    preprocess = Preprocess(data, build_augment(config))
    assert torch.equal(preprocess(data.images), CenterCrop(size)(Preprocess(data)(data.images)))
    augmented = preprocess(data.images, keys(23))
    assert augmented.shape == (23, 3, *size)
    if preset == "shift":  # The centre of the shifted images
        shifted = Preprocess(data, preset_of("shift"))(data.images, keys(23))
        assert torch.equal(augmented, CenterCrop(size)(shifted))


def test_an_augmentation_that_mixes_needs_labels(data: TensorSet) -> None:
    images, drawn = data.images, keys(23)
    with pytest.raises(ConfigError, match="call mix_batch"):
        Preprocess(data, preset_of("imagenet"))(images, drawn)
    with pytest.raises(ConfigError, match="pass Preprocess a split, or the number of classes="):
        Preprocess(data, preset_of("imagenet")).mix_batch(images, data.labels, drawn)
    with pytest.raises(ConfigError, match="does not mix"):
        Preprocess(data, preset_of("cifar")).mix_batch(images, data.labels, drawn)
