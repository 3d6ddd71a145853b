"""Models that the instances serve, which decide where a request for a model may go.

The models of an instance are those that its configuration or discovery source names. Without these, they are the models
and adapters (LoRA) that its engine lists, or listed before it went down. An instance without known models gets the
requests for models that no other instance of its role serves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from proxy.common.backend import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.balancer.health import Health
    from proxy.balancer.roster import Roster
    from proxy.common.backend import Backend

_MAX_NAMES: Final = 3
_NO_NAMES: Final = frozenset[str]()


class ServedModels:
    """Served models as one worker knows them. Call `refresh` before reading them."""

    def __init__(self, roster: Roster, health: Health, roles: Collection[Role]) -> None:
        """Create an empty table. `roles`: a model needs an instance of each of these roles."""
        self.is_mixed = False
        """Whether instances serve different names, and at least one model can be served."""
        self.is_closed = False
        """Whether instances serve different models, so that unknown names are not served.

        If they only differ in adapters, engines may serve names that they do not list.
        """
        self.names: frozenset[str] = _NO_NAMES
        """Names that at least one instance serves."""
        self.complete = _NO_NAMES
        """Names for which each needed role has an instance, healthy or not."""
        self.on_change: Callable[[], None] | None = None
        """Called when the served names of an instance have changed."""
        self._roster = roster
        self._health = health
        self._roles = tuple(roles)
        self._seen = (-1, -1)
        self._served: dict[Backend, frozenset[str]] = {}  # names of each instance; empty: unknown
        self._own: dict[Backend, frozenset[str]] = {}  # the same without adapters

    def refresh(self) -> None:
        """Update the served names if the roster or the engines' reports have changed. Otherwise it is nearly free."""
        seen = self._roster.versions[0], self._health.version
        if seen == self._seen:
            return
        self._seen = seen
        served: dict[Backend, frozenset[str]] = {}
        own: dict[Backend, frozenset[str]] = {}
        for role in Role:
            for member in self._roster.members(role):
                backend = member.backend
                served[backend], own[backend] = self._names_of(backend)
        if served != self._served or own != self._own:
            self._served, self._own = served, own
            self.names = frozenset[str]().union(*served.values())
            self.complete = fully_served(served, self._roles)
            self.is_mixed = len({*served.values()} - {_NO_NAMES}) > 1 and bool(self.complete)
            self.is_closed = self.is_mixed and len({*own.values()} - {_NO_NAMES}) > 1
            if self.on_change is not None:
                self.on_change()

    def _names_of(self, backend: Backend) -> tuple[frozenset[str], frozenset[str]]:
        """Return the served names of an instance, with and without adapters."""
        if backend.models:
            named = frozenset(backend.models)
            return named, named
        facts = self._health.of(backend).facts
        if facts is None or not facts.identity.models:
            return self._served.get(backend, _NO_NAMES), self._own.get(backend, _NO_NAMES)
        models = facts.identity.models
        return models | facts.identity.adapters, models

    def of(self, backend: Backend) -> frozenset[str]:
        """Return the served names of an instance; empty if they are unknown."""
        return self._served.get(backend, _NO_NAMES)

    def base_models(self, backend: Backend) -> frozenset[str]:
        """Return the served models of an instance without its adapters; empty if they are unknown."""
        return self._own.get(backend, _NO_NAMES)

    def serving(self, name: str, backends: Collection[Backend]) -> tuple[Backend, ...]:
        """Return the backends that may get requests for a model, in the given order.

        They are those that serve it. If there are none, they are those whose models are unknown.

        `backends`: all backends of one role.
        """
        known = tuple(backend for backend in backends if name in self._served.get(backend, _NO_NAMES))
        return known or tuple(backend for backend in backends if not self._served.get(backend))

    def have_no_common_model(self, one: Backend, other: Backend) -> bool:
        """Return whether two backends are known to serve no common model, so that no KV goes between them."""
        return self.is_mixed and bool(self.of(one)) and bool(self.of(other)) and not self.of(one) & self.of(other)

    def groups(self) -> Sequence[frozenset[str]]:
        """Return groups of names that are served by the same instances.

        Names that all instances with known models serve are omitted.
        """
        members = defaultdict[str, list[str]](list)
        for backend, names in self._served.items():
            for name in names:
                members[name].append(backend.key)
        everybody = [backend.key for backend, names in self._served.items() if names]
        together = defaultdict[tuple[str, ...], list[str]](list)
        for name, keys in members.items():
            if keys != everybody:
                together[tuple(keys)].append(name)
        return sorted(map(frozenset[str], together.values()), key=sorted)


def fully_served(served: Mapping[Backend, frozenset[str]], roles: Collection[Role]) -> frozenset[str]:
    """Return the names that a backend of each role serves. A backend with unknown models may serve any name."""
    found = frozenset[str]().union(*served.values())
    for role in roles:
        of_role = [names for backend, names in served.items() if backend.role is role]
        if all(of_role):
            found &= frozenset[str]().union(*of_role)
    return found


def minority_instances(models: Mapping[Backend, frozenset[str]]) -> Mapping[Backend, str]:
    """Return backends whose models do not match the other roles, each with a message.

    They serve no model that a backend of each role serves. If there is no such model, they are those that do not serve
    the most frequent set of names; ties go to the first set. Backends with unknown models are never returned.
    """
    by_role = defaultdict[Role, set[str]](set)
    for backend, names in models.items():
        by_role[backend.role] |= names
    complete = fully_served(models, by_role)
    models = {backend: names for backend, names in models.items() if names}
    if complete:
        return {
            backend: f"serves {quoted(names)}, and {_names_of_other_roles(by_role, backend.role)}: it gets no requests"
            for backend, names in models.items()
            if not names & complete
        }
    if len(set(models.values())) < 2:
        return {}
    common = Counter(models.values()).most_common(1)[0][0]
    other = next(backend for backend, names in models.items() if names == common)
    majority = f"{other.role} instance {other.name} serves {quoted(common)}"
    return {
        backend: f"serves {quoted(names)}, and {majority}: requests for a model of only one of them fail"
        for backend, names in models.items()
        if names != common
    }


def _names_of_other_roles(by_role: Mapping[Role, Collection[str]], role: Role) -> str:
    return ", and ".join(f"{other} instances {quoted(names)}" for other, names in by_role.items() if other is not role)


def quoted(names: Collection[str], count: int = _MAX_NAMES) -> str:
    """Return the first names in quotes for a log line, and the number of the others."""
    shown = [repr(name[:64]) for name in sorted(names)[:count]]
    return ", ".join(shown) + (f" and {len(names) - count} others" if len(names) > count else "")
