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
    """Served models as one worker knows them. Call `update_names` before reading them."""

    def __init__(self, roster: Roster, health: Health, roles: Collection[Role]) -> None:
        """Create an empty table. `roles`: a model needs an instance of each of these roles."""
        self.has_several_groups = False
        """Whether instances serve different names, and at least one model can be served."""
        self.are_all_names_known = False
        """Whether instances serve different models, so that unknown names are not served.

        If they only differ in adapters, engines may serve names that they do not list.
        """
        self.served_names: frozenset[str] = _NO_NAMES
        """Names that at least one instance serves."""
        self.fully_served_names = _NO_NAMES
        """Names for which each needed role has an instance, healthy or not."""
        self.on_change: Callable[[], None] | None = None
        """Called when the served names of an instance have changed."""
        self._roster = roster
        self._health = health
        self._roles = tuple(roles)
        self._seen_versions = (-1, -1)
        self._names_by_backend: dict[Backend, frozenset[str]] = {}  # names of each instance; empty: unknown
        self._base_names_by_backend: dict[Backend, frozenset[str]] = {}  # the same without adapters

    def update_names(self) -> None:
        """Update the served names if the roster or the engines' reports have changed. Otherwise it is nearly free."""
        seen = self._roster.version_cells[0], self._health.version_number
        if seen == self._seen_versions:
            return
        self._seen_versions = seen
        served: dict[Backend, frozenset[str]] = {}
        own: dict[Backend, frozenset[str]] = {}
        for role in Role:
            for member in self._roster.members_of_role(role):
                backend = member.backend
                served[backend], own[backend] = self._find_names_of(backend)
        if served != self._names_by_backend or own != self._base_names_by_backend:
            self._names_by_backend, self._base_names_by_backend = served, own
            self.served_names = frozenset[str]().union(*served.values())
            self.fully_served_names = find_fully_served(served, self._roles)
            self.has_several_groups = len({*served.values()} - {_NO_NAMES}) > 1 and bool(self.fully_served_names)
            self.are_all_names_known = self.has_several_groups and len({*own.values()} - {_NO_NAMES}) > 1
            if self.on_change is not None:
                self.on_change()

    def _find_names_of(self, backend: Backend) -> tuple[frozenset[str], frozenset[str]]:
        """Return the served names of an instance, with and without adapters."""
        if backend.models:
            named = frozenset(backend.models)
            return named, named
        facts = self._health.health_of(backend).engine_facts
        if facts is None or not facts.identity.models:
            return self._names_by_backend.get(backend, _NO_NAMES), self._base_names_by_backend.get(backend, _NO_NAMES)
        models = facts.identity.models
        return models | facts.identity.adapters, models

    def names_of(self, backend: Backend) -> frozenset[str]:
        """Return the served names of an instance; empty if they are unknown."""
        return self._names_by_backend.get(backend, _NO_NAMES)

    def base_models(self, backend: Backend) -> frozenset[str]:
        """Return the served models of an instance without its adapters; empty if they are unknown."""
        return self._base_names_by_backend.get(backend, _NO_NAMES)

    def backends_serving(self, model_name: str, backends: Collection[Backend]) -> tuple[Backend, ...]:
        """Return the backends that may get requests for a model, in the given order.

        They are those that serve it. If there are none, they are those whose models are unknown.

        `backends`: all backends of one role.
        """
        known = tuple(backend for backend in backends if model_name in self._names_by_backend.get(backend, _NO_NAMES))
        return known or tuple(backend for backend in backends if not self._names_by_backend.get(backend))

    def have_no_common_model(self, backend: Backend, other_backend: Backend) -> bool:
        """Return whether two backends are known to serve no common model, so that no KV goes between them."""
        return (
            self.has_several_groups
            and bool(self.names_of(backend))
            and bool(self.names_of(other_backend))
            and not self.names_of(backend) & self.names_of(other_backend)
        )

    def model_groups(self) -> Sequence[frozenset[str]]:
        """Return groups of names that are served by the same instances.

        Names that all instances with known models serve are omitted.
        """
        members = defaultdict[str, list[str]](list)
        for backend, names in self._names_by_backend.items():
            for name in names:
                members[name].append(backend.key)
        all_keys = [backend.key for backend, names in self._names_by_backend.items() if names]
        together = defaultdict[tuple[str, ...], list[str]](list)
        for name, keys in members.items():
            if keys != all_keys:
                together[tuple(keys)].append(name)
        return sorted(map(frozenset[str], together.values()), key=sorted)


def find_fully_served(names_by_backend: Mapping[Backend, frozenset[str]], roles: Collection[Role]) -> frozenset[str]:
    """Return the names that a backend of each role serves. A backend with unknown models may serve any name."""
    found = frozenset[str]().union(*names_by_backend.values())
    for role in roles:
        of_role = [names for backend, names in names_by_backend.items() if backend.role is role]
        if all(of_role):
            found &= frozenset[str]().union(*of_role)
    return found


def minority_instances(served_models: Mapping[Backend, frozenset[str]]) -> Mapping[Backend, str]:
    """Return backends whose models do not match the other roles, each with a message.

    They serve no model that a backend of each role serves. If there is no such model, they are those that do not serve
    the most frequent set of names; ties go to the first set. Backends with unknown models are never returned.
    """
    by_role = defaultdict[Role, set[str]](set)
    for backend, names in served_models.items():
        by_role[backend.role] |= names
    complete = find_fully_served(served_models, by_role)
    served_models = {backend: names for backend, names in served_models.items() if names}
    if complete:
        return {
            backend: (
                f"serves {quote_names(names)}, and {_names_of_other_roles(by_role, backend.role)}: it gets no requests"
            )
            for backend, names in served_models.items()
            if not names & complete
        }
    if len(set(served_models.values())) < 2:
        return {}
    common = Counter(served_models.values()).most_common(1)[0][0]
    other = next(backend for backend, names in served_models.items() if names == common)
    majority = f"{other.role} instance {other.name} serves {quote_names(common)}"
    return {
        backend: f"serves {quote_names(names)}, and {majority}: requests for a model of only one of them fail"
        for backend, names in served_models.items()
        if names != common
    }


def _names_of_other_roles(names_by_role: Mapping[Role, Collection[str]], role: Role) -> str:
    return ", and ".join(
        f"{other} instances {quote_names(names)}" for other, names in names_by_role.items() if other is not role
    )


def quote_names(names: Collection[str], max_names: int = _MAX_NAMES) -> str:
    """Return the first names in quotes for a log line, and the number of the others."""
    shown = [repr(name[:64]) for name in sorted(names)[:max_names]]
    return ", ".join(shown) + (f" and {len(names) - max_names} others" if len(names) > max_names else "")
