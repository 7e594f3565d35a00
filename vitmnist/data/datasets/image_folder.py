"""A folder of images, with a subfolder per class or a table of labels."""

from dataclasses import dataclass
from pathlib import Path

from vitmnist.config.validation import config_field, section
from vitmnist.data.datasets.base import DATASETS
from vitmnist.data.datasets.decoding import DecodingOptions, decode_dataset
from vitmnist.data.image_listing import ImageListing, list_class_folders
from vitmnist.data.label_table import TableColumns, read_label_table
from vitmnist.errors import ConfigError


@dataclass
class ImageFolderOptions(DecodingOptions):
    """Images in `path/CLASS/`, in `path/train/CLASS/`, `path/val/CLASS/` …, or in a table.

    See `conf/data/dataset/image_folder.yaml`.
    """

    labels: str | None = config_field(None, may_change_on_resume=True)
    columns: TableColumns = section(TableColumns, may_change_on_resume=True)
    suffix: str = config_field("", may_change_on_resume=True)

    def list_images(self) -> ImageListing:
        folder = Path(self.path).expanduser().absolute()
        if not folder.is_dir():
            problem = "there is no such folder; it must hold a folder per class"
            raise ConfigError(f"data.dataset.path={self.path}: {problem}")
        if not self.labels:
            return list_class_folders(folder, self.reader)
        return read_label_table(Path(self.labels).expanduser(), self.columns, self.suffix, folder, self.reader)


DATASETS.register("image_folder", ImageFolderOptions)(decode_dataset)
