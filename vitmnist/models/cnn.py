"""A small convolutional network. It is cheaper than the transformer, so loading takes a larger share of the time."""

from dataclasses import dataclass

from torch import Tensor, nn

from vitmnist.config.validation import config_field
from vitmnist.models import MODELS


@dataclass
class CNNOptions:
    """See `conf/model/cnn.yaml`."""

    width: int = config_field(16, at_least=1)


@MODELS.register("cnn", CNNOptions)
class CNN(nn.Module):
    """Two 3×3 convolutions, each followed by 2×2 max pooling, and a linear layer."""

    def __init__(self, options: CNNOptions, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.features = nn.Sequential(
            nn.Conv2d(channels, options.width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(options.width, 2 * options.width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * options.width * (height // 4) * (width // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map float32 `[B, C, H, W]` to logits `[B, classes]`."""
        logits: Tensor = self.head(self.features(images))
        return logits
