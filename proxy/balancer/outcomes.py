"""How requests ended on one role's backends, reported to health, to fitness and to the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.balancer.health.backend_health import HealthState
from proxy.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.backend import Backend
    from proxy.balancer.chooser import Chooser
    from proxy.balancer.fitness.fitness import Fitness
    from proxy.balancer.health.backend_health import BackendHealth
    from proxy.balancer.health.health import Health, Transition
    from proxy.balancer.members import Members
    from proxy.errors import UpstreamError

_UNAUTHORIZED: Final = 401


class Outcomes:
    """The outcomes on one role; leases report to it."""

    def __init__(
        self,
        members: Members,
        chooser: Chooser,
        health: Health,
        *,
        fitness: Fitness | None,
        on_transition: Callable[[Transition], None],
        on_end: Callable[[Backend, str], None] | None,
    ) -> None:
        """`on_end`: see Pool."""
        self._members = members
        self._chooser = chooser
        self._health = health
        self._fitness = fitness
        self._on_transition = on_transition
        self._on_end = on_end
        self._well: dict[str, BackendHealth] = {}
        """By the keys of those that are well."""
        self._well_at = -1
        """By that version of health."""

    def consider(self, backends: Sequence[Backend]) -> None:
        """Backends that may get requests from now on."""
        health = self._health
        conditions = {backend.key: health.of(backend) for backend in backends}
        self._well = {
            key: condition
            for key, condition in conditions.items()
            if condition.state is HealthState.UP and not condition.is_unreachable
        }
        self._well_at = health.version

    def report(
        self,
        backend: Backend,
        error: UpstreamError | None,
        trial: int = 0,
        is_proof: bool = True,
        others_running: int = 0,
    ) -> None:
        """How a request on a backend ended; None means well. `others_running`: requests that it works on besides."""
        if error is None:
            self.served(backend, trial, is_proof)
            self.count_served(backend)
            return
        if error.failure is Failure.REMOVED:
            self.abandon(backend, trial)
            return
        refusals = 0
        if error.failure is Failure.RECOMPUTED:
            self._chooser.press(backend)
        elif error.is_refusal and is_proof:
            refusals = self._chooser.refused(backend, error.retry_after_seconds)
        elif self._chooser.passes_over:
            self._chooser.make_room(backend)
        self._members.refresh()
        if error.engine_status == _UNAUTHORIZED and self._fitness and not self._health.of(backend).has_served:
            self._fitness.refused_key(backend)
        transition = self._health.on_outcome(
            backend,
            error,
            self._members.enabled,
            trial=trial,
            is_proof=is_proof,
            # An engine that works on other requests is busy.
            refusals=0 if others_running else refusals,
        )
        self._tell(transition)
        if self._on_end is not None:
            self._on_end(backend, error.failure.value)

    def accuse(self, backend: Backend, error: UpstreamError, is_proof: bool = True) -> Callable[[], None]:
        """A request on a backend broke down. What is returned holds it against the backend: to be called once it is
        known that the request fares better elsewhere.
        """
        if self._on_end is not None:
            self._on_end(backend, error.failure.value)

        def blame() -> None:
            self._members.refresh()
            self._tell(self._health.on_outcome(backend, error, self._members.enabled, is_proof=is_proof))

        return blame

    def report_stall(self, backend: Backend) -> bool:
        """A backend sends nothing on any of its streams while others do; whether it is out now, for this or for another
        reason, so that nothing more is to be expected of it.
        """
        self._members.refresh()
        self._tell(self._health.on_stall(backend, self._members.enabled))
        return backend not in self._members.enabled or not self._health.of(backend).is_healthy

    def report_hang(self, backend: Backend) -> bool:
        """Report that a backend is silent on all of its streams and makes no progress.

        Returns:
            Whether another backend could go on with its answers.
        """
        self._members.refresh()
        enabled, health = self._members.enabled, self._health
        self._tell(health.on_stall(backend, enabled, "sends nothing and makes no progress"))
        return any(health.of(other).is_eligible for other in enabled if other != backend)

    def report_refusal(self, backend: Backend) -> None:
        """Report that a backend with silent answers refused a connection that was opened to find out."""
        health, reason = self._health, "refuses connections, and its answers are silent"
        if health.of(backend).verdict is not HealthState.UNKNOWN:  # it may have been removed
            self._tell(health.on_probe(backend, False, reason, is_refused=True))

    def report_verdict(self, backend: Backend) -> None:
        """Another gateway has found a backend of no use."""
        self._members.refresh()
        self._tell(self._health.on_verdict(backend, self._members.enabled))

    def served(self, backend: Backend, trial: int = 0, is_proof: bool = True) -> None:
        """A request has gone well, perhaps before its lease ends, or a trial before its request does."""
        health = self._health
        if is_proof and self._chooser.passes_over:
            self._chooser.served(backend, is_complete=True)
        condition = self._well.get(backend.key)
        if condition is not None and health.version == self._well_at and is_proof and not trial:
            # What `on_outcome` comes to for a backend that is well, without a call: every request comes by here.
            health.events += 1
            condition.served_at = health.events
            if condition.breaker.failures or condition.breaker.refuses_since:
                condition.breaker.served()
            return
        self._tell(health.on_outcome(backend, None, self._members.enabled, trial=trial, is_proof=is_proof))

    def began(self, backend: Backend) -> None:
        """A backend has begun to answer a request."""
        if self._chooser.passes_over:
            self._chooser.served(backend, is_complete=False)

    def count_served(self, backend: Backend) -> None:
        """The lease of such a request has ended."""
        fitness = self._fitness
        if fitness is not None and fitness.takes_key_at != fitness.versions[0]:
            fitness.served(backend)
        if self._on_end is not None:
            self._on_end(backend, "ok")

    def abandon(self, backend: Backend, trial: int = 0) -> None:
        """A request on a backend was broken off, and the backend is not to blame."""
        if trial:
            self._health.abandon_trial(backend, trial)
        if self._chooser.passes_over:
            self._chooser.make_room(backend)
        if self._on_end is not None:
            self._on_end(backend, "abandoned")

    def _tell(self, transition: Transition | None) -> None:
        if transition is not None:
            self._on_transition(transition)
