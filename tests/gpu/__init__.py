"""What only a GPU can show; `pytest -m gpu -n0` where there is one, in one process: its memory is nobody else's."""

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
