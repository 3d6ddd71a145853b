"""In front of one role: what routes that one engine answers alone wait for, and who serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from proxy.common.errors import BadRequest
from proxy.dialects.adjustments import ModelNames, priority_change
from proxy.dialects.requests import read
from proxy.gateway.admission import AdmissionParts, AdmissionQueue
from proxy.wire.document import joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Role
    from proxy.gateway.api_keys import ApiKey
    from proxy.gateway.lanes import Lane, Lanes
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings


class RoleQueue:
    """The instances of a role, and a queue of its own in front of them: only while all of them restart or refuse."""

    def __init__(self, lane: Lane, settings: Settings, metrics: Metrics) -> None:
        """`lane`: that of these instances."""
        self.lane = lane
        self.pool = lane.first
        parts = AdmissionParts(has_room=self._has_room, metrics=metrics, absent=self._absent)
        self.admission = AdmissionQueue(parts, settings.admission)

    def _has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        return not self.pool.is_restarting() and not self.pool.refuse_all()

    def _absent(self) -> Role | None:
        return self.pool.role if self.pool.is_gone() else None


class RoleQueues:
    """Those of all lanes."""

    def __init__(self, lanes: Lanes, settings: Settings, metrics: Metrics) -> None:
        self._whole = RoleQueue(lanes.whole, settings, metrics)
        self._lanes = lanes
        self._metrics = metrics
        self._of: dict[Lane, RoleQueue] = {}
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take changed settings for requests that come from now on."""
        self._settings = settings
        self._names = ModelNames(settings.models.aliases)
        for queue in (self._whole, *self._of.values()):
            queue.admission.configure(settings.admission)

    async def of(self, model: object) -> RoleQueue:
        """Where a request for a model goes, as engines call it. Raises GatewayError, see Lanes.of."""
        lanes = self._lanes
        if not lanes.models.is_mixed:
            return self._whole
        lane = await lanes.find(model)
        if lane is lanes.whole:
            return self._whole
        queue = self._of.get(lane)
        if queue is None:
            # Some may be gone.
            self._of = {known: its for known, its in self._of.items() if known in lanes.all}
            queue = self._of[lane] = RoleQueue(lane, self._settings, self._metrics)
        return queue

    def for_engines(self, request: web.Request, body: bytes, key: ApiKey) -> tuple[bytes, object]:
        """The body as engines are asked, and the name of its model; None: it names none, or is not read.

        The model has the name that engines serve, and the priority is one that the client key allows. Without a body
        the query may name the model. Raises BadRequest for a body that must be changed and cannot be read.
        """
        is_bounded = key.slot is not None
        if not body:
            said = request.query.get("model")
            return body, None if said is None else self._names.served(said)
        if not (is_bounded or self._names.has_aliases or self._lanes.models.is_mixed):
            return body, None
        told = _told(body)
        changes: dict[str, object] = {}
        name = told.model
        if isinstance(name, str) and (served := self._names.served(name)) != name:
            changes["model"] = name = served
        if is_bounded and told.priority is not None:
            lower_first = self._settings.connector_traits.lower_priority_first
            changes.update(priority_change(told.priority, key.priority, lower_first=lower_first))
        return joined(read(body).with_changes(changes)) if changes else body, name


class _Body(msgspec.Struct):
    model: object = None
    priority: object = None


_read = msgspec.json.Decoder(_Body).decode


def _told(body: bytes) -> _Body:
    """What a body says of its model and priority; nothing, if it is none that engines take."""
    try:
        return _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # which reads less than engines do
    try:
        values = read(body).values
    except BadRequest:
        return _Body()
    return _Body(values.get("model"), values.get("priority"))
