"""What an engine answers when it does not do what it was asked."""

from __future__ import annotations

from typing import Any


class EngineError(Exception):
    """A request that the engine refuses. `late` when the handler did, not the schema: only then does an engine holding
    `do_remote_prefill` params tell the prefiller (vLLM `_with_kv_transfer_rejection_cleanup`).
    """

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, *, late: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.late = late

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def internal_error() -> EngineError:
    return EngineError(500, "Internal server error", "InternalServerError")
