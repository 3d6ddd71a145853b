"""What administrators ask of instances: the bodies and queries of the routes under `/instances`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from proxy.balancer.backend_health import FULL_PERCENT
from proxy.common.backend import Role
from proxy.common.errors import BadRequest
from proxy.listener.body import read_body
from proxy.settings import Endpoint, Listen, parse_endpoints

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from aiohttp import web


_BODY: Final = Listen(max_body_bytes=64 * 1024, body_seconds=10.0)
_LONGEST_SECONDS: Final = 1e9  # as much as for ever


_TRUTHS: Final[Mapping[str, bool]] = {"": True, "1": True, "true": True, "0": False, "false": False}


def truth(name: str, value: str) -> bool:
    """Whether a parameter says yes, which its name alone does, too. Raises BadRequest for anything that is neither yes
    nor no.
    """
    if value not in _TRUTHS:
        raise BadRequest(f"{name} must be true or false", param=name)
    return _TRUTHS[value]


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """A change of instances that an administrator requests."""

    role: Role
    endpoints: list[Endpoint]
    is_dry_run: bool
    """Report what would happen, and do nothing."""
    send_key: bool
    """The added instances may be sent the engine key."""
    evacuate_after_seconds: float | None
    """See Leaving."""
    weight: int | None
    """See Member; None: the body has none."""


def is_dry_run(request: web.Request) -> bool:
    """Whether `?dry_run=true` asks for what would happen, and for nothing to be done. Raises BadRequest."""
    return truth("dry_run", request.query.get("dry_run", "false"))


async def read_change(
    request: web.Request, roles: Collection[Role], evacuate_after_seconds: float | None = None
) -> InstanceChange:
    """Read `{"type": "prefill", "instances": "host:port"}`, or a list of them. Raises BadRequest.

    Behind a prefiller may stand its bootstrap port, as in the settings. `evacuate_after_seconds` counts where the body
    says nothing.
    """
    dry_run = is_dry_run(request)
    raw = await read_body(request, _BODY, option=None)
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
    weight = body.get("weight")
    if weight is not None and not (type(weight) is int and 1 <= weight <= FULL_PERCENT):
        raise BadRequest(f"weight must be a whole number from 1 to {FULL_PERCENT}", param="weight")
    try:
        endpoints = [_endpoint(text, role) for text in texts]
    except ValueError as error:
        raise BadRequest(str(error), param="instances") from None
    return InstanceChange(role, endpoints, dry_run, send_key, evacuate_after, weight)


def _is_duration(value: object) -> bool:
    """Whether that is a number of seconds; in Python True is a number, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_SECONDS


def _endpoint(text: str, role: Role) -> Endpoint:
    if "/" in text:
        raise ValueError(f"{text!r} must be host:port without scheme and path")
    found = parse_endpoints(text)
    if len(found) != 1:
        raise ValueError(f"{text!r} must name one port")
    if found[0].bootstrap_port is not None and role is not Role.PREFILL:
        raise ValueError(f"{text!r} has a bootstrap port, which only prefillers have")
    return found[0]
