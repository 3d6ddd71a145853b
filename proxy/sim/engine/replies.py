"""JSON in and out of a simulated engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from proxy.sim.dialects.endpoints import Endpoint
    from proxy.sim.errors import EngineError


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, headers=headers, content_type="application/json")


def refusal(error: EngineError, endpoint: Endpoint | None = None) -> web.Response:
    return json_response(error.body() if endpoint is None else endpoint.refusal(error), error.status)


async def read_json(request: web.Request) -> tuple[Any, int]:
    """The parsed body (None if it is not JSON) and its size."""
    raw = await request.read()
    try:
        return orjson.loads(raw), len(raw)
    except orjson.JSONDecodeError:
        try:
            return json.loads(raw), len(raw)  # as engines read all requests
        except (ValueError, RecursionError):
            return None, len(raw)
