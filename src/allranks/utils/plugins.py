"""Registries that installed packages extend by entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.utils.text import did_you_mean

T = TypeVar("T")


class PluginRegistry(MutableMapping[str, T], Generic[T]):
    """Records by name: first the built-in ones, then those of installed packages.

    Entry points are read when a name is not built in, or when all names are listed: reading them takes as long as many
    a command. A built-in name cannot be replaced. A package that cannot be loaded is not listed; `problem_of` says why.
    """

    def __init__(self, builtin: Mapping[str, T], *, group: str, kind: type[T]) -> None:
        self._own, self._group, self._kind = dict(builtin), group, kind
        self._installed: dict[str, T] | None = None
        self._problems: dict[str, str] = {}

    def _plugins(self) -> dict[str, T]:
        if self._installed is None:
            from importlib.metadata import entry_points

            self._installed = {}
            for point in sorted(entry_points(group=self._group), key=lambda point: point.name):
                package = point.dist.name if point.dist is not None else point.module
                try:
                    plugin = point.load()
                    if not isinstance(plugin, self._kind):
                        raise TypeError(f"{point.value} is no {self._kind.__name__}")
                except Exception as error:  # noqa: BLE001 - code of other people
                    first = (str(error).splitlines() or [""])[0]
                    self._problems[point.name] = f"package {package}: {type(error).__name__}: {first}"
                else:
                    self._installed[point.name] = plugin
        return self._installed

    def problem_of(self, name: str) -> str | None:
        """Return why the package that has this name could not be loaded; None if there is no such package."""
        self._plugins()
        return None if name in self else self._problems.get(name)

    def require(self, name: str, key: str, *, what: str = "value", hint: Callable[[], str] | None = None) -> T:
        """Return the record that a key of the spec names.

        Args:
            key: the key, for messages.
            what: what the names are.
            hint: returns the suggestion for an unknown name, such as ``; did you mean 'slurm'?``; None: the nearest
            name.

        Raises:
            SpecError: unknown name.
            EnvironmentNotAble: the package of that name cannot be loaded.
        """
        if name in self:
            return self[name]
        if problem := self.problem_of(name):
            raise EnvironmentNotAble(f"{key}: {name} cannot be loaded: {problem}")
        near = hint() if hint else did_you_mean(name, self)
        raise SpecError(f"{key}: unknown {what} {name!r}{near} (known: {', '.join(self)})")

    def __getitem__(self, name: str) -> T:
        return self._own[name] if name in self._own else self._plugins()[name]

    def __setitem__(self, name: str, record: T) -> None:
        self._own[name] = record

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in self._plugins() if name not in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)
