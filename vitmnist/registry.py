"""Config groups: registries of classes and functions by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from vitmnist.errors import ConfigError, format_error, suggest_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

Options = TypeVar("Options")
P = ParamSpec("P")
Built = TypeVar("Built")
Builder = Callable[Concatenate[Any, P], Built]
"""A class or function that builds a member from its options and further arguments."""


@dataclass
class NoOptions:
    """The options of members without options."""


@dataclass(frozen=True)
class Member(Generic[P, Built]):
    """A registered class or function, the dataclass of its options, and its description if the group wants one."""

    options_type: type[DataclassInstance]
    function: Builder[P, Built]
    info: Any = None


@dataclass(eq=False)
class ConfigGroup(Generic[Options, P, Built]):
    """The members of a config group, such as `data/loader`, by name. Messages name the group `group`.

    The modules of `package` register members. Modules of installed packages can register more. A configuration selects
    a member by `name`; no value of a configuration is ever imported. The other keys of the configuration, and of the
    member's YAML file, are the fields of its options.
    `ConfigGroup[Base, [A, B], C]` has members that build a C from (options, A, B). Their options derive from `Base`.
    With `info_types`, each member has a description of one of these types.
    """

    group: str
    package: str
    options_base: type[DataclassInstance] | None = None
    info_types: tuple[type, ...] = ()
    _members: dict[str, Member[P, Built]] = field(default_factory=dict, init=False)

    def register(
        self, name: str, options_type: type[DataclassInstance] | None = None, *, info: object = None
    ) -> Callable[[Builder[P, Built]], Builder[P, Built]]:
        """Decorator that registers a class or function of (options, *args) under `name`."""
        options_type = options_type or self.options_base or NoOptions
        if self.options_base and not issubclass(options_type, self.options_base):
            raise ValueError(f"{self.group}: the options of {name!r} must derive from {self.options_base.__name__}")
        options_type()  # An option without a default raises `TypeError` here.
        if self.info_types and not isinstance(info, self.info_types):
            names = " or ".join(kind.__name__ for kind in self.info_types)
            raise ValueError(f"{self.group}: {name!r} needs info=, a {names}")

        def decorate(function: Builder[P, Built]) -> Builder[P, Built]:
            member = self._members.get(name)
            # The same definition may register again: in a notebook, or in a module whose first import failed.
            if member and _definition(member.function) != _definition(function):
                raise ValueError(f"{self.group}: {name!r} is registered already; choose another name")
            self._members[name] = Member(options_type, function, info)
            return function

        return decorate

    def members(self) -> dict[str, Member[P, Built]]:
        """Return every member, by name, sorted."""
        import_members(self.package)
        import_installed()
        return dict(sorted(self._members.items()))

    def find(self, name: object) -> Member[P, Built] | None:
        """Return a member, or None. Installed packages are imported only if the package has no such member."""
        import_members(self.package)
        return self._members.get(str(name)) or self.members().get(str(name))

    @contextmanager
    def temporarily(self, **members: Member[P, Built]) -> Iterator[None]:
        """Add or replace members, such as in a test; on exit from the block, restore the members from before."""
        before = self.members()
        self._members = {name: member for name, member in before.items() if name not in members}
        try:
            for name, member in members.items():
                self.register(name, member.options_type, info=member.info)(member.function)
            yield
        finally:
            self._members = before

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults of missing options; a configuration with an unknown name is returned unchanged."""
        member = self.find(config.get("name"))
        return {**asdict(member.options_type()), **config} if member else dict(config)

    def resolve(
        self, config: object, key: str | None = None, *, complete: bool = False
    ) -> tuple[Builder[P, Built], Options]:
        """Return the class or function that is registered as `config["name"]`, and its validated options.

        Args:
            key: the key of `config` in the whole configuration, by default the group; empty for a function argument.
            complete: add the defaults of missing options. A composed configuration has all: a missing one is an error.

        Raises:
            ConfigError: the name is unknown, or the options do not fit it.
        """
        from vitmnist.config.validation import join_key, validate  # This imports OmegaConf.

        key = self.group.replace("/", ".") if key is None else key
        if not isinstance(config, Mapping) or "name" not in config:
            raise ConfigError(f"{key}={config}: must be {{name: NAME}}; {suggest_names(str(config), self.members())}")
        values = self.with_defaults(config) if complete else dict(config)
        name = values.pop("name", None)
        if not (member := self.find(name)):
            reasons = [suggest_names(str(name), self.members()), *import_installed()]
            raise ConfigError(f"{join_key(key, 'name')}={name}: not known; {'; '.join(reasons)}")
        options: Any = validate(member.options_type, values, key)
        return member.function, options

    def build(self, config: object, *args: P.args, **kwargs: P.kwargs) -> Built:
        """Build the member `config["name"]` from its options, by default its own, and the arguments; see `resolve`."""
        builder, options = self.resolve(config, complete=True)
        return builder(options, *args, **kwargs)


def _definition(builder: Callable[..., object]) -> tuple[str, str]:
    function = getattr(builder, "func", builder)  # A `partial` has no name.
    return function.__module__, function.__qualname__


@cache
def import_members(package: str) -> None:
    """Import every module of a package. Each module registers its members, so there is no list of modules."""
    for module in iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")


@cache
def import_installed() -> list[str]:
    """Import the modules that installed packages declare as entry points; log and return the failures."""
    failures = []
    for module in entry_points(group="vitmnist.members"):
        try:
            module.load()
        except Exception as error:
            package = module.dist.name if module.dist else module.name
            failures.append(f"{module.value} of the package {package} cannot be imported: {format_error(error)}")
            log.warning(failures[-1])
    return failures
