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

from proxy.api.credentials import Administrators, author_of_change
from proxy.balancer.backend_health import FULL_PERCENT, HealthState
from proxy.balancer.engines import UNKNOWN_VERSION, EngineFacts
from proxy.balancer.roster import ADMIN, Roster, RosterMember, SourceStates
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
    from proxy.fleet.discovery.joining import InstanceJoiner
    from proxy.upstream.names import HostNames


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
    sends_engine_key: bool
    """Whether added instances may receive the engine key."""
    evacuate_after_seconds: float | None
    """The seconds until the requests of removed instances are evacuated; see Leaving. None: they are not evacuated."""
    weight_percent: int | None
    """The new weight of the instances; see RosterMember. None: the body has no weight."""
    is_elastic: bool
    """Whether added instances may exchange their role, even if `elastic.instances` does not list them."""


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
    send_key, is_elastic = _boolean_member(body, "send_key"), _boolean_member(body, "elastic")
    endpoints = parse_instances(body, Role.PREFILL if is_elastic else role)
    evacuate_after = parse_duration(body, "evacuate_after", evacuate_after_seconds)
    weight = body.get("weight")
    if weight is not None and not (type(weight) is int and 1 <= weight <= FULL_PERCENT):
        raise BadRequest(f"weight must be a whole number from 1 to {FULL_PERCENT}", param="weight")
    return InstanceChange(role, endpoints, dry_run, send_key, evacuate_after, weight, is_elastic)


async def read_object(request: web.Request) -> dict[str, Any]:
    """Read a JSON object of an administrator. Raises BadRequest."""
    raw = await read_body(request, _BODY, size_option=None)
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
        return [_parse_endpoint(text, role) for text in texts]
    except ValueError as error:
        raise BadRequest(str(error), param="instances") from None


def _boolean_member(json_body: Mapping[str, Any], member_name: str) -> bool:
    """Return an optional boolean member. Raises BadRequest."""
    value = json_body.get(member_name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{member_name} must be true or false", param=member_name)
    return value


def parse_duration(body: Mapping[str, Any], name: str, default_seconds: float | None) -> float | None:
    """Return a member with a number of seconds, or null. Raises BadRequest. A boolean is no number."""
    value: float | None = body.get(name, default_seconds)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value <= _MAX_SECONDS):
        raise BadRequest(f"{name} must be a number of seconds, 0 or more, or null", param=name)
    return value


def _parse_endpoint(text: str, role: Role) -> Endpoint:
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
    joiner: InstanceJoiner
    """The added instances that have not passed a health check yet."""
    served_models: ServedModels
    """Models that instances serve."""
    pool_of: Callable[[Backend], Pool]
    """Returns the pool in which an instance is compared with others."""
    handoff_times: HandoffTimes
    """Times of handoffs between prefillers and decoders, as this worker has learned them."""
    quarantined_partners: Callable[[Backend], Sequence[str]] = lambda _: ()
    """Returns the partners from which an instance is kept apart, because KV handoffs between them fail."""


class InstanceView:
    """Describes the instances of the roles that the connector uses."""

    def __init__(self, parts: InstanceParts) -> None:
        self._parts = parts

    def describe_all(self, configured: Collection[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        """Yield all instances, with the loads of all workers and the health that this worker sees.

        `configured`: the places of the instances in the configuration.
        """
        for role, pool in self._parts.pools.items():
            pool.all_backends()  # updates the roster
            self._parts.served_models.update_names()
            members = self._parts.roster.members_of_role(role)
            for member in members:
                yield self._describe_member(member, member.backend.place in configured)
            for backend in self._parts.joiner.joining_instances(role):
                yield _describe_joining(backend, "joining")

    def _describe_member(self, member: RosterMember, is_configured: bool) -> dict[str, Any]:
        board, backend, now = self._parts.scoreboard, member.backend, time.monotonic()
        health = self._parts.health.health_of(backend)
        (running, charged), pinned, changed_at = (
            board.own_load(backend.slot),
            board.pinned_kv(backend.slot),
            health.state_changed_at,
        )
        facts = health.engine_facts or EngineFacts()
        return {
            **_describe_joining(backend, membership_of(member), health.health_state, health.state_reason),
            "configured": is_configured,
            "origins": member.origins,
            "weight": member.weight_percent,
            "elastic": _describe_elasticity(member, now),
            "states": Counter(state.value for state in self._parts.health_board.states_by_worker(backend)),
            "since_seconds": None if changed_at is None else round(now - changed_at, 3),
            "models": sorted(self._parts.served_models.names_of(backend)),
            "evacuated_in_seconds": None
            if member.must_leave_at is None
            else round(max(0.0, member.must_leave_at - now), 3),
            "load": {
                "inflight": board.open_leases(backend.slot),
                "running": running,
                "max_running": self._parts.pools[backend.role].running_limit(backend),
                "learned_max_running": self._parts.pool_of(backend).policy.learned_max_running(backend),
                "compute_tokens": charged.compute_tokens,
                "kv_tokens": charged.kv_tokens,
                "pinned_kv": pinned.cache_count,
                "pinned_kv_tokens": pinned.pinned_tokens,
            },
            "kv": self._parts.incompatibilities.handoff_verdict(backend) if backend.role is Role.DECODE else None,
            "kv_from": self._parts.incompatibilities.pair_verdicts(backend) if backend.role is Role.DECODE else None,
            "slow_from": self._parts.handoff_times.slow_pairs_of(backend) if backend.role is Role.DECODE else None,
            "apart_from": self._parts.quarantined_partners(backend),
            "misfits": [
                {"kind": misfit.kind, "hint": misfit.problem_text, "since_seconds": round(now - misfit.found_at, 3)}
                for misfit in self._parts.incompatibilities.incompatibilities_of(backend)
            ],
            "engine": {
                "version": None if facts.version == UNKNOWN_VERSION else ".".join(map(str, facts.version)),
                "max_model_len": facts.max_model_len,
                "max_num_seqs": facts.max_num_seqs,
                "kv_tokens": facts.kv_memory_tokens,
            },
        }


def _describe_elasticity(member: RosterMember, now: float) -> dict[str, Any] | None:
    """Return the state of an elastic instance, or None if it is not elastic. `now`: monotonic seconds."""
    move = member.pending_move
    if not member.backend.is_elastic and move is None:
        return None
    return {
        "moves_to": move and move.new_role,
        "move_reason": move and move.move_reason,
        "move_ends_in_seconds": move and round(max(0.0, move.must_end_at - now), 3),
        "is_role_unknown": move is not None and move.is_engine_switching,
        "is_pinned": member.is_role_pinned,
        "last_problem": member.move_problem or None,
    }


def membership_of(member: RosterMember) -> str:
    """Return the membership of a member: `enabled`, `disabled` or `draining`."""
    return "draining" if member.is_draining else "disabled" if member.is_disabled else "enabled"


def _describe_joining(
    backend: Backend, membership_state: str, state: HealthState = HealthState.UNKNOWN, reason: str | None = None
) -> dict[str, Any]:
    """Return the description of an instance that has not answered yet.

    For members, `_describe_member` replaces most values.
    """
    return {
        "role": backend.role,
        "address": backend.name,
        "bootstrap_port": backend.bootstrap_port,
        "configured": False,
        "origins": [ADMIN],
        "weight": FULL_PERCENT,
        "elastic": None,
        "membership": membership_state,
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
        names: HostNames,
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
        self._instance_view = InstanceView(parts)
        self._joiner = parts.joiner
        self._source_states = sources
        self._drop_drained_backends = drop_drained
        self._host_names = names
        self._administrators = administrators
        self._settings = settings

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes under `/instances` for the application."""
        administrators = self._administrators
        return [
            web.get("/instances", administrators.require_administrator(self._show_instances)),
            web.post("/instances/add", administrators.require_administrator_and_limit(self._add_instances)),
            web.post("/instances/remove", administrators.require_administrator_and_limit(self._remove_instances)),
            web.post("/instances/enable", administrators.require_administrator_and_limit(self._enable_instances)),
            web.post("/instances/disable", administrators.require_administrator_and_limit(self._disable_instances)),
            web.post("/instances/weight", administrators.require_administrator_and_limit(self._set_weights)),
        ]

    async def _show_instances(self, request: web.Request) -> web.Response:
        """Show all instances and the discovery sources."""
        wanted = self._roster.wanted_by_origin()
        sources = [
            {"source": origin, "instances": len(wanted.get(origin, ())), **asdict(state)}
            for origin, state in self._source_states.states_by_origin().items()
        ]
        configured = frozenset(each.place for each in configured_instances(self._settings()))
        instances = await run_in_slices(self._instance_view.describe_all(configured))
        return json_response({"instances": instances, "sources": sources})

    # Changes. Each reports its effect, and is made unless it is a dry run.

    async def _add_instances(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        settings = self._settings()
        if change.is_elastic and not settings.connector_traits.exchanges_roles:
            raise BadRequest(f"connector {settings.connector} cannot exchange roles", param="elastic")
        for endpoint in change.endpoints:
            await self._check_address(endpoint)
        configured_elastic = {endpoint.place for endpoint in settings.elastic.instances}
        candidates = {
            str(endpoint): _backend_to_add(
                change, endpoint, is_elastic=change.is_elastic or endpoint.place in configured_elastic
            )
            for endpoint in change.endpoints
        }
        before, updates = self._states_of_instances(change), self._describe_updates(change.role, candidates)
        warnings = self._warn_of_ignored_details(change.role, candidates)
        add = self._joiner.is_new_instance if change.is_dry_run else self._joiner.join_when_ready
        try:
            joining = [endpoint for endpoint in change.endpoints if add(candidates[str(endpoint)])]
        except ValueError as error:
            raise BadRequest(str(error)) from None
        message = f"add {change.role} instances: {_endpoint_names(change.endpoints)}."
        if joining:
            message = f"Instances {_endpoint_names(joining)} are waiting to be added."
        if updates:
            message += f" Instances {[one['instance'] for one in updates]} exist already; their details are updated."
        changes = [*_describe_changes(before, joining, {"membership": "joining"}), *updates]
        return self._log_and_answer(request, change, message, changes, warnings)

    def _describe_updates(self, role: Role, candidates: Mapping[str, Backend]) -> list[dict[str, object]]:
        """Return the changes to instances that an administrator adds again with other details."""
        members = {member.backend: member for member in self._roster.members_of_role(role) if not member.is_draining}
        existing = [(name, members[each], each) for name, each in candidates.items() if each in members]
        both = [
            (
                name,
                _settable_details(m.backend),
                _settable_details(m.copy_with_details(each, is_authoritative=False).backend),
            )
            for name, m, each in existing
        ]
        return [{"instance": name, "was": was, "becomes": after} for name, was, after in both if was != after]

    def _warn_of_ignored_details(self, role: Role, candidates: Mapping[str, Backend]) -> list[str]:
        """Return a warning if instances that are about to be added get other details. These details are ignored."""
        waiting = {backend: _settable_details(backend) for backend in self._joiner.joining_instances(role)}
        ignored = [
            name
            for name, each in candidates.items()
            if waiting.get(each, _settable_details(each)) != _settable_details(each)
        ]
        return [f"{ignored} are waiting with other details: remove them first to change these."] if ignored else []

    async def _check_address(self, endpoint: Endpoint) -> None:
        """Check that an instance may have this address. Connections are checked by the same rules.

        Raises:
            BadRequest: The address is not allowed, or the name has no address.
        """
        try:
            await self._host_names.find_addresses(endpoint.host)
        except OSError as problem:
            message = f"{endpoint} cannot be an instance: {problem}"
            raise BadRequest(message, code="address_not_allowed", param="instances") from None

    async def _remove_instances(self, request: web.Request) -> web.Response:
        settings = self._settings()
        change = await read_change(request, self._pools.keys(), settings.leaving.evacuate_after_seconds)
        role, before = change.role, self._states_of_instances(change)
        there = [endpoint for endpoint in change.endpoints if before[str(endpoint)]["membership"] is not None]
        warnings = self._warn_of_empty_role(role, there, "added")
        configured = frozenset(each.place for each in configured_instances(settings))
        returning = [endpoint for endpoint in there if endpoint.place in configured]
        if returning:
            warnings.append(f"{_endpoint_names(returning)} are in the configuration: the next reload adds them again.")
        if not change.is_dry_run:
            for endpoint in there:
                self._joiner.remove_instance(role, endpoint.host, endpoint.port, _compute_leave_time(change))
            self._drop_drained_backends()
        message = ""
        if there:
            is_draining = not {_backend_at(role, endpoint) for endpoint in there}.isdisjoint(
                self._backends_of_role(role)
            )
            message = (
                f"Instances {_endpoint_names(there)} are isolated and waiting to be removed."
                if is_draining and not change.is_dry_run
                else f"remove {role} instances: {_endpoint_names(there)}."
            )
        changes = _describe_changes(before, there, {"membership": "draining"})
        return self._log_and_answer(request, change, message, changes, warnings, there)

    async def _enable_instances(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        return self._change_instances(
            request, change, "enabled", {"membership": "enabled"}, self._roster.enable_backend
        )

    async def _disable_instances(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys(), self._settings().leaving.evacuate_after_seconds)
        disable = partial(self._roster.disable_backend, leaves_at=_compute_leave_time(change))
        return self._change_instances(request, change, "disabled", {"membership": "disabled"}, disable)

    async def _set_weights(self, request: web.Request) -> web.Response:
        change = await read_change(request, self._pools.keys())
        if change.weight_percent is None:
            raise BadRequest("weight is missing: a whole number from 1 to 100", param="weight")
        weigh = partial(self._roster.set_backend_weight, weight=change.weight_percent)
        return self._change_instances(
            request, change, f"given weight {change.weight_percent}", {"weight": change.weight_percent}, weigh
        )

    def _change_instances(
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
        before = self._states_of_instances(change)
        there = [e for e in change.endpoints if before[str(e)]["membership"] in ("enabled", "disabled")]
        warnings = self._warn_of_empty_role(change.role, there, "enabled") if verb == "disabled" else []
        if not change.is_dry_run:
            for endpoint in there:
                apply(change.role, endpoint.host, endpoint.port)
        message = f"Instances {_endpoint_names(there)} are {verb}." if there else ""
        return self._log_and_answer(
            request, change, message, _describe_changes(before, there, becomes), warnings, there
        )

    def _warn_of_empty_role(self, role: Role, taken: Sequence[Endpoint], remedy: str) -> list[str]:
        """Return a warning if a role would have no instance left after the change."""
        left = {member.backend for member in self._roster.members_of_role(role) if member.may_serve}
        left -= {_backend_at(role, endpoint) for endpoint in taken}
        if not taken or left:
            return []
        return [f"No {role} instance is left: requests that need one are rejected until one is {remedy}."]

    def _states_of_instances(self, change: InstanceChange) -> dict[str, _State]:
        """Return the states of the named instances. A membership of None means that the instance does not exist."""
        members = {member.backend: member for member in self._roster.members_of_role(change.role)}
        joining = self._joiner.joining_instances(change.role)
        states: dict[str, _State] = {}
        for endpoint in change.endpoints:
            backend = _backend_at(change.role, endpoint)
            if (member := members.get(backend)) is not None:
                states[str(endpoint)] = {"membership": membership_of(member), "weight": member.weight_percent}
            else:
                states[str(endpoint)] = {"membership": "joining" if backend in joining else None, "weight": None}
        return states

    def _log_and_answer(
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
        missing = f"There are no {role} instances {_endpoint_names(not_found)}." if not_found else ""
        message = " ".join(filter(None, (effect, missing)))
        if change.is_dry_run:
            message = f"Dry run, nothing is changed: {message}"
        level = logging.WARNING if warnings or not_found else logging.INFO
        logger.log(level, "%s", " ".join((message, *warnings)), extra={"fields": {"by": author_of_change(request)}})
        answer: dict[str, Any] = {
            "message": message,
            "dry_run": change.is_dry_run,
            "changes": changes,
            "warnings": warnings,
            "not_found": _endpoint_names(not_found),
        }
        for role in (role for role in Role if role is not Role.ENCODE or role in self._pools):
            answer[f"current_{role}_instances"] = [backend.name for backend in self._backends_of_role(role)]
            answer[f"joining_{role}_instances"] = [backend.name for backend in self._joiner.joining_instances(role)]
        return json_response(answer)

    def _backends_of_role(self, role: Role) -> Sequence[Backend]:
        return self._pools[role].all_backends() if role in self._pools else ()


def _describe_changes(
    states_before: Mapping[str, _State], changed: Sequence[Endpoint], new_properties: Mapping[str, object]
) -> list[dict[str, object]]:
    """Return how each instance would differ after it gets the properties in `new_properties`."""
    both = [(name, states_before[name], {**states_before[name], **new_properties}) for name in _endpoint_names(changed)]
    return [{"instance": name, "was": was, "becomes": after} for name, was, after in both if was != after]


def _compute_leave_time(instance_change: InstanceChange) -> float | None:
    """Return the `RosterMember.must_leave_at` that a change sets."""
    seconds = instance_change.evacuate_after_seconds
    return None if seconds is None else time.monotonic() + seconds


def _backend_to_add(instance_change: InstanceChange, endpoint: Endpoint, *, is_elastic: bool) -> Backend:
    """Return the backend that an administrator wants to add. `is_elastic`: see Backend."""
    backend = _backend_at(instance_change.role, endpoint)
    return replace(
        backend,
        is_trusted=instance_change.sends_engine_key,
        bootstrap_port=endpoint.bootstrap_port,
        models=endpoint.models,
        tls=endpoint.tls,
        is_elastic=is_elastic,
    )


def _settable_details(backend: Backend) -> dict[str, object]:
    """Return the details of an instance that an administrator may set."""
    return {"bootstrap_port": backend.bootstrap_port, "models": list(backend.models), "send_key": backend.is_trusted}


def _backend_at(role: Role, endpoint: Endpoint) -> Backend:
    return Backend(role, endpoint.host, endpoint.port)


def _endpoint_names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]
