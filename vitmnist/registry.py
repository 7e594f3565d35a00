"""Registries: the names that a config group may choose, each with its options and the code that builds it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vitmnist.errors import ConfigError, allowed_names, describe_error

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# An installed package names the modules that register its members in this group of entry points.
INSTALLED = "vitmnist.members"

log = logging.getLogger(__name__)

Built = TypeVar("Built")
Description = TypeVar("Description")
Builder = TypeVar("Builder", bound=Callable[..., object])


@dataclass
class NoOptions:
    """The options of a member that has none."""


class Members(Generic[Description, Built]):
    """Functions and classes by name, each with a description. They are found by being in a module of a package.

    Installed packages register more; they are imported when a name is unknown, or all names are asked for.

    Args:
        group: what they are members of, for messages.
        package: the package whose modules register the members; they are imported when one is first asked for.
    """

    def __init__(self, group: str, package: str) -> None:
        self.group, self.package = group, package
        self._registered: dict[str, tuple[Description, Callable[..., Built]]] = {}

    def register(self, name: str, description: Description) -> Callable[[Builder], Builder]:
        """Decorator that registers a class or function under `name`."""

        def decorate(builder: Builder) -> Builder:
            if name in self._registered:
                raise ValueError(f"{self.group}: {name!r} is registered already; choose another name")
            self._registered[name] = (description, builder)  # type: ignore[assignment]
            return builder

        return decorate

    def names(self) -> list[str]:
        """The registered names, sorted."""
        import_installed()
        return sorted(self._members)

    def description_of(self, name: str) -> Description:
        """What describes `name`: the dataclass of its options, or how a metric is shown."""
        return self._members[name][0]

    def function_of(self, name: str) -> Callable[..., Built]:
        """The class or function that was registered as `name`."""
        return self._members[name][1]

    @property
    def _members(self) -> dict[str, tuple[Description, Callable[..., Built]]]:
        import_members(self.package)
        return self._registered

    def _find(self, name: object) -> tuple[Description, Callable[..., Built]] | None:
        if name not in self._members:
            import_installed()
        return self._members.get(str(name))


class Registry(Members["type[DataclassInstance]", Built]):
    """The members of one config group, each a class or function with a dataclass of options.

    A configuration chooses by `name`, so it can build only what was registered: no value of it is ever imported.
    """

    def register(self, name: str, options: type[DataclassInstance] = NoOptions) -> Callable[[Builder], Builder]:
        """Decorator that registers a class or function under `name`; `build` calls it with (options, *parts).

        Args:
            options: a dataclass; its fields are the keys of the member's YAML file, apart from `name`.
        """
        if not is_dataclass(options):
            raise TypeError(f"the options of {name!r} must be a dataclass, not {options!r}")
        return super().register(name, options)

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values`, with the defaults of missing options; `build` refuses an unknown name."""
        member = self._find(str(values.get("name")))
        return {**asdict(member[0]()), **values} if member else dict(values)

    def resolve(self, values: object, key: str | None = None) -> tuple[Callable[..., Built], DataclassInstance]:
        """The builder of the member that `values["name"]` names, and its validated options.

        Args:
            key: the key of `values` in the configuration, by default the group's; it is empty if they are in none.

        Raises:
            ConfigError: an unknown name, or options that do not fit it.
        """
        from vitmnist.config.validation import join, validate  # Not at the top: it imports OmegaConf.

        key = self.group.replace("/", ".") if key is None else key
        if not isinstance(values, Mapping):
            shown = "null" if values is None else str(values)
            raise ConfigError(f"{key}={shown}: must be {{name: NAME}}; {allowed_names(shown, self.names())}")
        options = dict(values)
        name = options.pop("name", None)
        if not (member := self._find(str(name))):
            raise ConfigError(f"{join(key, 'name')}={name}: not known; {allowed_names(str(name), self.names())}")
        schema, builder = member
        return builder, validate(schema, options, key)

    def build(self, values: object, *parts: object, key: str | None = None) -> Built:
        """Build the member that `values["name"]` names, from its options and the given parts; raises as `resolve`."""
        builder, options = self.resolve(values, key)
        return builder(options, *parts)


@cache
def import_members(package: str) -> None:
    """Import every module of a package, so that a new member is registered by its file being there."""
    for module in iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")


@cache
def import_installed() -> None:
    """Import what installed packages declare; one that fails is named in a warning."""
    for module in entry_points(group=INSTALLED):
        try:
            module.load()
        except Exception as error:
            package = module.dist.name if module.dist else module.name
            log.warning("%s of the package %s cannot be imported: %s", module.value, package, describe_error(error))
