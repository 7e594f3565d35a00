"""The tests keep compiled modules: else each of their processes compiles all of them again, which takes seconds."""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
