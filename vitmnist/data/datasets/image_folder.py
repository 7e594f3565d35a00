"""A folder of images, with a subfolder per class or a table of labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitmnist.config.validation import config_field, section
from vitmnist.data.datasets.base import DATASETS, Dataset, FileReader
from vitmnist.data.datasets.decoding import DecodingOptions, EncodedImages, decode_dataset
from vitmnist.data.image_listing import EXTENSIONS, list_files, list_splits
from vitmnist.data.label_table import TableColumns, read_label_table
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import expand_home


@dataclass
class ImageFolderOptions(DecodingOptions):
    """See `conf/data/dataset/image_folder.yaml`."""

    labels: str | None = config_field(None, may_change=True)
    columns: TableColumns = section(TableColumns, may_change=True)
    suffix: str = config_field("", may_change=True)

    def list_images(self, folder: Path) -> tuple[FileReader, Sequence[str]]:
        names = [path.relative_to(folder).as_posix() for path in list_files(folder)]
        images = [name for name in names if name.lower().endswith(EXTENSIONS)]
        return self.reader, images or names  # A table can name files of any ending.


@DATASETS.register("image_folder", ImageFolderOptions)
def image_folder(options: ImageFolderOptions, root: Path) -> Dataset:
    """Images in `path/CLASS/`, in `path/train/CLASS/`, `path/val/CLASS/` …, or in a table; decoded once into `root`.

    Raises:
        ConfigError: the folder does not exist, or as `decode_dataset`.
        DataError, OutOfSpaceError: as `decode_dataset`.
    """
    options, folder = replace(options, **options.resolve_auto()), expand_home(options.path).absolute()
    if not folder.is_dir():
        raise ConfigError(f"data.dataset.path={options.path}: there is no such folder; it must hold a folder per class")
    folds: Mapping[str, int] | None = None
    if options.labels:
        images, folds = read_label_table(expand_home(options.labels), options.columns, options.suffix, folder)
    else:
        images = list_splits(folder)
    return decode_dataset(options, root, EncodedImages(folder, images, options.reader, folds=folds))
