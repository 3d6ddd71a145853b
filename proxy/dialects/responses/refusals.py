"""What of the Responses API is OpenAI's own service and no model, said in words."""

from __future__ import annotations

from proxy.errors import BadRequest


def refuse(what: str, kind: object, param: str) -> BadRequest:
    """The error for `what` of a kind that cannot be served."""
    known = f" of type {kind}" if isinstance(kind, str) and kind.isidentifier() and len(kind) < 64 else " of that type"
    return BadRequest(
        f"{what}{known} are not served here, where models run and nothing else: "
        "leave them out, and use functions or custom tools, which the client runs",
        param=param,
    )
