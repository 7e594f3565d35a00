"""Registries: the metrics, or the members of a config group, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from vitmnist.errors import ConfigError, format_error, suggest_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The group of entry points in which an installed package lists the modules that register its members.
ENTRY_POINT_GROUP = "vitmnist.members"

log = logging.getLogger(__name__)

P = ParamSpec("P")
Built = TypeVar("Built")
Options = TypeVar("Options")
Builder = Callable[Concatenate[Any, P], Built]
"""A class or function that builds a member from its options and further arguments."""


@dataclass
class NoOptions:
    """The options class of members without options."""


class Registry(Generic[P, Built]):
    """Functions and classes by name, which modules of a package and of installed packages register.

    A configuration selects a member of a group by `name`; no value of a configuration is ever imported.
    `Registry[[A, B], C]` has members that build a C from (options, A, B).

    Args:
        group: the name of the registry in messages: `metrics`, or a config group such as `data/loader`.
        package: the package whose modules register members. They are imported when a member is first requested.
    """

    def __init__(self, group: str, package: str) -> None:
        self.group, self.package = group, package
        self._registered: dict[str, tuple[Any, Builder[P, Built]]] = {}

    def register(self, name: str, declaration: Any = NoOptions) -> Callable[[Builder[P, Built]], Builder[P, Built]]:
        """Decorator that registers a class or function under `name`; `build` calls it with (options, *args).

        Args:
            declaration: a dataclass whose fields are the keys of the member's YAML file, except `name`; for a metric,
                its description.
        """

        def decorate(builder: Builder[P, Built]) -> Builder[P, Built]:
            registered = self._registered.get(name)
            # The same definition may register again: in a notebook, or in a module whose first import failed.
            if registered and _definition(registered[1]) != _definition(builder):
                raise ValueError(f"{self.group}: {name!r} is registered already; choose another name")
            self._registered[name] = (declaration, builder)
            return builder

        return decorate

    def import_package(self) -> dict[str, tuple[Any, Builder[P, Built]]]:
        """Import the modules of the package; return the members registered so far by name."""
        import_members(self.package)
        return self._registered

    def import_all(self) -> dict[str, tuple[Any, Builder[P, Built]]]:
        """Import the modules of the package and of installed packages; return the members by name, sorted."""
        import_installed()
        return dict(sorted(self.import_package().items()))

    def names(self) -> list[str]:
        return list(self.import_all())

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults of missing options; a configuration with an unknown name is returned unchanged."""
        member = self._find(config.get("name"))
        return {**asdict(member[0]()), **config} if member else dict(config)

    def resolve(self, config: object, key: str | None = None) -> tuple[Builder[P, Built], DataclassInstance]:
        """Return the class or function that is registered as `config["name"]`, and its validated options.

        Args:
            key: the key of `config` in the whole configuration, by default the group; empty for a function argument.

        Raises:
            ConfigError: the name is unknown, or the options do not fit it.
        """
        from vitmnist.config.validation import join_key, validate  # This imports OmegaConf.

        key = self.group.replace("/", ".") if key is None else key
        if not isinstance(config, Mapping):
            raise ConfigError(f"{key}={config}: must be {{name: NAME}}; {suggest_names(str(config), self.names())}")
        options = dict(config)
        name = options.pop("name", None)
        if not (member := self._find(name)):
            reasons = [suggest_names(str(name), self.names()), *import_installed()]
            raise ConfigError(f"{join_key(key, 'name')}={name}: not known; {'; '.join(reasons)}")
        return member[1], validate(member[0], options, key)

    def resolve_options(self, config: Mapping[str, Any], base: type[Options]) -> Options:
        """Return the validated options as `resolve` does; raises `ConfigError` if they do not derive from `base`."""
        _, options = self.resolve(config)
        if not isinstance(options, base):
            raise ConfigError(
                f"{self.group}={config['name']}: its options, {type(options).__name__}, must derive from "
                f"{base.__module__}.{base.__name__}"
            )
        return options

    def build(self, config: object, *args: P.args, **kwargs: P.kwargs) -> Built:
        """Build the member `config["name"]` from its options and the arguments; raises the errors of `resolve`."""
        builder, options = self.resolve(config)
        return builder(options, *args, **kwargs)

    def _find(self, name: object) -> tuple[Any, Builder[P, Built]] | None:
        """Return a member; installed packages are imported only if the package has no such member."""
        return self.import_package().get(str(name)) or self.import_all().get(str(name))


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
    """Import the modules that installed packages declare; log and return the failures."""
    failures = []
    for module in entry_points(group=ENTRY_POINT_GROUP):
        try:
            module.load()
        except Exception as error:
            package = module.dist.name if module.dist else module.name
            failures.append(f"{module.value} of the package {package} cannot be imported: {format_error(error)}")
            log.warning(failures[-1])
    return failures
