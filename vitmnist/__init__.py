"""How to feed a GPU from PyTorch: loaders that deliver the very same batches, and the trainer that compares them."""

__version__ = "0.1.0"
