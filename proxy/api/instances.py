"""The instances: which there are and how they are, and adding and removing them while the gateway runs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from proxy.api.administrators import author
from proxy.backend import Backend, Role
from proxy.balancer.backend_health import HealthState
from proxy.balancer.engine_facts import UNKNOWN_VERSION, EngineFacts
from proxy.balancer.roster import ADMIN
from proxy.discovery.static import configured
from proxy.errors import BadRequest
from proxy.listener.body import read_body
from proxy.settings import Endpoint, Listen, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from proxy.api.administrators import Administrators
    from proxy.balancer.health import Health
    from proxy.balancer.health_board import HealthBoard
    from proxy.balancer.misfits import Misfits
    from proxy.balancer.pool import Pool
    from proxy.balancer.roster import Member, Roster
    from proxy.balancer.scoreboard import Scoreboard
    from proxy.balancer.source_states import SourceStates
    from proxy.discovery.joining import Joiner
    from proxy.settings import Settings
    from proxy.upstream.names import Names

logger = logging.getLogger(__name__)

_BODY: Final = Listen(max_body_bytes=64 * 1024, body_seconds=10.0)
_LONGEST_SECONDS: Final = 1e9  # as much as for ever
_json: Final = partial(web.json_bytes_response, dumps=orjson.dumps)


class InstancesApi:
    """The routes under `/instances`. `pools` are those of the roles that the connector uses. `drop_drained` forgets the
    removed instances whose last request has ended.
    """

    def __init__(
        self,
        pools: Mapping[Role, Pool],
        roster: Roster,
        scoreboard: Scoreboard,
        health: Health,
        health_board: HealthBoard,
        misfits: Misfits,
        joiner: Joiner,
        sources: SourceStates,
        drop_drained: Callable[[], None],
        names: Names,
        administrators: Administrators,
        settings: Settings,
    ) -> None:
        self._pools = pools
        self._roster = roster
        self._scoreboard = scoreboard
        self._health = health
        self._health_board = health_board
        self._misfits = misfits
        self._joiner = joiner
        self._sources = sources
        self._drop_drained = drop_drained
        self._names = names
        self._administrators = administrators
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take notice of which instances are configured from now on, and when those that are removed are evacuated."""
        self._evacuate_after_seconds = settings.leaving.evacuate_after_seconds
        self._configured = frozenset(configured(settings))

    def routes(self) -> Sequence[web.RouteDef]:
        """For the application."""
        administrators = self._administrators
        return [
            web.get("/instances", administrators.only(self._show)),
            web.post("/instances/add", administrators.only_few(self._add)),
            web.post("/instances/remove", administrators.only_few(self._remove)),
        ]

    # Looking

    async def _show(self, request: web.Request) -> web.Response:
        """All instances, whose loads are those of all workers and whose health is as the worker sees it that was asked,
        and the sources of discovery.
        """
        shown: list[dict[str, Any]] = []
        for role, pool in self._pools.items():
            pool.backends()  # brings what is known up to date
            shown += map(self._describe, self._roster.members(role))
            shown += (_described(backend, "joining") for backend in self._joiner.joining(role))
        wanted = self._roster.wanted()
        sources = [
            {"source": origin, "instances": len(wanted.get(origin, ())), **asdict(state)}
            for origin, state in self._sources.all().items()
        ]
        return _json({"instances": shown, "sources": sources})

    def _describe(self, member: Member) -> dict[str, Any]:
        board, backend, now = self._scoreboard, member.backend, time.monotonic()
        health = self._health.of(backend)
        membership = "draining" if member.draining else "enabled"
        charged, pinned, changed_at = board.load(backend.slot), board.pinned(backend.slot), health.changed_at
        facts = health.facts or EngineFacts()
        return {
            **_described(backend, membership, health.state, health.reason),
            "configured": backend in self._configured,
            "origins": member.origins,
            "states": Counter(state.value for state in self._health_board.states(backend)),
            "since_seconds": None if changed_at is None else round(now - changed_at, 3),
            "evacuated_in_seconds": None if member.leaves_at is None else round(max(0.0, member.leaves_at - now), 3),
            "load": {
                "inflight": board.requests(backend.slot),
                "running": board.running(backend.slot),
                "max_running": self._pools[backend.role].limit(backend),
                "compute_tokens": charged.compute,
                "kv_tokens": charged.kv,
                "pinned_kv": pinned.count,
                "pinned_kv_tokens": pinned.tokens,
            },
            "kv": self._misfits.verdict(backend) if backend.role is Role.DECODE else None,
            "kv_from": self._misfits.pairs(backend) if backend.role is Role.DECODE else None,
            "misfits": [
                {"kind": misfit.kind, "hint": misfit.hint, "since_seconds": round(now - misfit.since, 3)}
                for misfit in self._misfits.of(backend)
            ],
            "engine": {
                "version": None if facts.version == UNKNOWN_VERSION else ".".join(map(str, facts.version)),
                "max_model_len": facts.max_model_len,
                "max_num_seqs": facts.max_num_seqs,
                "kv_tokens": facts.kv_tokens,
            },
        }

    # Changing

    async def _add(self, request: web.Request) -> web.Response:
        change = _parse(await read_body(request, _BODY, option=None), self._pools.keys())
        role, endpoints = change.role, change.endpoints
        for endpoint in endpoints:
            await self._check_address(endpoint)
        try:
            joining = [e for e in endpoints if self._join(role, e, is_trusted=change.send_key)]
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if joining:
            return self._members(request, f"Instances {_names(joining)} are waiting to be added.")
        return self._members(request, f"add {role} instances: {_names(endpoints)}.")

    def _join(self, role: Role, endpoint: Endpoint, *, is_trusted: bool) -> bool:
        host, port, bootstrap_port = endpoint.host, endpoint.port, endpoint.bootstrap_port
        return self._joiner.join(role, host, port, trusted=is_trusted, bootstrap_port=bootstrap_port)

    async def _check_address(self, endpoint: Endpoint) -> None:
        """Raise BadRequest for where no instance may be. Connections are made under the same rules, whenever it is."""
        try:
            await self._names.find(endpoint.host)
        except OSError as problem:
            message = f"{endpoint} cannot be an instance: {problem}"
            raise BadRequest(message, code="address_not_allowed", param="instances") from None

    async def _remove(self, request: web.Request) -> web.Response:
        body = await read_body(request, _BODY, option=None)
        change = _parse(body, self._pools.keys(), self._evacuate_after_seconds)
        role, there, not_there = change.role, list[Endpoint](), list[Endpoint]()
        seconds = change.evacuate_after_seconds
        leaves_at = None if seconds is None else time.monotonic() + seconds
        for endpoint in change.endpoints:
            is_there = self._joiner.remove(role, endpoint.host, endpoint.port, leaves_at)
            (there if is_there else not_there).append(endpoint)
        self._drop_drained()
        told = []
        if there:
            is_left = not {_backend(role, endpoint) for endpoint in there}.isdisjoint(self._backends(role))
            told.append(
                f"Instances {_names(there)} are isolated and waiting to be removed."
                if is_left
                else f"remove {role} instances: {_names(there)}."
            )
        if not_there:
            told.append(f"There are no {role} instances {_names(not_there)}.")
        return self._members(request, " ".join(told), self._warnings(role, there), _names(not_there))

    def _warnings(self, role: Role, removed: Sequence[Endpoint]) -> list[str]:
        """What the administrator who has removed these instances should know."""
        warnings = []
        if removed and all(member.draining for member in self._roster.members(role)):
            warnings.append(f"No {role} instance is left: requests that need one are refused until one is added.")
        returning = [endpoint for endpoint in removed if _backend(role, endpoint) in self._configured]
        if returning:
            warnings.append(f"{_names(returning)} are in the configuration, so that the next reload adds them again.")
        return warnings

    def _members(
        self, request: web.Request, message: str, warnings: Sequence[str] = (), not_found: Sequence[str] = ()
    ) -> web.Response:
        """The answer to a change, which is one line in the log, too."""
        level = logging.WARNING if warnings or not_found else logging.INFO
        logger.log(level, "%s", " ".join((message, *warnings)), extra={"fields": {"by": author(request)}})
        answer: dict[str, Any] = {"message": message, "warnings": warnings, "not_found": not_found}
        for role in (role for role in Role if role is not Role.ENCODE or role in self._pools):
            answer[f"current_{role}_instances"] = [backend.name for backend in self._backends(role)]
            answer[f"joining_{role}_instances"] = [backend.name for backend in self._joiner.joining(role)]
        return _json(answer)

    def _backends(self, role: Role) -> Sequence[Backend]:
        return self._pools[role].backends() if role in self._pools else ()


@dataclass(frozen=True, slots=True)
class _Change:
    """What an administrator asks for. `send_key`: the added instances may be sent the engine key.
    `evacuate_after_seconds`: see Leaving.
    """

    role: Role
    endpoints: list[Endpoint]
    send_key: bool
    evacuate_after_seconds: float | None


def _parse(raw: bytes, roles: Collection[Role], evacuate_after_seconds: float | None = None) -> _Change:
    """Read `{"type": "prefill", "instances": "host:port"}`, or a list of them. Raises BadRequest.

    Behind a prefiller may stand its bootstrap port, as in the settings. `evacuate_after_seconds` counts where the body
    says nothing.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        role = Role(body.get("type", ""))
    except ValueError:
        raise BadRequest("type must be 'prefill', 'decode' or 'encode'", param="type") from None
    if role not in roles:
        raise BadRequest(f"this gateway has no {role} instances", param="type")
    listed = body.get("instances")
    texts = [listed] if isinstance(listed, str) else listed
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest("instances must be 'host:port' or a list of them", param="instances")
    send_key = body.get("send_key", False)
    if not isinstance(send_key, bool):
        raise BadRequest("send_key must be true or false", param="send_key")
    evacuate_after = body.get("evacuate_after", evacuate_after_seconds)
    if evacuate_after is not None and not _is_duration(evacuate_after):
        raise BadRequest("evacuate_after must be a number of seconds, 0 or more, or null", param="evacuate_after")
    try:
        return _Change(role, [_endpoint(text, role) for text in texts], send_key, evacuate_after)
    except ValueError as error:
        raise BadRequest(str(error), param="instances") from None


def _is_duration(value: object) -> bool:
    """Whether that is a number of seconds; in Python True is a number, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_SECONDS


def _described(
    backend: Backend, membership: str, state: HealthState = HealthState.UNKNOWN, reason: str | None = None
) -> dict[str, Any]:
    """What is known of any instance, also of one that has not answered yet."""
    return {
        "role": backend.role,
        "address": backend.name,
        "bootstrap_port": backend.bootstrap_port,
        "configured": False,
        "origins": [ADMIN],
        "membership": membership,
        "state": state,
        "reason": reason,
        "states": {},
        "since_seconds": None,
        "evacuated_in_seconds": None,
        "load": None,
        "kv": None,
        "kv_from": None,
        "misfits": [],
        "engine": None,
    }


def _endpoint(text: str, role: Role) -> Endpoint:
    if "/" in text:
        raise ValueError(f"{text!r} must be host:port without scheme and path")
    found = parse_endpoints(text)
    if len(found) != 1:
        raise ValueError(f"{text!r} must name one port")
    if found[0].bootstrap_port is not None and role is not Role.PREFILL:
        raise ValueError(f"{text!r} has a bootstrap port, which only prefillers have")
    return found[0]


def _backend(role: Role, endpoint: Endpoint) -> Backend:
    return Backend(role, endpoint.host, endpoint.port)


def _names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]
