"""Lanes: the queue, connector and pools for the requests of some models.

If all instances serve the same models, there is one lane. Otherwise each group of models has its own lane, with the
instances that serve these models. So requests for one model do not wait for another model, and retried or resumed
requests stay on instances that serve their model.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from proxy.balancer.models import quoted
from proxy.common.errors import BadRequest, NoBackendAvailable, UnknownModel
from proxy.dialects.adjustments import ModelNames
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool, Pools
    from proxy.common.backend import Backend, Role
    from proxy.connectors.base import Connector
    from proxy.gateway.suspects import Suspects
    from proxy.gateway.work import RequestService
    from proxy.settings import Settings

    Serving = Callable[[Collection[Backend]], tuple[Backend, ...]]
    """Returns those of some backends that serve certain models, in the same order."""

    class Refresh(Protocol):
        """Queries the models of all instances again, at most once a second. See Prober.refresh_models."""

        async def __call__(self, *, is_patient: bool) -> None: ...

    from collections.abc import Callable

    from proxy.balancer.health import Health
    from proxy.balancer.roster import Roster
    from proxy.common.backend import Backend
    from proxy.settings import Leaving
    from proxy.upstream import Upstream


# Models to name in an error message.
_MAX_NAMES: Final = 10


class Lane:
    """The parts that serve the requests for some models."""

    def __init__(
        self,
        pools: Pools,
        service: RequestService,
        connector: Connector,
        suspects: Suspects,
        on_change: Callable[[Settings], None] = lambda _: None,
    ) -> None:
        """Create the lane.

        Args:
            pools: The pools of the instances.
            service: Serves the requests.
            connector: The connector of the service.
            suspects: The suspects of the service.
            on_change: Applies changed settings to these parts.
        """
        self.pools = pools
        self.service = service
        self.connector = connector
        self.suspects = suspects
        self.on_change = on_change
        self.names: frozenset[str] = frozenset()
        """The names of the models. Empty: all models."""

    @property
    def first(self) -> Pool:
        """The pool of the first role of a prompt. It also serves requests that need one engine only."""
        return self.pools.of(self.connector.roles[0])

    @property
    def all_pools(self) -> Sequence[Pool]:
        """The pools of all roles, in the order of a prompt's way through them."""
        return [self.pools.of(role) for role in self.connector.roles]

    def absent(self) -> Role | None:
        """Return a role without an instance that could serve a request now, or None."""
        return next((role for role in self.connector.roles if not self.pools.of(role).is_ready()), None)

    def explain(self, error: NoBackendAvailable) -> None:
        """Add the names of the models to the message of an error."""
        if self.names:
            error.message = f"{error.message} for model {quoted(self.names)}"

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain each NoBackendAvailable of the block."""
        try:
            yield
        except NoBackendAvailable as error:
            self.explain(error)
            raise


class Lanes:
    """The lanes of one worker. `whole` is the lane of all instances."""

    def __init__(
        self,
        models: ServedModels,
        whole: Lane,
        make: Callable[[Serving], Lane],
        settings: Settings,
        refresh_models: Refresh,
    ) -> None:
        """Make the lanes of the known models.

        Args:
            models: The models that instances serve.
            whole: The lane of all instances.
            make: Returns a lane whose pools have only the backends that its argument selects.
            settings: The present settings.
            refresh_models: Queries the models of all instances again, see Prober.
        """
        self._refresh_models = refresh_models
        self.models = models
        self.whole = whole
        self._make = make
        self._parts: list[Lane] = []
        self._by_name: dict[str, Lane] = {}
        self.configure(settings)
        models.on_change = self._regroup
        self._regroup()

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to all lanes except `whole`, which its owner configures."""
        self._names = ModelNames(settings.models.aliases)
        for lane in self._parts:
            lane.on_change(settings)

    def of(self, name: object) -> Lane:
        """Return the lane for a model.

        Args:
            name: The engines' name of the model. A value that is not text counts as no name.

        Raises:
            UnknownModel: No instance serves the model.
            BadRequest: The request names no model, and the instances serve different ones.
        """
        models = self.models
        if not models.is_mixed:
            return self.whole
        name = self._wanted(name)
        if not name:
            if models.is_closed:
                raise BadRequest(
                    f"the request names no model, and the instances serve several: {self._some_names()}",
                    code="model_required",
                    param="model",
                )
            return self.whole
        # SGLang's names of adapters are `model:adapter`.
        lane = self._by_name.get(name) or self._by_name.get(name.partition(":")[0])
        if lane is not None:
            return lane
        if models.is_closed and name not in models.names:
            raise UnknownModel(name, self._some_names())
        return self.whole

    def of_alias(self, name: object) -> Lane:
        """Return the lane for the clients' name of a model. Raises the errors of `of`."""
        return self.of(self._names.engine_name(name) if isinstance(name, str) else None)

    async def find(self, name: object) -> Lane:
        """Return the lane of a model, see `of`. If the name is unknown, query the models of all instances first.

        An unknown name may be that of an adapter that was just loaded. Raises the errors of `of`.
        """
        if not self.knows(name):
            # A request that would otherwise be rejected can wait.
            await self._refresh_models(is_patient=self.models.is_closed)
            self.models.refresh()
        return self.of(name)

    def knows(self, name: object) -> bool:
        """Return whether the lane of a model is known."""
        if not self.models.is_mixed:
            return True
        model = self._wanted(name)
        return not model or model in self.models.names or model.partition(":")[0] in self._by_name

    def find_known_name(self, name: object) -> str | None:
        """Return the name of a model if instances serve different models and some of them serve this one.

        Otherwise return None. `name`: see `of`.
        """
        if not self.models.is_mixed:
            return None
        name = self._wanted(name)
        return name if name in self.models.names else None

    def of_backend(self, backend: Backend) -> Lane:
        """Return a lane that a backend belongs to."""
        return next((lane for lane in self._parts if not lane.names.isdisjoint(self.models.of(backend))), self.whole)

    @property
    def all(self) -> Sequence[Lane]:
        """All lanes of this worker; the lane `whole` is the first."""
        return (self.whole, *self._parts)

    def __iter__(self) -> Iterator[Lane]:
        """Iterate over the lanes of the models if there are several, or else over `whole`."""
        return iter(self._parts or (self.whole,))

    def is_ready(self) -> bool:
        """Return whether requests for at least one model can be served."""
        return any(lane.absent() is None for lane in self)

    def _wanted(self, name: object) -> str:
        """Return the engines' name for the model of a request. The alias `*=name` matches requests without a name."""
        return name if isinstance(name, str) and name else self._names.engine_name("")

    def _some_names(self) -> str:
        return quoted({*self.models.names, *self._names.engine_names_by_alias}, _MAX_NAMES)

    def _regroup(self) -> None:
        """Make a lane for each group of models. A lane with some of the names is reused, with its learned values."""
        groups = self.models.groups() if self.models.is_mixed else ()
        before, self._parts = self._parts, []
        for names in groups:
            kept = max(before, key=lambda lane: len(lane.names & names), default=None)
            if kept is not None and kept.names & names:
                before.remove(kept)
                lane = kept
            else:
                lane = self._new_lane()
            lane.names = names
            self._parts.append(lane)
        self._by_name = {name: lane for lane in self._parts for name in lane.names}

    def _new_lane(self) -> Lane:
        lane: Lane

        def serving(backends: Collection[Backend]) -> tuple[Backend, ...]:
            return self.models.serving(min(lane.names), backends)

        lane = self._make(serving)
        return lane


logger = logging.getLogger("proxy.flow.evacuation")


class Evacuation:
    """Moves requests away from instances that leave. A timer calls `look`.

    An instance leaves when it was removed and its drain time is over, or when its health checks say so. Its answers are
    taken away as if it had failed, but without blame, and are then repeated or resumed as usual.

    Each worker evacuates its own requests, at most as many at a time as the retry budget has permits. So no request
    waits for a permit without an engine. Nothing is evacuated while no other instance can continue the answers.
    """

    def __init__(
        self,
        roster: Roster,
        lanes: Lanes,
        health: Health,
        upstream: Upstream,
        settings: Callable[[], Leaving],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an evacuation that affects no instance yet.

        Args:
            roster: The members of the pools.
            lanes: The lanes of the worker.
            health: The health of the instances.
            upstream: The connections to the instances.
            settings: Returns the present settings.
            clock: Returns monotonic seconds.
        """
        self._roster = roster
        self._lanes = lanes
        self._health = health
        self._upstream = upstream
        self._clock = clock
        self._logged: set[Backend] = set()
        """The leaving instances that the log has announced."""
        self._settings = settings

    def look(self) -> None:
        """Evacuate all instances that must be left now. Cheap if there are none."""
        removed, leaving = self._roster.leaving(), self._health.leaving if self._settings().evacuate_on_503 else ()
        if not removed and not leaving:
            self._logged.clear()
            return
        now = self._clock()
        due = {member.backend for member in removed if member.leaves_at is not None and member.leaves_at <= now}
        due.update(leaving)
        self._logged &= due
        moving = {member.backend for member in removed if member.move is not None}
        for backend in due:
            self._evacuate(backend, is_moving=backend in moving and backend not in leaving)

    def _evacuate(self, backend: Backend, *, is_moving: bool) -> None:
        """Evacuate an instance. `is_moving`: it stays, so answers that cannot be continued exactly may finish."""
        exchanges = self._upstream.in_exchange(backend)
        if not exchanges:
            return
        lane = self._lanes.of_backend(backend)
        is_possible = bool(lane.pools.of(backend.role).eligible())
        if backend not in self._logged:
            self._logged.add(backend)
            what = (
                "is being evacuated"
                if is_possible
                else "cannot be evacuated yet: no other instance can continue its answers"
            )
            level = logging.INFO if is_possible else logging.WARNING
            fields = {"fields": {"left": exchanges}} | logs.ALWAYS
            logger.log(level, "%s instance %s %s", backend.role, backend.name, what, extra=fields)
        if is_possible:
            budget = lane.service.budget
            at_most = budget.capacity - budget.repeating - budget.waiting
            self._upstream.evacuate(backend, at_most, spares_inexact=is_moving)
