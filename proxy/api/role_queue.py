"""In front of one role: what routes that one engine answers alone wait for, and who serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from proxy.flow.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from proxy.backend import Role
    from proxy.balancer.pick import PickRequest
    from proxy.flow.lanes import Lane, Lanes
    from proxy.observe.metrics import Metrics
    from proxy.settings import Settings


class RoleQueue:
    """The instances of a role, and a queue of its own in front of them: only while all of them are restarting."""

    def __init__(self, lane: Lane, settings: Settings, metrics: Metrics) -> None:
        """`lane`: that of these instances."""
        self.lane = lane
        self.pool = lane.first
        self.admission = Admission(settings.admission, self._has_room, metrics, absent=self._absent)

    def _has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        return not self.pool.is_restarting()

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
        for queue in (self._whole, *self._of.values()):
            queue.admission.configure(settings.admission)

    def of(self, request: web.Request, body: bytes) -> RoleQueue:
        """Where a request goes: by the model which its body names, or its query if it has no body. Raises GatewayError,
        see Lanes.of.
        """
        lanes = self._lanes
        if not lanes.models.is_mixed:
            return self._whole
        name = _model(body) if body else request.query.get("model")
        lane = lanes.asked(name)
        if lane is lanes.whole:
            return self._whole
        queue = self._of.get(lane)
        if queue is None:
            # Some may be gone.
            self._of = {known: its for known, its in self._of.items() if known in lanes.all}
            queue = self._of[lane] = RoleQueue(lane, self._settings, self._metrics)
        return queue


class _Body(msgspec.Struct):
    model: object = None


_read = msgspec.json.Decoder(_Body).decode


def _model(body: bytes) -> object:
    """What a body calls the model; None: it is not read, or names none."""
    try:
        return _read(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
