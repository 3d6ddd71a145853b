"""Bodies as calls, by the dialect that is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.dialects import DIALECTS
from proxy.dialects.requests import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.dialects.call import Call
    from proxy.settings import Cost
    from proxy.wire.openai import Api


def parse(api: Api, raw: bytes, cost: Cost, headers: Mapping[str, str] | None = None) -> Call:
    """The call that a body to the engines' own route makes. Raises BadRequest."""
    dialect = next(dialect for dialect in DIALECTS if dialect.path == api.path)
    return dialect.parse(read(raw), cost, headers or {})
