"""Errors in the words of Anthropic's API (docs.anthropic.com, "Errors")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.dialects.translated import words
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.errors import GatewayError

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(failed: GatewayError) -> dict[str, Any]:
    """The object that a body is, and the data of an event."""
    kind = _TYPES.get(failed.status) or ("invalid_request_error" if failed.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": words(failed)}}


def error_body(failed: GatewayError) -> bytes:
    """Its bytes."""
    return dumps(error(failed))
