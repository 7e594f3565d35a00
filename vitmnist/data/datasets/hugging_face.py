"""Images of a Hugging Face dataset, read by its package `datasets` from a folder or a Parquet file."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from typing import Any

from vitmnist.config.validation import section
from vitmnist.data.datasets.base import DATASETS
from vitmnist.data.datasets.decoding import DecodingOptions, decode_dataset
from vitmnist.data.image_listing import SPLIT_OF, ClassOfImage, ImageListing, Remark, list_files
from vitmnist.data.images import ImageReader, Pixels
from vitmnist.errors import ConfigError, DataError, MissingExtraError, as_data_error, join_names


@dataclass
class FeatureNames:
    """The columns of images and labels; None: the only column of the type `Image` or `ClassLabel`."""

    image: str | None = None
    label: str | None = None


@dataclass
class HuggingFaceOptions(DecodingOptions):
    """Images and labels of a folder that `save_to_disk` wrote, or of Parquet files.

    See `conf/data/dataset/hugging_face.yaml`.
    """

    columns: FeatureNames = section(FeatureNames, may_change_on_resume=True)

    def list_images(self) -> ImageListing:
        if find_spec("datasets") is None:
            raise MissingExtraError("datasets", "hugging_face")
        import datasets

        key, folder = f"data.dataset.path={self.path}", Path(self.path).expanduser().absolute()
        splits, remarks = _open_splits(key, folder)
        features = splits["train"].features
        image = _find_column("image", self.columns.image, features, datasets.Image)
        label = _find_column("label", self.columns.label, features, datasets.ClassLabel)
        to_names = getattr(features[label], "int2str", lambda values: [*map(str, values)])
        class_order = getattr(features[label], "names", None)
        encoded_rows: dict[str, Any] = {}
        images: dict[str, ClassOfImage] = {}
        with as_data_error(f"{key}: columns {image} and {label}"):
            for split, rows in splits.items():
                encoded_rows[split] = rows.select_columns(image).cast_column(image, datasets.Image(decode=False))
                labels = rows[label][:]
                if None in labels:
                    raise DataError(f"row {labels.index(None)} of {split} has no label")
                names = to_names(labels)
                class_order = class_order or to_names(sorted(set(labels)))  # The integer 10 comes after 2.
                images[split] = {f"{split}/{row:08}": name for row, name in enumerate(names)}
        read = partial(_read_row, self.reader, encoded_rows, image)
        containers = list_files(folder) if folder.is_dir() else [folder]
        return ImageListing(folder, images, read, containers, class_order=class_order, remarks=remarks)


DATASETS.register("hugging_face", HuggingFaceOptions)(decode_dataset)


def _open_splits(key: str, folder: Path) -> tuple[dict[str, Any], list[Remark]]:
    """Open the splits of a dataset that `save_to_disk` wrote, or of Parquet files; `key` begins the messages."""
    import datasets

    if not folder.exists():
        raise ConfigError(f"{key}: there is no such folder or Parquet file")
    with as_data_error(f"{key} cannot be read"):
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            opened = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            opened = datasets.load_dataset(str(folder))
        else:
            opened = datasets.load_dataset("parquet", data_files=str(folder))
    named = opened if isinstance(opened, Mapping) else {"train": opened}
    split_of = {name: SPLIT_OF[name.lower()] for name in named if name.lower() in SPLIT_OF}
    splits = {split: named[name] for name, split in split_of.items()}
    if "train" not in splits or len(splits) < len(split_of):
        raise ConfigError(f"{key}: must have one split train, and at most one val and test; found {join_names(named)}")
    unused = [name for name in named if name not in split_of]
    return splits, [(WARNING, f"{key}: splits that are not used: {join_names(unused)}")] if unused else []


def _read_row(reader: ImageReader, splits: Mapping[str, Any], column: str, path: Path) -> Pixels:
    """Read the image in row N of a split as if it were the file `SPLIT/N`."""

    def read_bytes(path: Path) -> bytes:
        image = splits[path.parent.name][int(path.name)][column]
        return image["bytes"] or Path(image["path"]).read_bytes()

    return reader(path, read_bytes)


def _find_column(key: str, name: str | None, features: Mapping[str, Any], kind: type) -> str:
    columns = [name] if name else [column for column, feature in features.items() if isinstance(feature, kind)]
    if len(columns) != 1 or columns[0] not in features:
        names = f"the columns are {join_names(features)}"
        raise ConfigError(f"data.dataset.columns.{key}={name or 'null'}: must name the column of each {key}; {names}")
    return columns[0]
