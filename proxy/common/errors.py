"""Everything that can go wrong with a request, as the client will see it.

A GatewayError carries its HTTP status, a stable machine-readable `code` and a message that says what to do. The kinds
that come from an engine say which backend failed and how, which is all that retrying, health and logging need to know.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.common.backend import Backend, Role

# The OpenAI SDK keeps to the millisecond what it is told: those who are refused together must not return together.
RETRY_AFTER_SECONDS: Final = (1.0, 2.0)

LONGEST_RETRY_AFTER_SECONDS: Final = 3600.0
"""The longest Retry-After of an engine that is believed and passed on."""


class GatewayError(Exception):
    """A failure with an HTTP answer. `retry_after_seconds` None means that retrying cannot help."""

    status = 500
    code = "internal_error"
    retry_after_seconds: float | None = None

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class BadRequest(GatewayError):
    """The client must change its request."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class UnknownModel(BadRequest):
    """No engine serves a model of that name."""

    status = 404
    code = "model_not_found"

    def __init__(self, name: str = "", known: str = "") -> None:
        """`name`: that model, and `known`: what is served instead, in words; empty where they are not told."""
        what = f"called {name[:64]!r}" if name else "of that name"
        message = f"no instance serves a model {what}; GET /v1/models lists them"
        super().__init__(f"{message}: {known}" if known else message, param="model")


class NoBackendAvailable(GatewayError):
    """No backend of a role can take the request now."""

    status = 503
    retry_after_seconds = 1.0

    def __init__(self, role: Role) -> None:
        super().__init__(f"no healthy {role.value} instance is available", code=f"no_healthy_{role.value}")
        self.role = role


class Unauthorized(GatewayError):
    """The client did not show a key that is known."""

    status = 401
    code = "invalid_api_key"


class LimitExceeded(GatewayError):
    """The caller has used up what is its own: the limits of its key."""

    status = 429

    def __init__(self, message: str, *, code: str, retry_after_seconds: float) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(GatewayError):
    """The gateway, or all that is behind it, has no room left for any client."""

    status = 503
    retry_after_seconds = 1.0

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code)


def overloaded(code: str, message: str) -> Overloaded:
    """An Overloaded whose client is told to come back after a time that is drawn for it alone."""
    error = Overloaded(message, code=code)
    error.retry_after_seconds = random.uniform(*RETRY_AFTER_SECONDS)
    return error


class SuspectRequest(GatewayError):
    """The same request has broken engines a short while ago."""

    status = 502
    code = "suspect_request"

    def __init__(self) -> None:
        super().__init__(
            "two instances went down while serving this request; it is not sent to another one for a while"
        )


class UnknownFinish(GatewayError):
    """The engine ended the answer for a reason that the client's API has no word for."""

    status = 502
    code = "unknown_finish_reason"

    def __init__(self, reason: object) -> None:
        super().__init__(f"the engine ended the answer with the finish reason {str(reason)[:64]!r}, which is not known")


class ShuttingDown(GatewayError):
    """This process is about to end; another one may serve the request."""

    status = 503
    code = "draining"
    retry_after_seconds = 1.0

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down")


class ClientStalled(Exception):
    """The client read nothing for the whole write timeout."""


class Failure(StrEnum):
    """How a backend failed; the retry matrix and health are written in these words."""

    CONNECT = "connect"  # nothing was sent: refused, unreachable, name not found, connect timeout
    BOOTSTRAP = (
        "bootstrap"  # decoders cannot meet a prefiller that is there: its bootstrap server is none, or another's
    )
    RESET = "reset"  # the connection ended before any byte of the answer
    TIMEOUT = "timeout"  # the stage's deadline passed
    STALLED = "stalled"  # it sent nothing on any of its streams while others of its role did
    REMOVED = "removed"  # it was taken away from an instance that was removed, to go on elsewhere
    STATUS = "status"  # the engine answered with an error status; `engine_status` and `body` are its own
    BAD_ANSWER = "bad_answer"  # an answer that is not HTTP, not JSON, or not what the protocol promises
    BROKEN = "broken"  # the answer had begun and ended before it was complete
    MISSING_KV = "missing_kv"  # a prefiller answered without the KV parameters a decoder needs
    NOT_RESUMED = "not_resumed"  # the decoder was given the beginning of an answer and did not go on with it
    RECOMPUTED = "recomputed"  # the decoder gave up the request for lack of KV memory and asks for a new prefill
    ABORTED = "aborted"  # the engine ended the answer before it was whole, as it does when it is stopped or paused


_STATUS_OF_FAILURE = {
    Failure.TIMEOUT: 504,
    Failure.STALLED: 504,
    Failure.REMOVED: 503,
    Failure.BOOTSTRAP: 503,
    Failure.ABORTED: 503,
}


class UpstreamError(GatewayError):
    """A backend failed while serving one leg of a request.

    `engine_status`, `body` and `headers` are the engine's own answer when `failure` is STATUS, or RECOMPUTED if the
    engine says that in an error: such an answer reaches the client byte for byte.
    """

    status = 502

    def __init__(
        self,
        failure: Failure,
        backend: Backend,
        message: str,
        *,
        engine_status: int | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, code=f"{backend.role.value}_{failure.value}")
        self.failure = failure
        self.backend = backend
        self.is_stale = False
        """RESET on a connection that had served before: it may have been closed just then, while it was idle, and the
        engine may be well and know nothing of the request."""
        self.is_unreadable = False
        """BAD_ANSWER of an engine that works: a member of the answer has a form that the gateway cannot read. Other
        engines of its version answer alike, so the request is repeated once, and is not suspected of crashes."""
        self.engine_status = engine_status
        self.body = body
        self.headers = headers or {}
        self.blame: Callable[[], None] | None = None
        """Holds a breakdown against the backend, once it is known that it was not the request's; None: nothing is left
        to say. See `balancer.blame`."""
        self.status = engine_status or _STATUS_OF_FAILURE.get(failure, 502)
        if failure in (Failure.BOOTSTRAP, Failure.ABORTED):
            self.retry_after_seconds = 1.0
        told = self.headers.get("retry-after", "")
        if self.is_backpressure and told.isascii() and told.isdigit():  # it could also be a date, which no engine sends
            self.retry_after_seconds = min(float(told), LONGEST_RETRY_AFTER_SECONDS)

    def as_given_up(self, reason: str, *, keeps_body: bool) -> UpstreamError:
        """This error as the client is told of it when its answer had begun and cannot be completed.

        `keeps_body` False: what the engine says is about a request that the client did not send, so it is not for it.
        """
        if not keeps_body:
            self.body = None
        if self.body is None:
            self.message = f"{self.message}; the answer could not be resumed: {reason}"
            self.status = 503
            self.retry_after_seconds = 1.0
        return self

    def as_stopped(self) -> UpstreamError:
        """This error as the client is told of it when its request must not be sent to another engine."""
        self.body = self.retry_after_seconds = None
        self.status, self.code = SuspectRequest.status, SuspectRequest.code
        self.message = f"{self.message}; another one had gone down while serving this request, which is stopped"
        return self

    @property
    def is_breakdown(self) -> bool:
        """The engine broke down, or says that it did: be it sick, or be it the request."""
        if self.failure is Failure.STATUS:
            return (self.engine_status or 500) >= 500 and not self.is_backpressure
        return self.failure in (Failure.RESET, Failure.BROKEN, Failure.BAD_ANSWER) and not self.is_unreadable

    @property
    def is_backpressure(self) -> bool:
        """The engine is busy, not sick."""
        return self.engine_status in (429, 503)

    @property
    def is_refusal(self) -> bool:
        """The engine answered that it takes no requests now, or not this many."""
        return self.failure is Failure.STATUS and self.is_backpressure

    @property
    def is_clients_fault(self) -> bool:
        """The engine refused this request and every other engine would, too."""
        return self.engine_status is not None and 400 <= self.engine_status < 500 and self.engine_status != 429

    @property
    def is_backends_fault(self) -> bool:
        """The failure says something bad about the backend.

        Being busy does not, nor does refusing a bad request, nor a decoder that ran out of KV memory and said so, or
        that does not know how to go on with an answer, nor one that was removed.
        """
        is_innocent = self.failure in (Failure.RECOMPUTED, Failure.NOT_RESUMED, Failure.REMOVED)
        return not (self.is_backpressure or self.is_clients_fault or is_innocent)
