"""`POST /instances/role`: an administrator moves elastic instances to the other role, or lets the gateway choose it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from proxy.api.credentials import Administrators, author_of_change
from proxy.api.instances import InstanceParts, is_dry_run, parse_duration, parse_instances, read_object
from proxy.balancer.roster import RoleMove, RosterMember
from proxy.common.backend import Role
from proxy.common.errors import BadRequest
from proxy.listener.replies import json_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.pool import Pool
    from proxy.settings import Settings

logger = logging.getLogger(__name__)

_ROLES: Final = (Role.PREFILL, Role.DECODE)
_AUTO: Final = "auto"


def find_move_objection(pool: Pool, others_moving: int, settings: Settings) -> str:
    """Return why an instance must not leave its role, or an empty string.

    Args:
        pool: The pool in which the instance is compared with others.
        others_moving: Number of its available instances that leave at the same time, with this one.
        settings: The present settings.
    """
    least = settings.elastic.min_instances(pool.role)
    left = len(pool.eligible_backends()) - others_moving
    if left >= least:
        return ""
    return f"{left} available {pool.role} instances would be left, and elastic.min_{pool.role} is {least}"


class RolesApi:
    """The route by which administrators choose roles."""

    def __init__(self, parts: InstanceParts, administrators: Administrators, settings: Callable[[], Settings]) -> None:
        """Create the roles api.

        Args:
            parts: The parts of the routes on instances.
            administrators: Restricts the route to administrators.
            settings: Returns the present settings.
        """
        self._parts = parts
        self._roster = parts.roster
        self._administrators = administrators
        self._settings = settings

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the route of role exchanges for the application."""
        return [web.post("/instances/role", self._administrators.require_administrator_and_limit(self._move_instances))]

    async def _move_instances(self, request: web.Request) -> web.Response:
        """Read `{"role": "prefill", "instances": "host:port"}`, and begin the moves unless it is a dry run."""
        dry_run, settings = is_dry_run(request), self._settings()
        body = await read_object(request)
        to = body.get("role")
        if to not in (*_ROLES, _AUTO):
            raise BadRequest("role must be 'prefill', 'decode' or 'auto'", param="role")
        endpoints = parse_instances(body, Role.PREFILL)
        evacuate_after = parse_duration(body, "evacuate_after", settings.elastic.evacuate_after_seconds)
        members = {member.backend.place: member for role in _ROLES for member in self._roster.members_of_role(role)}
        named = [
            (str(endpoint), members[endpoint.place])
            for endpoint in endpoints
            if endpoint.place in members and not members[endpoint.place].is_draining
        ]
        if fixed := [name for name, member in named if not member.backend.is_elastic]:
            raise BadRequest(
                f"{fixed} are not elastic, so their role cannot change: list them in elastic.instances or give them "
                "the label elastic in discovery",
                code="not_elastic",
                param="instances",
            )
        moving = [(name, member) for name, member in named if to not in (_AUTO, member.backend.role)]
        self._check_remaining_instances([member for _, member in moving if member.may_serve])
        before = {name: _role_state(member) for name, member in named}
        if not dry_run:
            for _, member in named:
                self._begin_move(member, to, evacuate_after, author_of_change(request))
        after = {name: _role_state_after(member, to) for name, member in named}
        changes = [
            {"instance": name, "was": before[name], "becomes": after[name]}
            for name in before
            if before[name] != after[name]
        ]
        not_found = [str(endpoint) for endpoint in endpoints if str(endpoint) not in before]
        message = f"Instances {[change['instance'] for change in changes]} get the role {to}."
        if dry_run:
            message = f"Dry run, nothing is changed: {message}"
        logger.info("role change: %s", message, extra={"fields": {"by": author_of_change(request)}})
        plan = [
            {"instance": name, "steps": self._describe_steps(member, Role(to), evacuate_after)}
            for name, member in moving
        ]
        return json_response(
            {"message": message, "dry_run": dry_run, "changes": changes, "plan": plan, "not_found": not_found}
        )

    def _check_remaining_instances(self, leaving: Sequence[RosterMember]) -> None:
        """Check that enough instances of each pool are left. Raises BadRequest."""
        pools = [self._parts.pool_of(member.backend) for member in leaving]
        counts = Counter(map(id, pools))
        for member, pool in zip(leaving, pools, strict=True):
            if member.backend in pool.eligible_backends() and (
                why := find_move_objection(pool, counts[id(pool)], self._settings())
            ):
                raise BadRequest(
                    f"{member.backend.name} cannot leave its role: {why}", code="too_few", param="instances"
                )

    def _begin_move(self, member: RosterMember, new_role: str, evacuate_after: float | None, by: str) -> None:
        """Begin a move, end one, or leave the choice of the role to the gateway. Raises BadRequest."""
        backend, now = member.backend, time.monotonic()
        try:
            if new_role == _AUTO:
                self._roster.unpin_role(backend)
                return
            move = RoleMove(Role(new_role), now + self._settings().elastic.drain_seconds, f"requested by {by}")
            leaves_at = None if evacuate_after is None else now + evacuate_after
            self._roster.begin_move(backend, move, leaves_at, is_pinned=True)
        except ValueError as error:
            raise BadRequest(str(error), param="instances") from None

    def _describe_steps(self, member: RosterMember, new_role: Role, evacuate_after: float | None) -> list[str]:
        """Return the steps of a role exchange as text."""
        backend, settings = member.backend, self._settings()
        requests = self._parts.scoreboard.open_leases(backend.slot)
        pinned = self._parts.scoreboard.pinned_kv(backend.slot).cache_count
        path = settings.connector_traits.role_switch_path
        role = backend.role
        evacuated = "" if evacuate_after is None else f", and after {evacuate_after:g} s other instances continue them"
        return [
            f"no new {role} requests",
            f"its {requests} requests may end within {settings.elastic.drain_seconds:g} s{evacuated}",
            *([f"its {pinned} KV caches that no decoder fetches are released or expire"] if pinned else []),
            *([f"its engine exchanges its role (POST {path})"] if path is not None else []),
            f"it joins as a {new_role} instance, with its full share after {settings.health.slow_start_seconds:g} s",
        ]


def _role_state(member: RosterMember) -> Mapping[str, Any]:
    """Return the properties of an instance that this route changes."""
    moves_to = None if member.pending_move is None else member.pending_move.new_role
    return {"role": member.backend.role, "moves_to": moves_to, "is_pinned": member.is_role_pinned}


def _role_state_after(member: RosterMember, new_role: str) -> Mapping[str, Any]:
    if new_role == _AUTO:
        return {**_role_state(member), "is_pinned": False}
    moves_to = None if new_role == member.backend.role else new_role
    return {"role": member.backend.role, "moves_to": moves_to, "is_pinned": True}
