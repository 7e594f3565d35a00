"""Parses the command line of `train` (Hydra's options, overrides and `resume=`), and formats keywords as overrides."""

import os
import re
import reprlib
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from vitmnist.config import CONF, is_group, is_hydra_override, parse_key, without_keys
from vitmnist.config.validation import escape_interpolations
from vitmnist.errors import ConfigError

# These options of Hydra would bypass the validation of the configuration, or load a pickle.
UNSUPPORTED_OPTIONS = ("config-path", "config-name", "experimental-rerun")


@dataclass(frozen=True)
class Arguments:
    """The arguments of `train`: Hydra's options, the overrides without `resume`, and the value of `resume`.

    `--config-dir` and the folder of `resume=FOLDER` become overrides of `hydra.searchpath` and `hydra.run.dir`.
    """

    argv: list[str]
    """The unparsed arguments."""
    options: Namespace
    overrides: list[str]
    resume: str | None
    """None, `auto`, or the folder of the run to resume."""

    @property
    def overrides_to_compose(self) -> list[str]:
        """The overrides that Hydra applies. With `resume=FOLDER`, the others change the recorded configuration."""
        return self.overrides if self.resume in (None, "auto") else [*filter(is_hydra_override, self.overrides)]


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line; raises `ConfigError` for unknown options and for arguments that contradict each other."""
    # This function is private, but Hydra has no public parser.
    from hydra._internal.utils import get_args_parser

    with lazy_help_accepted():
        parser = get_args_parser()
    options, unknown = parser.parse_known_intermixed_args(argv)
    overrides: list[str] = [*options.overrides]
    for override in overrides:
        section, _, option = parse_key(override).rpartition(".")
        group = section.replace(".", "/")
        if group and option == "name" and is_group(group):
            raise ConfigError(f"{override}: keeps the options of another member; set {group}=NAME")
    unsupported = [f"--{name}" for name in UNSUPPORTED_OPTIONS if getattr(options, name.replace("-", "_"))]
    if refused := unknown + unsupported:
        raise ConfigError(f"{refused[0]}: there is no such option; set keys without dashes, as in epochs=3")
    if options.config_dir:
        config_dir = _find_config_dir(options.config_dir)
        overrides.append(f"hydra.searchpath=[{quote(f'file://{config_dir.as_posix()}')}]")
    if options.multirun:
        overrides.append("hydra.mode=MULTIRUN")
    resume = find_value("resume", overrides)
    overrides = without_keys(overrides, ["resume"])
    if resume == "auto":
        if not any(find_value(key, overrides) for key in ("hydra.run.dir", "hydra.sweep.dir")):
            advice = "set hydra.run.dir=FOLDER for a run, or hydra.sweep.dir=FOLDER for a sweep"
            raise ConfigError(f"resume=auto: needs a folder; {advice}")
    elif resume is not None:
        if options.multirun:
            advice = "to resume a sweep, repeat its command with hydra.sweep.dir=FOLDER resume=auto"
            raise ConfigError(f"-m: resume={resume} resumes a run, not a sweep; {advice}")
        overrides.append(f"hydra.run.dir={quote(os.path.expanduser(resume))}")
    return Arguments(argv, options, overrides, resume)


def _find_config_dir(name: str) -> Path:
    """Return the folder of `--config-dir`; raises `ConfigError` if Hydra would ignore one of its files."""
    config_dir = Path(name).resolve()
    if not config_dir.is_dir():
        raise ConfigError(f"--config-dir: {name}: there is no such folder")
    for path in config_dir.rglob("*.yaml"):
        ours = CONF / path.relative_to(config_dir)
        if ours.exists() and not ours.samefile(path):
            raise ConfigError(f"--config-dir: {path} would be ignored: the project has a file of that name; rename it")
    return config_dir


@contextmanager
def lazy_help_accepted() -> Iterator[None]:
    """In the block, let Hydra create its parser: Hydra 1.3 passes help that is not text for `--shell-completion`.

    Argparse of Python 3.14 checks the help when an option is added, so the help is set afterwards.
    """
    add_argument: Callable[..., Action] = ArgumentParser.add_argument

    def add_argument_unchecked(*names: object, help: str | None = None, **options: object) -> Action:
        action = add_argument(*names, **options)
        action.help = help or action.help
        return action

    try:
        ArgumentParser.add_argument = add_argument_unchecked  # type: ignore[method-assign]
        yield
    finally:
        ArgumentParser.add_argument = add_argument  # type: ignore[method-assign]


def find_value(key: str, overrides: Iterable[str]) -> str | None:
    """Return the last value of a key, without quotes; None if the key is not set, or is `null`."""
    values = [override.partition("=")[2] for override in overrides if parse_key(override) == key]
    return values[-1].strip("'\"") if values and values[-1] != "null" else None


def quote(text: str, mark: Quote = Quote.single) -> str:
    """Quote text as a value in Hydra's grammar; `${` is escaped, so that it is not interpolated."""
    if re.fullmatch(r"[\w./+-]+", text, re.ASCII):
        return text
    return QuotedString(escape_interpolations(text), mark).with_quotes()


def to_overrides(keys: Mapping[str, object], section: str = "") -> Iterator[str]:
    """Convert keywords to overrides: `data={"holdout": 0.1}` becomes `data.holdout=0.1`."""
    for name, value in keys.items():
        key = f"{section}{name}"
        group = key.replace(".", "/")
        # Any other dict is a value that Hydra merges: `lr_scale={"*": 0.1}`.
        if isinstance(value, Mapping) and (CONF / group).is_dir():
            yield from to_overrides(value, f"{key}.")
        elif key == "resume":
            yield f"resume={'null' if value is None else value}"  # `parse_arguments` quotes it.
        elif not is_group(group):
            yield f"{key}={_format_value(key, value)}"
        elif isinstance(value, str):
            yield f"{group}={_format_value(group, value)}"
        else:
            advice = "for several members, call vitmnist.train for each"
            raise ConfigError(f"{group}={value!r}: must be the name of a member; {advice}")


def _format_value(key: str, value: object) -> str:
    """Format a value in Hydra's grammar; raises `ConfigError` for values of other types."""
    import numpy as np  # Not at the top, because `vitmnist --help` does not need it.

    if value is None:
        return "null"
    if isinstance(value, Real | np.bool_):
        return str(value).lower()  # `True` becomes `true`.
    if isinstance(value, str | Path):
        text = quote(str(value))
        # Text such as `null` or `1e3` needs quotes.
        is_text = text.startswith("'") or isinstance(OverridesParser.create().parse_override(f"_={text}").value(), str)
        return text if is_text else f"'{text}'"
    if isinstance(value, list | tuple):
        return f"[{','.join(_format_value(key, item) for item in value)}]"
    if isinstance(value, Mapping):
        # The grammar does not allow quotes in a key.
        names = [re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", str(name)) for name in value]
        items = [_format_value(key, item) for item in value.values()]
        return f"{{{','.join(map(':'.join, zip(names, items, strict=True)))}}}"
    raise ConfigError(f"{key}={reprlib.repr(value)}: must be a number, text, a path, None, a list or a dict")
