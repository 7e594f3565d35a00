"""Registries: the metrics, or the members of a config group, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from vitmnist.errors import ConfigError, format_error, suggest_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The group of entry points in which an installed package lists the modules that register its members.
ENTRY_POINT_GROUP = "vitmnist.members"

log = logging.getLogger(__name__)

Built = TypeVar("Built")
Builder = TypeVar("Builder", bound=Callable[..., object])
Options = TypeVar("Options")


@dataclass
class NoOptions:
    """The options class of members without options."""


class Registry(Generic[Built]):
    """Functions and classes by name, which modules of a package and of installed packages register.

    A configuration selects a member of a group by `name`; no value of a configuration is ever imported.

    Args:
        group: the name of the registry in messages: `metrics`, or a config group such as `data/loader`.
        package: the package whose modules register members. They are imported when a member is first requested.
    """

    def __init__(self, group: str, package: str) -> None:
        self.group, self.package = group, package
        self._registered: dict[str, tuple[Any, Callable[..., Built]]] = {}

    def register(self, name: str, declaration: Any = NoOptions) -> Callable[[Builder], Builder]:
        """Decorator that registers a class or function under `name`; `build` calls it with (options, *args).

        Args:
            declaration: a dataclass whose fields are the keys of the member's YAML file, except `name`; for a metric,
                its description.
        """

        def decorate(builder: Builder) -> Builder:
            registered = self._registered.get(name)
            # The same definition may register again: in a notebook, or in a module whose first import failed.
            if registered and _definition(registered[1]) != _definition(builder):
                raise ValueError(f"{self.group}: {name!r} is registered already; choose another name")
            self._registered[name] = (declaration, cast(Callable[..., Built], builder))
            return builder

        return decorate

    def import_package(self) -> dict[str, tuple[Any, Callable[..., Built]]]:
        """Import the modules of the package; return the members registered so far by name."""
        import_members(self.package)
        return self._registered

    def import_all(self) -> dict[str, tuple[Any, Callable[..., Built]]]:
        """Import the modules of the package and of installed packages; return the members by name, sorted."""
        import_installed()
        return dict(sorted(self.import_package().items()))

    def names(self) -> list[str]:
        return list(self.import_all())

    def with_defaults(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults of missing options; values with an unknown name are returned unchanged."""
        member = self._find(values.get("name"))
        return {**asdict(member[0]()), **values} if member else dict(values)

    def resolve(self, values: object, key: str | None = None) -> tuple[Callable[..., Built], DataclassInstance]:
        """Return the class or function that is registered as `values["name"]`, and its validated options.

        Args:
            key: the key of `values` in the configuration, by default the group; empty for a function argument.

        Raises:
            ConfigError: the name is unknown, or the options do not fit it.
        """
        from vitmnist.config.validation import join_key, validate  # This imports OmegaConf.

        key = self.group.replace("/", ".") if key is None else key
        if not isinstance(values, Mapping):
            raise ConfigError(f"{key}={values}: must be {{name: NAME}}; {suggest_names(str(values), self.names())}")
        options = dict(values)
        name = options.pop("name", None)
        if not (member := self._find(name)):
            reasons = [suggest_names(str(name), self.names()), *import_installed()]
            raise ConfigError(f"{join_key(key, 'name')}={name}: not known; {'; '.join(reasons)}")
        return member[1], validate(member[0], options, key)

    def resolve_options(self, values: Mapping[str, Any], base: type[Options]) -> Options:
        """Return the validated options as `resolve` does; raises `ConfigError` if they do not derive from `base`."""
        _, options = self.resolve(values)
        if not isinstance(options, base):
            raise ConfigError(
                f"{self.group}={values['name']}: its options, {type(options).__name__}, must derive from "
                f"{base.__module__}.{base.__name__}"
            )
        return options

    def build(self, values: object, *args: object, key: str | None = None) -> Built:
        """Build the member `values["name"]` from its options and `args`; raises the errors of `resolve`."""
        builder, options = self.resolve(values, key)
        return builder(options, *args)

    def _find(self, name: object) -> tuple[Any, Callable[..., Built]] | None:
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
