"""Shows the instances, and changes them at run time: the routes under `/instances`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.credentials import Administrators, author
from proxy.balancer.backend_health import FULL_PERCENT, HealthState
from proxy.balancer.engines import UNKNOWN_VERSION, EngineFacts
from proxy.balancer.roster import ADMIN, Member, Roster, SourceStates
from proxy.common.backend import Backend, Role
from proxy.common.background import run_in_slices
from proxy.common.errors import BadRequest
from proxy.fleet.discovery.sources import configured_instances
from proxy.listener.body import read_body
from proxy.listener.replies import json_response
from proxy.settings import Endpoint, Listen, Settings, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from proxy.balancer.health import Health, HealthBoard
    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.models import ServedModels
    from proxy.balancer.policies.handoff_times import HandoffTimes
    from proxy.balancer.pool import Pool
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.fleet.discovery.joining import Joiner
    from proxy.upstream.names import Names


_BODY: Final = Listen(max_body_bytes=64 * 1024, body_seconds=10.0)
_MAX_SECONDS: Final = 1e9  # in practice unlimited
_TRUTHS: Final[Mapping[str, bool]] = {"": True, "1": True, "true": True, "0": False, "false": False}


def parse_bool(name: str, value: str) -> bool:
    """Return the value of a boolean parameter. An empty value is true. Raises BadRequest for other values."""
    if value not in _TRUTHS:
        raise BadRequest(f"{name} must be true or false", param=name)
    return _TRUTHS[value]


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """A change of instances that an administrator requests."""

    role: Role
    """The role of the instances."""
    endpoints: list[Endpoint]
    """The addresses of the instances."""
    is_dry_run: bool
    """Whether to report the effect of the change without making it."""
    send_key: bool
    """Whether added instances may receive the engine key."""
    evacuate_after_seconds: float | None
    """The seconds until the requests of removed instances are evacuated; see Leaving. None: they are not evacuated."""
    weight: int | None
    """The new weight of the instances; see Member. None: the body has no weight."""
    is_elastic: bool
    """Whether added instances may exchange their role."""


def is_dry_run(request: web.Request) -> bool:
    """Return whether the query has `dry_run=true`. Raises BadRequest."""
    return parse_bool("dry_run", request.query.get("dry_run", "false"))


async def read_change(
    request: web.Request, roles: Collection[Role], evacuate_after_seconds: float | None = None
) -> InstanceChange:
    """Read `{"type": "prefill", "instances": "host:port"}`, where `instances` may be a list. Raises BadRequest.

    `https://` may precede an address. A bootstrap port of a prefiller and models may follow it, as in the settings.

    Args:
        request: The request of the administrator.
        roles: The roles of this gateway.
        evacuate_after_seconds: The default for the member `evacuate_after`.
    """
    dry_run = is_dry_run(request)
    body = await read_object(request)
    try:
        role = Role(body.get("type", ""))
    except ValueError:
        raise BadRequest("type must be 'prefill', 'decode' or 'encode'", param="type") from None
    if role not in roles:
        raise BadRequest(f"this gateway has no {role} instances", param="type")
    send_key, is_elastic = _boolean(body, "send_key"), _boolean(body, "elastic")
    endpoints = parse_instances(body, Role.PREFILL if is_elastic else role)
    evacuate_after = parse_duration(body, "evacuate_after", evacuate_after_seconds)
    weight = body.get("weight")
    if weight is not None and not (type(weight) is int and 1 <= weight <= FULL_PERCENT):
        raise BadRequest(f"weight must be a whole number from 1 to {FULL_PERCENT}", param="weight")
    return InstanceChange(role, endpoints, dry_run, send_key, evacuate_after, weight, is_elastic)


async def read_object(request: web.Request) -> dict[str, Any]:
    """Read a JSON object of an administrator. Raises BadRequest."""
    raw = await read_body(request, _BODY, option=None)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def parse_instances(body: Mapping[str, Any], role: Role) -> list[Endpoint]:
    """Return the addresses in the member `instances`, an address or a list of them. Raises BadRequest."""
    listed = body.get("instances")
    texts = [listed] if isinstance(listed, str) else listed
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest("instances must be 'host:port' or a list of them", param="instances")
    try:
        return [_endpoint(text, role) for text in texts]
    except ValueError as error:
        raise BadRequest(str(error), param="instances") from None


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    """Return an optional boolean member. Raises BadRequest."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", param=name)
    return value


def parse_duration(body: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """Return a member with a number of seconds, or null. Raises BadRequest. A boolean is no number."""
    value: float | None = body.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value <= _MAX_SECONDS):
        raise BadRequest(f"{name} must be a number of seconds, 0 or more, or null", param=name)
    return value


def _endpoint(text: str, role: Role) -> Endpoint:
    if "/" in text.partition(" ")[0].removeprefix("https://"):
        raise ValueError(f"{text!r} must be host:port, or https://host:port for an engine with TLS, without a path")
    found = parse_endpoints(text)
    if len(found) != 1:
        raise ValueError(f"{text!r} must name one port")
    if found[0].bootstrap_port is not None and role is not Role.PREFILL:
        raise ValueError(f"{text!r} has a bootstrap port, which only prefillers have")
    return found[0]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InstanceParts:
    """The parts of one worker for the routes on instances."""

    pools: Mapping[Role, Pool]
    """Pools of the roles that the connector uses."""
    roster: Roster
    """Members of these pools."""
    scoreboard: Scoreboard
    """Loads of the instances, summed over all workers."""
    health: Health
    """Health of the instances, as this worker sees it."""
    health_board: HealthBoard
    """The health of the instances, as each worker sees it separately."""
    incompatibilities: Incompatibilities
    """The incompatibilities between instances that were found."""
    joiner: Joiner
    """The added instances that have not passed a health check yet."""
    models: ServedModels
    """Models that instances serve."""
    pool_of: Callable[[Backend], Pool]
    """Returns the pool in which an instance is compared with others."""
    handoffs: HandoffTimes
    """Times of handoffs between prefillers and decoders, as this worker has learned them."""
    apart_from: Callable[[Backend], Sequence[str]] = lambda _: ()
    """Returns the partners from which an instance is kept apart, because KV handoffs between them fail."""


class InstanceView:
    """Describes the instances of the roles that the connector uses."""

    def __init__(self, parts: InstanceParts) -> None:
        self._parts = parts

    def everything(self, configured: Collection[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        """Yield all instances, with the loads of all workers and the health that this worker sees.

        `configured`: the places of the instances in the configuration.
        """
        for role, pool in self._parts.pools.items():
            pool.backends()  # updates the roster
            self._parts.models.refresh()
            members = self._parts.roster.members(role)
            for member in members:
                yield self._describe(member, member.backend.place in configured)
            for backend in self._parts.joiner.joining(role):
                yield _described(backend, "joining")

    def _describe(self, member: Member, is_configured: bool) -> dict[str, Any]:
        board, backend, now = self._parts.scoreboard, member.backend, time.monotonic()
        health = self._parts.health.of(backend)
        (running, charged), pinned, changed_at = board.own(backend.slot), board.pinned(backend.slot), health.changed_at
        facts = health.facts or EngineFacts()
        return {
            **_described(backend, membership_of(member), health.state, health.reason),
            "configured": is_configured,
            "origins": member.origins,
            "weight": member.weight,
            "elastic": _elasticity(member, now),
            "states": Counter(state.value for state in self._parts.health_board.states(backend)),
            "since_seconds": None if changed_at is None else round(now - changed_at, 3),
            "models": sorted(self._parts.models.of(backend)),
            "evacuated_in_seconds": None if member.leaves_at is None else round(max(0.0, member.leaves_at - now), 3),
            "load": {
                "inflight": board.requests(backend.slot),
                "running": running,
                "max_running": self._parts.pools[backend.role].limit(backend),
                "learned_max_running": self._parts.pool_of(backend).policy.most_running(backend),
                "compute_tokens": charged.compute_tokens,
                "kv_tokens": charged.kv_tokens,
                "pinned_kv": pinned.count,
                "pinned_kv_tokens": pinned.tokens,
            },
            "kv": self._parts.incompatibilities.verdict(backend) if backend.role is Role.DECODE else None,
            "kv_from": self._parts.incompatibilities.pairs(backend) if backend.role is Role.DECODE else None,
            "slow_from": self._parts.handoffs.slow_pairs_of(backend) if backend.role is Role.DECODE else None,
            "apart_from": self._parts.apart_from(backend),
            "misfits": [
                {"kind": misfit.kind, "hint": misfit.hint, "since_seconds": round(now - misfit.since, 3)}
                for misfit in self._parts.incompatibilities.of(backend)
            ],
            "engine": {
                "version": None if facts.version == UNKNOWN_VERSION else ".".join(map(str, facts.version)),
                "max_model_len": facts.max_model_len,
                "max_num_seqs": facts.max_num_seqs,
                "kv_tokens": facts.kv_tokens,
            },
        }


def _elasticity(member: Member, now: float) -> dict[str, Any] | None:
    """Return the state of an elastic instance, or None if it is not elastic. `now`: monotonic seconds."""
    move = member.move
    if not member.backend.is_elastic and move is None:
        return None
    return {
        "moves_to": move and move.to,
        "move_reason": move and move.reason,
        "move_ends_in_seconds": move and round(max(0.0, move.until - now), 3),
        "is_role_unknown": move is not None and move.is_switching,
        "is_pinned": member.is_pinned,
        "last_problem": member.problem or None,
    }


def membership_of(member: Member) -> str:
    """Return the membership of a member: `enabled`, `disabled` or `draining`."""
    return "draining" if member.is_draining else "disabled" if member.is_disabled else "enabled"


def _described(
    backend: Backend, membership: str, state: HealthState = HealthState.UNKNOWN, reason: str | None = None
) -> dict[str, Any]:
    """Return the description of an instance that has not answered yet.

    For members, `_describe` replaces most values.
    """
    return {
        "role": backend.role,
        "address": backend.name,
        "bootstrap_port": backend.bootstrap_port,
        "configured": False,
        "origins": [ADMIN],
        "weight": FULL_PERCENT,
        "elastic": None,
        "membership": membership,
        "state": state,
        "reason": reason,
        "states": {},
        "since_seconds": None,
        "models": sorted(backend.models),
        "evacuated_in_seconds": None,
        "load": None,
        "kv": None,
        "kv_from": None,
        "slow_from": None,
        "apart_from": [],
        "misfits": [],
        "engine": None,
    }


logger = logging.getLogger(__name__)

_State = dict[str, object]
"""The properties of an instance that administrators can change: `membership` and `weight`."""


class InstancesApi:
    """Serves the routes under `/instances`."""

    def __init__(
        self,
        parts: InstanceParts,
        sources: SourceStates,
        drop_drained: Callable[[], None],
        names: Names,
        administrators: Administrators,
        settings: Callable[[], Settings],
    ) -> None:
        """Create the instances api.

        Args:
            parts: The parts of the routes on instances.
            sources: States of the discovery sources.
            drop_drained: Forgets the removed instances whose last request has ended.
            names: Checks the addresses of new instances.
            administrators: Restricts the routes to administrators.
            settings: Returns the present settings.
        """
        self._pools = parts.pools
        self._roster = parts.roster
        self._view = InstanceView(parts)
        self._joiner = parts.joiner
        self._sources = sources
        self._drop_drained = drop_drained
        self._names = names
        self._administrators = administrators
        self._settings = settings

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes under `/instances` for the application."""
        administrators = self._administrators
        return [
            web.get("/instances", administrators.guard(self._show)),
            web.post("/instances/add", administrators.guard_and_limit(self._add)),
            web.post("/instances/remove", administrators.guard_and_limit(self._remove)),
            web.post("/instances/enable", administrators.guard_and_limit(self._enable)),
            web.post("/instances/disable", administrators.guard_and_limit(self._disable)),
            web.post("/instances/weight", administrators.guard_and_limit(self._weigh)),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        """Show all instances and the discovery sources."""
        wanted = self._roster.wanted()
        sources = [
            {"source": origin, "instances": len(wanted.get(origin, ())), **asdict(state)}
            for origin, state in self._sources.all().items()
        ]
        configured = frozenset(each.place for each in configured_instances(self._settings()))
        instances = await run_in_slices(self._view.everything(configured))
        return json_response({"instances": instances, "sources": sources})

    # Changes. Each reports its effect, and is made unless it is a dry run.

    async def _add(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        settings = self._settings()
        if change.is_elastic and not settings.connector_traits.exchanges_roles:
            raise BadRequest(f"connector {settings.connector} cannot exchange roles", param="elastic")
        for endpoint in change.endpoints:
            await self._check_address(endpoint)
        candidates = {str(endpoint): _candidate(change, endpoint) for endpoint in change.endpoints}
        before, updates = self._states(change), self._updates(change.role, candidates)
        warnings = self._ignored_details(change.role, candidates)
        add = self._joiner.is_new if change.is_dry_run else self._joiner.join
        try:
            joining = [endpoint for endpoint in change.endpoints if add(candidates[str(endpoint)])]
        except ValueError as error:
            raise BadRequest(str(error)) from None
        message = f"add {change.role} instances: {_names(change.endpoints)}."
        if joining:
            message = f"Instances {_names(joining)} are waiting to be added."
        if updates:
            message += f" Instances {[one['instance'] for one in updates]} exist already; their details are updated."
        changes = [*_compare(before, joining, {"membership": "joining"}), *updates]
        return self._answer(request, change, message, changes, warnings)

    def _updates(self, role: Role, candidates: Mapping[str, Backend]) -> list[dict[str, object]]:
        """Return the changes to instances that an administrator adds again with other details."""
        members = {member.backend: member for member in self._roster.members(role) if not member.is_draining}
        existing = [(name, members[each], each) for name, each in candidates.items() if each in members]
        both = [
            (name, _details(m.backend), _details(m.with_details(each, is_authority=False).backend))
            for name, m, each in existing
        ]
        return [{"instance": name, "was": was, "becomes": after} for name, was, after in both if was != after]

    def _ignored_details(self, role: Role, candidates: Mapping[str, Backend]) -> list[str]:
        """Return a warning if instances that are about to be added get other details. These details are ignored."""
        waiting = {backend: _details(backend) for backend in self._joiner.joining(role)}
        ignored = [name for name, each in candidates.items() if waiting.get(each, _details(each)) != _details(each)]
        return [f"{ignored} are waiting with other details: remove them first to change these."] if ignored else []

    async def _check_address(self, endpoint: Endpoint) -> None:
        """Check that an instance may have this address. Connections are checked by the same rules.

        Raises:
            BadRequest: The address is not allowed, or the name has no address.
        """
        try:
            await self._names.find(endpoint.host)
        except OSError as problem:
            message = f"{endpoint} cannot be an instance: {problem}"
            raise BadRequest(message, code="address_not_allowed", param="instances") from None

    async def _remove(self, request: web.Request) -> web.Response:
        settings = self._settings()
        change = await read_change(request, self._pools.keys(), settings.leaving.evacuate_after_seconds)
        role, before = change.role, self._states(change)
        there = [endpoint for endpoint in change.endpoints if before[str(endpoint)]["membership"] is not None]
        warnings = self._warnings(role, there, "added")
        configured = frozenset(each.place for each in configured_instances(settings))
        returning = [endpoint for endpoint in there if endpoint.place in configured]
        if returning:
            warnings.append(f"{_names(returning)} are in the configuration: the next reload adds them again.")
        if not change.is_dry_run:
            for endpoint in there:
                self._joiner.remove(role, endpoint.host, endpoint.port, _compute_leave_time(change))
            self._drop_drained()
        message = ""
        if there:
            is_draining = not {_backend(role, endpoint) for endpoint in there}.isdisjoint(self._backends(role))
            message = (
                f"Instances {_names(there)} are isolated and waiting to be removed."
                if is_draining and not change.is_dry_run
                else f"remove {role} instances: {_names(there)}."
            )
        changes = _compare(before, there, {"membership": "draining"})
        return self._answer(request, change, message, changes, warnings, there)

    async def _enable(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        return self._modify(request, change, "enabled", {"membership": "enabled"}, self._roster.enable)

    async def _disable(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys(), self._settings().leaving.evacuate_after_seconds)
        disable = partial(self._roster.disable, leaves_at=_compute_leave_time(change))
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
        """Change the named instances, except those that drain.

        Args:
            request: The request of the administrator.
            change: The change.
            verb: Its name in the message.
            becomes: The properties that the instances get.
            apply: Gives an instance these properties.
        """
        before = self._states(change)
        there = [e for e in change.endpoints if before[str(e)]["membership"] in ("enabled", "disabled")]
        warnings = self._warnings(change.role, there, "enabled") if verb == "disabled" else []
        if not change.is_dry_run:
            for endpoint in there:
                apply(change.role, endpoint.host, endpoint.port)
        message = f"Instances {_names(there)} are {verb}." if there else ""
        return self._answer(request, change, message, _compare(before, there, becomes), warnings, there)

    def _warnings(self, role: Role, taken: Sequence[Endpoint], remedy: str) -> list[str]:
        """Return a warning if a role would have no instance left after the change."""
        left = {member.backend for member in self._roster.members(role) if member.may_serve}
        left -= {_backend(role, endpoint) for endpoint in taken}
        if not taken or left:
            return []
        return [f"No {role} instance is left: requests that need one are rejected until one is {remedy}."]

    def _states(self, change: InstanceChange) -> dict[str, _State]:
        """Return the states of the named instances. A membership of None means that the instance does not exist."""
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
        effect: str,
        changes: Sequence[Mapping[str, object]],
        warnings: Sequence[str] = (),
        there: Sequence[Endpoint] | None = None,
    ) -> web.Response:
        """Log a change of an instance, and return the answer.

        Args:
            request: The request of the administrator.
            change: The change.
            effect: A sentence about the effect. Empty: there is no effect.
            changes: The changed properties of each instance.
            warnings: Warnings for the administrator.
            there: The named instances that exist. None: it does not matter.
        """
        role = change.role
        not_found = [] if there is None else [endpoint for endpoint in change.endpoints if endpoint not in there]
        missing = f"There are no {role} instances {_names(not_found)}." if not_found else ""
        message = " ".join(filter(None, (effect, missing)))
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
        return json_response(answer)

    def _backends(self, role: Role) -> Sequence[Backend]:
        return self._pools[role].backends() if role in self._pools else ()


def _compare(
    before: Mapping[str, _State], changed: Sequence[Endpoint], becomes: Mapping[str, object]
) -> list[dict[str, object]]:
    """Return how each instance would differ after it gets the properties in `becomes`."""
    both = [(name, before[name], {**before[name], **becomes}) for name in _names(changed)]
    return [{"instance": name, "was": was, "becomes": after} for name, was, after in both if was != after]


def _compute_leave_time(change: InstanceChange) -> float | None:
    """Return the `Member.leaves_at` that a change sets."""
    seconds = change.evacuate_after_seconds
    return None if seconds is None else time.monotonic() + seconds


def _candidate(change: InstanceChange, endpoint: Endpoint) -> Backend:
    """Return the backend that an administrator wants to add."""
    backend = _backend(change.role, endpoint)
    return replace(
        backend,
        is_trusted=change.send_key,
        bootstrap_port=endpoint.bootstrap_port,
        models=endpoint.models,
        tls=endpoint.tls,
        is_elastic=change.is_elastic,
    )


def _details(backend: Backend) -> dict[str, object]:
    """Return the details of an instance that an administrator may set."""
    return {"bootstrap_port": backend.bootstrap_port, "models": list(backend.models), "send_key": backend.is_trusted}


def _backend(role: Role, endpoint: Endpoint) -> Backend:
    return Backend(role, endpoint.host, endpoint.port)


def _names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]
