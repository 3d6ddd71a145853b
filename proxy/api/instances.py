"""The instances: which there are and how they are, and changing that while the gateway runs."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.administrators import author
from proxy.api.instance_changes import read_change
from proxy.api.instance_view import InstanceView, membership_of
from proxy.common.backend import Backend, Role
from proxy.common.errors import BadRequest
from proxy.fleet.discovery.sources import configured_instances

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.api.administrators import Administrators
    from proxy.api.instance_changes import InstanceChange
    from proxy.api.instance_view import InstanceParts
    from proxy.balancer.roster import SourceStates
    from proxy.settings import Endpoint, Settings
    from proxy.upstream.names import Names

logger = logging.getLogger(__name__)

_State = dict[str, object]
"""What can be changed of an instance: its `membership` and its `weight`."""

_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class InstancesApi:
    """The routes under `/instances`."""

    def __init__(
        self,
        parts: InstanceParts,
        sources: SourceStates,
        drop_drained: Callable[[], None],
        names: Names,
        administrators: Administrators,
        settings: Settings,
    ) -> None:
        """Take the settings.

        Args:
            parts: What the routes on instances work with.
            sources: States of the discovery sources.
            drop_drained: Forgets the removed instances whose last request has ended.
            names: Checks the addresses of new instances.
            administrators: Restricts the routes to administrators.
            settings: The settings of the gateway.
        """
        self._pools = parts.pools
        self._roster = parts.roster
        self._view = InstanceView(parts)
        self._joiner = parts.joiner
        self._sources = sources
        self._drop_drained = drop_drained
        self._names = names
        self._administrators = administrators
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take notice of which instances are configured from now on, and when those that are removed are evacuated."""
        self._evacuate_after_seconds = settings.leaving.evacuate_after_seconds
        self._view.configured = frozenset(configured_instances(settings))

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        administrators = self._administrators
        return [
            web.get("/instances", administrators.only(self._show)),
            web.post("/instances/add", administrators.only_few(self._add)),
            web.post("/instances/remove", administrators.only_few(self._remove)),
            web.post("/instances/enable", administrators.only_few(self._enable)),
            web.post("/instances/disable", administrators.only_few(self._disable)),
            web.post("/instances/weight", administrators.only_few(self._weigh)),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        """All instances, whose loads are those of all workers and whose health is as the worker sees it that was asked,
        and the sources of discovery.
        """
        wanted = self._roster.wanted()
        sources = [
            {"source": origin, "instances": len(wanted.get(origin, ())), **asdict(state)}
            for origin, state in self._sources.all().items()
        ]
        return _json({"instances": self._view.everything(), "sources": sources})

    # Changing: each says what it comes to, and does it unless that is all that was asked for

    async def _add(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        for endpoint in change.endpoints:
            await self._check_address(endpoint)
        candidates = {str(endpoint): _candidate(change, endpoint) for endpoint in change.endpoints}
        before, retold = self._states(change), self._retold(change.role, candidates)
        warnings = self._unheard(change.role, candidates)
        add = self._joiner.is_new if change.is_dry_run else self._joiner.join
        try:
            joining = [endpoint for endpoint in change.endpoints if add(candidates[str(endpoint)])]
        except ValueError as error:
            raise BadRequest(str(error)) from None
        told = f"add {change.role} instances: {_names(change.endpoints)}."
        if joining:
            told = f"Instances {_names(joining)} are waiting to be added."
        if retold:
            told += f" Instances {[one['instance'] for one in retold]} were there, and take what is said of them now."
        changes = [*_compare(before, joining, {"membership": "joining"}), *retold]
        return self._answer(request, change, told, changes, warnings)

    def _retold(self, role: Role, candidates: Mapping[str, Backend]) -> list[dict[str, object]]:
        """What changes of members when an administrator adds them once more, saying something else of them."""
        members = {member.backend: member for member in self._roster.members(role) if not member.is_draining}
        known = [(name, members[each], each) for name, each in candidates.items() if each in members]
        both = [
            (name, _said(m.backend), _said(m.with_details(each, is_authority=False).backend)) for name, m, each in known
        ]
        return [{"instance": name, "was": was, "becomes": after} for name, was, after in both if was != after]

    def _unheard(self, role: Role, candidates: Mapping[str, Backend]) -> list[str]:
        """One warning if something else is said of instances that are waiting to be added."""
        waiting = {backend: _said(backend) for backend in self._joiner.joining(role)}
        unheard = [name for name, each in candidates.items() if waiting.get(each, _said(each)) != _said(each)]
        return [f"{unheard} wait with what was said of them first: remove them to change that."] if unheard else []

    async def _check_address(self, endpoint: Endpoint) -> None:
        """Raise BadRequest for where no instance may be. Connections are made under the same rules, whenever it is."""
        try:
            await self._names.find(endpoint.host)
        except OSError as problem:
            message = f"{endpoint} cannot be an instance: {problem}"
            raise BadRequest(message, code="address_not_allowed", param="instances") from None

    async def _remove(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys(), self._evacuate_after_seconds)
        role, before = change.role, self._states(change)
        there = [endpoint for endpoint in change.endpoints if before[str(endpoint)]["membership"] is not None]
        warnings = self._warnings(role, there, "added")
        returning = [endpoint for endpoint in there if _backend(role, endpoint) in self._view.configured]
        if returning:
            warnings.append(f"{_names(returning)} are in the configuration, so that the next reload adds them again.")
        if not change.is_dry_run:
            for endpoint in there:
                self._joiner.remove(role, endpoint.host, endpoint.port, _leaves_at(change))
            self._drop_drained()
        told = ""
        if there:
            is_left = not {_backend(role, endpoint) for endpoint in there}.isdisjoint(self._backends(role))
            told = (
                f"Instances {_names(there)} are isolated and waiting to be removed."
                if is_left and not change.is_dry_run
                else f"remove {role} instances: {_names(there)}."
            )
        changes = _compare(before, there, {"membership": "draining"})
        return self._answer(request, change, told, changes, warnings, there)

    async def _enable(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        return self._modify(request, change, "enabled", {"membership": "enabled"}, self._roster.enable)

    async def _disable(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys(), self._evacuate_after_seconds)
        disable = partial(self._roster.disable, leaves_at=_leaves_at(change))
        return self._modify(request, change, "disabled", {"membership": "disabled"}, disable)

    async def _weigh(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        if change.weight is None:
            raise BadRequest("weight is missing: a whole number from 1 to 100", param="weight")
        weigh = partial(self._roster.set_weight, weight=change.weight)
        return self._modify(request, change, f"given weight {change.weight}", {"weight": change.weight}, weigh)

    def _modify(
        self,
        request: web.Request,
        change: InstanceChange,
        verb: str,
        becomes: Mapping[str, object],
        apply: Callable[[Role, str, int], bool],
    ) -> web.Response:
        """Change what members are like that do not drain. `apply` makes of one what `becomes` says."""
        before = self._states(change)
        there = [e for e in change.endpoints if before[str(e)]["membership"] in ("enabled", "disabled")]
        warnings = self._warnings(change.role, there, "enabled") if verb == "disabled" else []
        if not change.is_dry_run:
            for endpoint in there:
                apply(change.role, endpoint.host, endpoint.port)
        told = f"Instances {_names(there)} are {verb}." if there else ""
        return self._answer(request, change, told, _compare(before, there, becomes), warnings, there)

    def _warnings(self, role: Role, taken: Sequence[Endpoint], remedy: str) -> list[str]:
        """What an administrator who is about to take these away should know."""
        left = {member.backend for member in self._roster.members(role) if member.may_serve}
        left -= {_backend(role, endpoint) for endpoint in taken}
        if not taken or left:
            return []
        return [f"No {role} instance is left: requests that need one are refused until one is {remedy}."]

    def _states(self, change: InstanceChange) -> dict[str, _State]:
        """What can be changed of the instances that are named; membership None: there is no such instance."""
        members = {member.backend: member for member in self._roster.members(change.role)}
        joining = self._joiner.joining(change.role)
        states: dict[str, _State] = {}
        for endpoint in change.endpoints:
            backend = _backend(change.role, endpoint)
            if (member := members.get(backend)) is not None:
                states[str(endpoint)] = {"membership": membership_of(member), "weight": member.weight}
            else:
                states[str(endpoint)] = {"membership": "joining" if backend in joining else None, "weight": None}
        return states

    def _answer(
        self,
        request: web.Request,
        change: InstanceChange,
        told: str,
        changes: Sequence[Mapping[str, object]],
        warnings: Sequence[str] = (),
        there: Sequence[Endpoint] | None = None,
    ) -> web.Response:
        """The answer to a change, which is one line in the log, too. `there` None: it does not matter who was there."""
        role = change.role
        not_found = [] if there is None else [endpoint for endpoint in change.endpoints if endpoint not in there]
        missing = f"There are no {role} instances {_names(not_found)}." if not_found else ""
        message = " ".join(filter(None, (told, missing)))
        if change.is_dry_run:
            message = f"Dry run, nothing is changed: {message}"
        level = logging.WARNING if warnings or not_found else logging.INFO
        logger.log(level, "%s", " ".join((message, *warnings)), extra={"fields": {"by": author(request)}})
        answer: dict[str, Any] = {
            "message": message,
            "dry_run": change.is_dry_run,
            "changes": changes,
            "warnings": warnings,
            "not_found": _names(not_found),
        }
        for role in (role for role in Role if role is not Role.ENCODE or role in self._pools):
            answer[f"current_{role}_instances"] = [backend.name for backend in self._backends(role)]
            answer[f"joining_{role}_instances"] = [backend.name for backend in self._joiner.joining(role)]
        return _json(answer)

    def _backends(self, role: Role) -> Sequence[Backend]:
        return self._pools[role].backends() if role in self._pools else ()


def _compare(
    before: Mapping[str, _State], changed: Sequence[Endpoint], becomes: Mapping[str, object]
) -> list[dict[str, object]]:
    """What changes for each of these instances, if anything does, when `becomes` takes the place of what was."""
    both = [(name, before[name], {**before[name], **becomes}) for name in _names(changed)]
    return [{"instance": name, "was": was, "becomes": after} for name, was, after in both if was != after]


def _leaves_at(change: InstanceChange) -> float | None:
    """See Member."""
    seconds = change.evacuate_after_seconds
    return None if seconds is None else time.monotonic() + seconds


def _candidate(change: InstanceChange, endpoint: Endpoint) -> Backend:
    """What an administrator wants to add."""
    backend = _backend(change.role, endpoint)
    return replace(backend, trusted=change.send_key, bootstrap_port=endpoint.bootstrap_port, models=endpoint.models)


def _said(backend: Backend) -> dict[str, object]:
    """What an administrator may say of an instance."""
    return {"bootstrap_port": backend.bootstrap_port, "models": list(backend.models), "send_key": backend.trusted}


def _backend(role: Role, endpoint: Endpoint) -> Backend:
    return Backend(role, endpoint.host, endpoint.port)


def _names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]
