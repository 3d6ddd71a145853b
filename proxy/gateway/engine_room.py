"""The room for requests in the engines behind an AdmissionQueue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pool import Pools
    from proxy.common.backend import Role


class EngineRoom:
    """Room without limits. Subclasses override the methods of the limits that they have."""

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        """Return whether a lease taken now would find room, or would fail because no backend is eligible.

        `request`: makes the first request of the queue; the result is False also if it should wait for a better
        backend. None: any request.
        """
        return True

    def fits_engines(self, request: PickRequest) -> bool:
        """Return whether a decoder has enough KV memory for a request. Called while there is room for others."""
        return True

    def would_take_now(self) -> bool:
        """Return whether only a learned limit leaves no room. Learned limits never reject a unit."""
        return False

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        """Return the longest wait of a request for a learned limit, while this number of units is queued."""
        return math.inf

    def answer_seconds(self, request: PickRequest) -> float:
        """Return the predicted decoder time of an answer, which is charged to the client key."""
        return 0.0

    def find_absent_role(self) -> Role | None:
        """Return a role whose backends are all gone, or None."""
        return None

    def find_full_role(self) -> Role | None:
        """Return a role in which there is no room, or None."""
        return None

    def find_refusing_role(self) -> tuple[Role, float] | None:
        """Return a role whose backends all reject requests, and the clock time when the first one accepts again."""
        return None

    def announce_room_to(self, on_room: Callable[[], None] | None) -> None:
        """Call `on_room` when there may be room. None: nothing waits for it any longer."""


class PoolsRoom(EngineRoom):
    """The room in the pools of the roles that a request needs."""

    def __init__(self, pools: Pools, roles: Sequence[Role]) -> None:
        self._pools = pools
        self._serving_pools = tuple(map(pools.pool_of, roles))

    def has_room(self, request: Callable[[], PickRequest] | None = None) -> bool:
        for pool in self._serving_pools:  # noqa: SIM110 - a generator would be one more call for each request
            if not pool.has_room(request):
                return False
        return True

    def fits_engines(self, request: PickRequest) -> bool:
        return self._pools.decode.has_room(lambda: request)

    def would_take_now(self) -> bool:
        return all(pool.would_take_now() for pool in self._serving_pools)

    def max_hold_seconds(self, request: PickRequest | None, waiting_count: int) -> float:
        decode, prefill = self._pools.decode, self._pools.prefill
        return (prefill if decode.has_room() else decode).policy.max_hold_seconds(request, waiting_count)

    def answer_seconds(self, request: PickRequest) -> float:
        return self._pools.decode.predict_work_seconds(request)

    def find_absent_role(self) -> Role | None:
        return next((pool.role for pool in self._serving_pools if pool.are_all_gone()), None)

    def find_full_role(self) -> Role | None:
        return next((pool.role for pool in self._serving_pools if not pool.has_room()), None)

    def find_refusing_role(self) -> tuple[Role, float] | None:
        until, role = max((pool.refused_until(), pool.role) for pool in self._serving_pools)
        return (role, until) if until else None

    def announce_room_to(self, on_room: Callable[[], None] | None) -> None:
        # Pools announce room only while a unit waits, because each announcement costs three calls.
        for pool in self._serving_pools:
            pool.on_release = on_room
