"""The backends of one role as they are now: who there is, who is enabled, and who may get requests.

Eligible means enabled, which the operator says through the roster, and healthy, which probes and traffic say.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from proxy.balancer.health.backend_health import HealthState
from proxy.balancer.slow_start import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.backend import Backend, Role
    from proxy.balancer.fitness.pinned_kv import PinnedKv
    from proxy.balancer.health.health import Health, Transition
    from proxy.balancer.member import Member
    from proxy.balancer.roster import Roster


class Notes(Protocol):
    """Something that is remembered of backends."""

    def forget(self, backend: Backend) -> None:
        """A backend has left."""


class Members:
    """One role's backends, each tuple in slot order. `refresh` comes before whatever is read."""

    def __init__(
        self,
        role: Role,
        roster: Roster,
        health: Health,
        *,
        pinned_kv: PinnedKv | None,
        notes: Sequence[Notes],
        on_transition: Callable[[Transition], None],
        on_change: Callable[[], None],
    ) -> None:
        """`pinned_kv`: the KV that stays pinned on these backends, which expires as time goes by. `notes` forget the
        backends that leave. `on_change` is called when anything may be another.
        """
        self.all: tuple[Backend, ...] = ()
        """Also those that are down, disabled or draining."""
        self.enabled: tuple[Backend, ...] = ()
        """Those that neither drain nor are disabled."""
        self.weights: Mapping[Backend, int] = {}
        """Of those that are to get less than their share: how much of it, in per cent."""
        self.eligible: tuple[Backend, ...] = ()
        self.awaiting_trial: tuple[Backend, ...] = ()
        self.gone_at: float | None = None
        """When the last one that was up ceased to take connections, or to answer probes in time; None: some do both."""
        self._role = role
        self._roster = roster
        self._versions = roster.versions
        self._health = health
        self._pinned_kv = pinned_kv
        self._expiries = () if pinned_kv is None else pinned_kv.expiries
        self._notes = notes
        self._on_transition = on_transition
        self._on_change = on_change
        self._has_looked = False
        self._disabled: frozenset[Backend] = frozenset()
        self.seen_roster = self.seen_health = -1
        """The versions of both when all above was computed."""

    def refresh(self) -> None:
        """Recompute who there is, only when roster or health have changed: every pick and every scrape comes by here,
        and in each worker at least the prober.
        """
        health = self._health
        if (
            self._versions[0] == self.seen_roster
            and health.version == self.seen_health
            and health.due == math.inf
            and not self._expiries
        ):
            return
        if self._pinned_kv is not None:
            self._pinned_kv.expire()
        for transition in health.advance():
            self._on_transition(transition)
        roster_version = self._versions[0]  # read before the members: another worker may change them meanwhile
        if roster_version == self.seen_roster and health.version == self.seen_health:
            return
        members = self._roster.members(self._role)
        self._meet(members)
        self.enabled = tuple(member.backend for member in members if member.serves)
        self.weights = {member.backend: member.weight for member in members if member.weight < FULL}
        self._judge(roster_version)

    def _judge(self, roster_version: int) -> None:
        """Who of the enabled may get requests; all else was computed by this version of the roster."""
        for transition in self._health.relieve(self.enabled):
            self._on_transition(transition)
        health = self._health
        self.eligible = tuple(backend for backend in self.enabled if health.of(backend).is_eligible)
        self.awaiting_trial = tuple(backend for backend in self.enabled if health.of(backend).awaits_trial)
        if not self.eligible and not self.awaiting_trial:
            # All are new, as after a reload that replaces them: unprobed backends are better than none.
            unknown = (backend for backend in self.enabled if health.of(backend).state is HealthState.UNKNOWN)
            self.eligible = tuple(unknown)
        self.gone_at = None
        if all(health.of(backend).is_unreachable for backend in (*self.eligible, *self.awaiting_trial)):
            gone = (health.of(backend).gone_at for backend in self.enabled)
            self.gone_at = max((since for since in gone if since is not None), default=None)
        self.seen_roster, self.seen_health = roster_version, health.version
        self._on_change()

    def _meet(self, members: Sequence[Member]) -> None:
        """Forget who has left, whichever worker finalised that, and note who came later than the first look. One that
        is enabled again may be another process than the one that was disabled, so that nothing is known of its health.
        """
        backends = tuple(member.backend for member in members)
        for back in self._disabled.intersection(member.backend for member in members if member.serves):
            transition = self._health.on_enabled(back)
            if transition is not None:
                self._on_transition(transition)
        self._disabled = frozenset(member.backend for member in members if member.is_disabled)
        for gone in set(self.all).difference(backends):
            self._health.forget(gone)
            for notes in self._notes:
                notes.forget(gone)
        if self._has_looked:
            for added in set(backends).difference(self.all):
                self._health.on_added(added)
        self._has_looked = True
        self.all = backends


class SomeMembers(Members):
    """Those of a role's backends that serve some models: all others of the role are as if they did not exist. What
    happens to health when backends come and go is left to `whole`.
    """

    def __init__(
        self,
        whole: Members,
        serving: Callable[[Collection[Backend]], tuple[Backend, ...]],
        *,
        notes: Sequence[Notes],
        on_change: Callable[[], None],
    ) -> None:
        """`serving`: those of some backends that belong here, in their order."""
        super().__init__(
            whole._role,
            whole._roster,
            whole._health,
            pinned_kv=None,
            notes=notes,
            on_transition=whole._on_transition,
            on_change=on_change,
        )
        self._whole = whole
        self._serving = serving

    def refresh(self) -> None:
        """See Members."""
        whole = self._whole
        whole.refresh()
        if whole.seen_roster == self.seen_roster and self._health.version == self.seen_health:
            return
        before, self.all = self.all, self._serving(whole.all)
        self.enabled = tuple(backend for backend in self.all if backend in whole.enabled)
        self.weights = whole.weights
        for gone in set(before).difference(self.all):
            for notes in self._notes:
                notes.forget(gone)
        self._judge(whole.seen_roster)
