"""Measures the data loaders of a training script: `python -m vitmnist.diagnose --help`.

This is a command only. `vitmnist.diagnose` is a function, which importing this module would replace.
"""

if __name__ not in ("__main__", "__mp_main__"):
    raise ImportError(
        "vitmnist.diagnose is a command and a function, not a module: type `python -m vitmnist.diagnose SCRIPT.py`, "
        "or `from vitmnist import diagnose`"
    )

if __name__ == "__main__":
    from vitmnist.diagnosis.script import main

    main()
