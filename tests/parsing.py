"""Parse bodies into calls, by dialect."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.dialects import DIALECTS
from proxy.dialects.call import Call
from proxy.dialects.requests import parse_body
from proxy.settings import Cost
from proxy.wire.openai import Api


def parse(api: Api, raw: bytes, cost: Cost, headers: Mapping[str, str] | None = None) -> Call:
    """Return the call of a body sent to the engines' route. Raises BadRequest."""
    dialect = next(dialect for dialect in DIALECTS if dialect.path == api.path)
    return dialect.parse_request(parse_body(raw), cost, headers or {})
