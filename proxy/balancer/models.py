"""Which models the instances serve: from where to where a request for one may go.

As long as all that are known serve the same, nobody has to ask. What an instance serves is what whoever named it has
said of it, or else what its engine tells, adapters included, and has told last while it is down. One of which neither
is known is taken for whatever model its role has no other instance for.
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

_MOST_NAMES: Final = 3
_NOTHING: Final = frozenset[str]()


class ServedModels:
    """What is served, as one worker knows it. `refresh` comes before whatever is read, once something has changed."""

    def __init__(self, roster: Roster, health: Health, roles: Collection[Role]) -> None:
        """`roles`: those of which a model needs an instance each."""
        self.is_mixed = False
        """Not all instances serve the same: some model can be served, and has not all of them."""
        self.is_closed = False
        """They serve different models, so that no instance serves a name that is not known. Where they differ in
        adapters alone, engines may know names that they do not list.
        """
        self.names: frozenset[str] = _NOTHING
        """All that is known to be served by some instance."""
        self.complete = _NOTHING
        """Those of the names for which each role that a model needs has an instance, be it well or not."""
        self.on_change: Callable[[], None] | None = None
        """Called when who serves what is another."""
        self._roster = roster
        self._health = health
        self._roles = tuple(roles)
        self._seen = (-1, -1)
        self._served: dict[Backend, frozenset[str]] = {}  # of all instances; empty: not known
        self._own: dict[Backend, frozenset[str]] = {}  # of these without adapters

    def refresh(self) -> None:
        """Take notice of what instances there are, and what they say. Nearly free as long as nothing has changed."""
        seen = self._roster.versions[0], self._health.version
        if seen == self._seen:
            return
        self._seen = seen
        served: dict[Backend, frozenset[str]] = {}
        own: dict[Backend, frozenset[str]] = {}
        for role in Role:
            for member in self._roster.members(role):
                backend = member.backend
                served[backend], own[backend] = self._told(backend)
        if served != self._served or own != self._own:
            self._served, self._own = served, own
            self.names = frozenset[str]().union(*served.values())
            self.complete = fully_served(served, self._roles)
            self.is_mixed = len({*served.values()} - {_NOTHING}) > 1 and bool(self.complete)
            self.is_closed = self.is_mixed and len({*own.values()} - {_NOTHING}) > 1
            if self.on_change is not None:
                self.on_change()

    def _told(self, backend: Backend) -> tuple[frozenset[str], frozenset[str]]:
        """What it serves, with adapters and without."""
        if backend.models:
            named = frozenset(backend.models)
            return named, named
        facts = self._health.of(backend).facts
        if facts is None or not facts.identity.models:
            return self._served.get(backend, _NOTHING), self._own.get(backend, _NOTHING)
        models = facts.identity.models
        return models | facts.identity.adapters, models

    def of(self, backend: Backend) -> frozenset[str]:
        """What an instance serves; empty: it is not known."""
        return self._served.get(backend, _NOTHING)

    def base_models(self, backend: Backend) -> frozenset[str]:
        """The names of the models that an instance serves, without its adapters (LoRA); empty: they are not known."""
        return self._own.get(backend, _NOTHING)

    def serving(self, name: str, backends: Collection[Backend]) -> tuple[Backend, ...]:
        """The backends to which a request for the model `name` may go, in the order given: those known to serve it; if
        there are none, those of which it is not known what they serve. `backends`: all of one role.
        """
        known = tuple(backend for backend in backends if name in self._served.get(backend, _NOTHING))
        return known or tuple(backend for backend in backends if not self._served.get(backend))

    def have_no_common_model(self, one: Backend, other: Backend) -> bool:
        """Whether they have no model in common, and nothing is to go between them."""
        return self.is_mixed and bool(self.of(one)) and bool(self.of(other)) and not self.of(one) & self.of(other)

    def groups(self) -> Sequence[frozenset[str]]:
        """The names that are served: together those that the same instances serve. Without those that all serve that
        are known.
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
    """Of all that is served what some backend of each role serves. One that serves nothing that is known may serve any
    of it.
    """
    found = frozenset[str]().union(*served.values())
    for role in roles:
        told = [its for backend, its in served.items() if backend.role is role]
        if all(told):
            found &= frozenset[str]().union(*told)
    return found


def minority_instances(models: Mapping[Backend, frozenset[str]]) -> Mapping[Backend, str]:
    """The backends that serve no model that some backend of each role serves, and what that means. If there is no such
    model, those that serve others than most, of equally many those that come first.

    Those of which nothing is known serve nothing here; they are not odd, and may serve any model.
    """
    by_role = defaultdict[Role, set[str]](set)
    for backend, its in models.items():
        by_role[backend.role] |= its
    complete = fully_served(models, by_role)
    models = {backend: its for backend, its in models.items() if its}
    if complete:
        return {
            backend: f"serves {quoted(its)}, and {_others(by_role, backend.role)}: it gets no requests"
            for backend, its in models.items()
            if not its & complete
        }
    if len(set(models.values())) < 2:
        return {}
    common = Counter(models.values()).most_common(1)[0][0]
    other = next(backend for backend, its in models.items() if its == common)
    theirs = f"{other.role} instance {other.name} serves {quoted(common)}"
    return {
        backend: f"serves {quoted(its)}, and {theirs}: a request for what only one of them serves fails at the other"
        for backend, its in models.items()
        if its != common
    }


def _others(by_role: Mapping[Role, Collection[str]], role: Role) -> str:
    return ", and ".join(f"{other} instances {quoted(its)}" for other, its in by_role.items() if other is not role)


def quoted(names: Collection[str], most: int = _MOST_NAMES) -> str:
    """The names, as many as fit into a line of the log."""
    shown = [repr(name[:64]) for name in sorted(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} others" if len(names) > most else "")
