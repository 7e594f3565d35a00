"""The name of this program, for commands that a user can copy from a message."""

from __future__ import annotations

import sys
from pathlib import Path

from vitmnist.runtime.files import display_path


def program(ranks: int = 1) -> str:
    """`vitmnist`, `python -m vitmnist` or `python train.py`, as it was started; with several ranks by torchrun."""
    script = Path(sys.argv[0])
    started = f"torchrun --nproc-per-node={ranks}" if ranks > 1 else "python"
    if script.suffix == ".py" and script.name != "__main__.py":
        return f"{started} {display_path(script)}"
    return f"{started} -m vitmnist" if ranks > 1 or script.suffix == ".py" else script.name
