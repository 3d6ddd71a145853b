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

from proxy.balancer.models import quote_names
from proxy.common.errors import BadRequest, NoBackendAvailable, UnknownModel
from proxy.dialects.adjustments import ModelNames
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from proxy.balancer.models import ServedModels
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend, Role
    from proxy.gateway.work import RequestService
    from proxy.settings import Settings

    Serving = Callable[[Collection[Backend]], tuple[Backend, ...]]
    """Returns those of some backends that serve certain models, in the same order."""

    class Refresh(Protocol):
        """Queries the models of all instances again, at most once a second. See HealthProber.refresh_models."""

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

    def __init__(self, service: RequestService, on_change: Callable[[Settings], None] = lambda _: None) -> None:
        """Create the lane. `on_change`: applies changed settings to its parts."""
        self.request_service = service
        self.pools = service.pools
        self.connector = service.connector
        self.on_change = on_change
        self.model_names: frozenset[str] = frozenset()
        """The names of the models. Empty: all models."""

    @property
    def first_pool(self) -> Pool:
        """The pool of the first role of a prompt. It also serves requests that need one engine only."""
        return self.pools.pool_of(self.connector.roles[0])

    @property
    def all_pools(self) -> Sequence[Pool]:
        """The pools of all roles, in the order of a prompt's way through them."""
        return [self.pools.pool_of(role) for role in self.connector.roles]

    def find_absent_role(self) -> Role | None:
        """Return a role without an instance that could serve a request now, or None."""
        return next((role for role in self.connector.roles if not self.pools.pool_of(role).is_ready_to_serve()), None)

    def add_model_names(self, error: NoBackendAvailable) -> None:
        """Add the names of the models to the message of an error."""
        if self.model_names:
            error.message = f"{error.message} for model {quote_names(self.model_names)}"

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Explain each NoBackendAvailable of the block."""
        try:
            yield
        except NoBackendAvailable as error:
            self.add_model_names(error)
            raise


class Lanes:
    """The lanes of one worker. `whole_lane` is the lane of all instances."""

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
            refresh_models: Queries the models of all instances again, see HealthProber.
        """
        self._refresh_models = refresh_models
        self.served_models = models
        self.whole_lane = whole
        self._make_lane = make
        self._model_lanes: list[Lane] = []
        self._lanes_by_model: dict[str, Lane] = {}
        self.apply_settings(settings)
        models.on_change = self._regroup_lanes
        self._regroup_lanes()

    def apply_settings(self, settings: Settings) -> None:
        """Apply changed settings to all lanes except `whole_lane`, which its owner configures."""
        self._names = ModelNames(settings.models.aliases)
        for lane in self._model_lanes:
            lane.on_change(settings)

    def lane_of_model(self, model_name: object) -> Lane:
        """Return the lane for a model.

        Args:
            model_name: The engines' name of the model. A value that is not text counts as no name.

        Raises:
            UnknownModel: No instance serves the model.
            BadRequest: The request names no model, and the instances serve different ones.
        """
        models = self.served_models
        if not models.has_several_groups:
            return self.whole_lane
        model_name = self._engine_model_name(model_name)
        if not model_name:
            if models.are_all_names_known:
                raise BadRequest(
                    f"the request names no model, and the instances serve several: {self._describe_names()}",
                    code="model_required",
                    param="model",
                )
            return self.whole_lane
        # SGLang's names of adapters are `model:adapter`.
        lane = self._lanes_by_model.get(model_name) or self._lanes_by_model.get(model_name.partition(":")[0])
        if lane is not None:
            return lane
        if models.are_all_names_known and model_name not in models.served_names:
            raise UnknownModel(model_name, self._describe_names())
        return self.whole_lane

    def lane_of_alias(self, model_name: object) -> Lane:
        """Return the lane for the clients' name of a model. Raises the errors of `lane_of_model`."""
        return self.lane_of_model(self._names.engine_name(model_name) if isinstance(model_name, str) else None)

    async def find_lane(self, model_name: object) -> Lane:
        """Return the lane of a model, see `lane_of_model`.

        If the name is unknown, query the models of all instances first.

        An unknown name may be that of an adapter that was just loaded. Raises the errors of `lane_of_model`.
        """
        if not self.knows_model(model_name):
            # A request that would otherwise be rejected can wait.
            await self._refresh_models(is_patient=self.served_models.are_all_names_known)
            self.served_models.update_names()
        return self.lane_of_model(model_name)

    def knows_model(self, model_name: object) -> bool:
        """Return whether the lane of a model is known."""
        if not self.served_models.has_several_groups:
            return True
        model = self._engine_model_name(model_name)
        return not model or model in self.served_models.served_names or model.partition(":")[0] in self._lanes_by_model

    def find_known_name(self, name: object) -> str | None:
        """Return the name of a model if instances serve different models and some of them serve this one.

        Otherwise return None. `name`: see `lane_of_model`.
        """
        if not self.served_models.has_several_groups:
            return None
        name = self._engine_model_name(name)
        return name if name in self.served_models.served_names else None

    def lane_of_backend(self, backend: Backend) -> Lane:
        """Return a lane that a backend belongs to."""
        return next(
            (
                lane
                for lane in self._model_lanes
                if not lane.model_names.isdisjoint(self.served_models.names_of(backend))
            ),
            self.whole_lane,
        )

    @property
    def all_lanes(self) -> Sequence[Lane]:
        """All lanes of this worker; the lane `whole_lane` is the first."""
        return (self.whole_lane, *self._model_lanes)

    def __iter__(self) -> Iterator[Lane]:
        """Iterate over the lanes of the models if there are several, or else over `whole_lane`."""
        return iter(self._model_lanes or (self.whole_lane,))

    def is_any_ready(self) -> bool:
        """Return whether requests for at least one model can be served."""
        return any(lane.find_absent_role() is None for lane in self)

    def _engine_model_name(self, name: object) -> str:
        """Return the engines' name for the model of a request. The alias `*=name` matches requests without a name."""
        return name if isinstance(name, str) and name else self._names.engine_name("")

    def _describe_names(self) -> str:
        return quote_names({*self.served_models.served_names, *self._names.engine_names_by_alias}, _MAX_NAMES)

    def _regroup_lanes(self) -> None:
        """Make a lane for each group of models. A lane with some of the names is reused, with its learned values."""
        groups = self.served_models.model_groups() if self.served_models.has_several_groups else ()
        before, self._model_lanes = self._model_lanes, []
        for names in groups:
            kept = max(before, key=lambda lane: len(lane.model_names & names), default=None)
            if kept is not None and kept.model_names & names:
                before.remove(kept)
                lane = kept
            else:
                lane = self._new_lane()
            lane.model_names = names
            self._model_lanes.append(lane)
        self._lanes_by_model = {name: lane for lane in self._model_lanes for name in lane.model_names}

    def _new_lane(self) -> Lane:
        lane: Lane

        def serving(backends: Collection[Backend]) -> tuple[Backend, ...]:
            return self.served_models.backends_serving(min(lane.model_names), backends)

        lane = self._make_lane(serving)
        return lane


logger = logging.getLogger("proxy.flow.evacuation")


class Evacuation:
    """Moves requests away from instances that leave. A timer calls `evacuate_leaving`.

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
        self._logged_backends: set[Backend] = set()
        """The leaving instances that the log has announced."""
        self._settings = settings

    def evacuate_leaving(self) -> None:
        """Evacuate all instances that must be left now. Cheap if there are none."""
        removed, leaving = (
            self._roster.leaving_members(),
            self._health.leaving_backends if self._settings().evacuate_on_503 else (),
        )
        if not removed and not leaving:
            self._logged_backends.clear()
            return
        now = self._clock()
        due = {member.backend for member in removed if member.must_leave_at is not None and member.must_leave_at <= now}
        due.update(leaving)
        self._logged_backends &= due
        moving = {member.backend for member in removed if member.pending_move is not None}
        for backend in due:
            self._evacuate_backend(backend, is_moving=backend in moving and backend not in leaving)

    def _evacuate_backend(self, backend: Backend, *, is_moving: bool) -> None:
        """Evacuate an instance. `is_moving`: it stays, so answers that cannot be continued exactly may finish."""
        exchanges = self._upstream.count_exchanges(backend)
        if not exchanges:
            return
        lane = self._lanes.lane_of_backend(backend)
        is_possible = bool(lane.pools.pool_of(backend.role).eligible_backends())
        if backend not in self._logged_backends:
            self._logged_backends.add(backend)
            what = (
                "is being evacuated"
                if is_possible
                else "cannot be evacuated yet: no other instance can continue its answers"
            )
            level = logging.INFO if is_possible else logging.WARNING
            fields = {"fields": {"left": exchanges}} | logs.ALWAYS
            logger.log(level, "%s instance %s %s", backend.role, backend.name, what, extra=fields)
        if is_possible:
            budget = lane.request_service.retry_budget
            at_most = budget.permit_capacity - budget.held_permits - budget.waiting_count
            self._upstream.fail_exchanges(backend, at_most, spares_inexact=is_moving)
