"""Errors of requests, with the status and message for the client.

A GatewayError has an HTTP status, a stable machine-readable `code` and a message. An UpstreamError also has the backend
that failed and the kind of failure, on which retries, health and logs depend.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from proxy.common.quotations import without_quotations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.common.backend import Backend, Role

# The OpenAI SDK waits exactly this long. A random time prevents that clients rejected together return together.
RETRY_AFTER_SECONDS: Final = (1.0, 2.0)

MAX_RETRY_AFTER_SECONDS: Final = 3600.0
"""Upper limit for the Retry-After of an engine. Longer times are cut to it."""


class GatewayError(Exception):
    """A failure that is answered with an HTTP error. `retry_after_seconds` None: a retry cannot help."""

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
    """The client's request is invalid and must be changed."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class UnknownModel(BadRequest):
    """No engine serves the model that the client named."""

    status = 404
    code = "model_not_found"

    def __init__(self, name: str = "", known: str = "") -> None:
        """Build the message with the name of the model and the known names.

        Args:
            name: The requested model; empty: the message does not name it.
            known: Text that lists the models that are served; empty: the message does not list them.
        """
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
    """The client sent no known API key."""

    status = 401
    code = "invalid_api_key"


class LimitExceeded(GatewayError):
    """The client has reached a limit of its API key."""

    status = 429

    def __init__(self, message: str, *, code: str, retry_after_seconds: float) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(GatewayError):
    """The gateway or its engines have no capacity left for any client."""

    status = 503
    retry_after_seconds = 1.0

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code)


def make_overloaded_error(code: str, message: str) -> Overloaded:
    """Return an Overloaded error with a random Retry-After."""
    error = Overloaded(message, code=code)
    error.retry_after_seconds = random.uniform(*RETRY_AFTER_SECONDS)
    return error


class SuspectRequest(GatewayError):
    """The client's request has recently crashed engines."""

    status = 502
    code = "suspect_request"

    def __init__(self) -> None:
        super().__init__(
            "two instances went down while serving this request; it is not sent to another one for a while"
        )


class UnknownFinish(GatewayError):
    """The engine ended the answer for a reason that the API of the client does not define."""

    status = 502
    code = "unknown_finish_reason"

    def __init__(self, reason: object) -> None:
        super().__init__(f"the engine ended the answer with the finish reason {str(reason)[:64]!r}, which is not known")


class ShuttingDown(GatewayError):
    """This process is shutting down; another one may serve the request."""

    status = 503
    code = "draining"
    retry_after_seconds = 1.0

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down")


class ClientStalled(Exception):
    """The client read nothing during the whole write timeout."""


class Failure(StrEnum):
    """How a backend failed. Retries and health depend on it."""

    CONNECT = "connect"  # nothing was sent: connection refused, host unreachable, name not found, connect timeout
    BOOTSTRAP = "bootstrap"  # the prefiller runs, but its bootstrap server is missing or belongs to another engine
    RESTARTED = "restarted"  # another engine than before answers at the address, so the KV is not where it was expected
    RESET = "reset"  # the connection ended before any byte of the answer
    TIMEOUT = "timeout"  # the stage's deadline passed
    STALLED = "stalled"  # it sent nothing on all its streams while other backends of its role did
    REMOVED = "removed"  # the instance was removed, and the request continues on another one
    STATUS = "status"  # the engine answered with the error status `engine_status` and `body`
    BAD_ANSWER = "bad_answer"  # an answer that is not HTTP, not JSON, or not what the protocol promises
    BROKEN = "broken"  # the connection ended inside the answer
    MISSING_KV = "missing_kv"  # the prefiller answered without the KV parameters that the decoder needs
    NOT_RESUMED = "not_resumed"  # the decoder received the beginning of an answer and did not continue it
    RECOMPUTED = "recomputed"  # the decoder abandoned the request for lack of KV memory and needs a new prefill
    ABORTED = "aborted"  # the engine abandoned the answer, as when it is stopped or paused


_STATUS_BY_FAILURE = {
    Failure.TIMEOUT: 504,
    Failure.STALLED: 504,
    Failure.REMOVED: 503,
    Failure.BOOTSTRAP: 503,
    Failure.RESTARTED: 503,
    Failure.ABORTED: 503,
}
_FAILURES_WITHOUT_BLAME: Final = (Failure.RECOMPUTED, Failure.NOT_RESUMED, Failure.REMOVED, Failure.RESTARTED)


CLIENT_MISTAKES: Final = frozenset((400, 404, 413, 415, 422))
"""Statuses with which an engine reports a mistake in the client's request."""


class UpstreamError(GatewayError):
    """A backend failed during one leg of a request.

    `engine_status`, `body` and `headers` are the answer of the engine if `failure` is STATUS, or RECOMPUTED if the
    engine reported that as an error. The client receives such a body unchanged.
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
        self.is_stale_connection = False
        """RESET on a reused connection. The engine may be healthy and have closed the idle connection just before."""
        self.is_unreadable_answer = False
        """BAD_ANSWER because the gateway cannot read a member of the answer. The engine works, and others of its
        version answer alike. So the request is repeated once, and is not suspected of crashing engines."""
        self.engine_status = engine_status
        self.body = body
        self.headers = headers or {}
        self.engine_words = ""
        """The beginning of the engine's own message, for administrators. Empty: the engine sent none."""
        self.quotable: Callable[[], Sequence[str] | None] | None = None
        """Returns the texts of the request, which the engine may have quoted, or None if they are not all known. None:
        the request is not known."""
        self.blame: Callable[[], None] | None = None
        """Counts a breakdown as a failure of the backend, once the request is known not to be the cause. None: nothing
        is left to count. See `balancer.blame`."""
        self.status = engine_status or _STATUS_BY_FAILURE.get(failure, 502)
        if failure in (Failure.BOOTSTRAP, Failure.RESTARTED, Failure.ABORTED):
            self.retry_after_seconds = 1.0
        seconds = self.headers.get("retry-after", "")
        if self.is_backpressure and seconds.isascii() and seconds.isdigit():  # no engine sends a date
            self.retry_after_seconds = min(float(seconds), MAX_RETRY_AFTER_SECONDS)

    def copy_as_abandoned(self, reason: str, *, keeps_body: bool) -> UpstreamError:
        """Change the error to one for a client whose answer began and cannot be completed. Returns the error.

        `keeps_body` False: the error of the engine is about a request that the client did not send, so it is removed.
        """
        if not keeps_body:
            self.body = None
        if self.body is None:
            self.message = f"{self.message}; the answer could not be resumed: {reason}"
            self.status = 503
            self.retry_after_seconds = 1.0
        return self

    def mark_as_stopped(self) -> UpstreamError:
        """Change the error to one for a request that must not be sent to another engine. Returns the error."""
        self.body = self.retry_after_seconds = None
        self.status, self.code = SuspectRequest.status, SuspectRequest.code
        self.message = f"{self.message}; another one had gone down while serving this request, which is stopped"
        return self

    @property
    def full_message(self) -> str:
        """The message with the engine's own words, for administrators only: engines quote prompts."""
        return f"{self.message}: {self.engine_words}" if self.engine_words else self.message

    def describe(self) -> str:
        """Return the message for logs: with the engine's own words, but without quotations of the request."""
        texts = self.quotable() if self.engine_words and self.quotable is not None else None
        words = "" if texts is None else without_quotations(self.engine_words, texts)
        return f"{self.message}: {words}" if words else self.message

    @property
    def is_engine_breakdown(self) -> bool:
        """Whether the engine crashed or returned 5xx. The cause may be the engine or the request."""
        if self.failure is Failure.STATUS:
            return (self.engine_status or 500) >= 500 and not self.is_backpressure
        return self.failure in (Failure.RESET, Failure.BROKEN, Failure.BAD_ANSWER) and not self.is_unreadable_answer

    @property
    def is_client_mistake(self) -> bool:
        """Whether the engine reported a mistake in the client's request, such as a prompt that is too long."""
        return self.failure is Failure.STATUS and self.engine_status in CLIENT_MISTAKES

    @property
    def is_backpressure(self) -> bool:
        """Whether the engine reported that it is busy."""
        return self.engine_status in (429, 503)

    @property
    def is_refusal(self) -> bool:
        """Whether the engine rejected the request because it accepts none now, or has too many."""
        return self.failure is Failure.STATUS and self.is_backpressure

    @property
    def is_fault_of_client(self) -> bool:
        """Whether the engine rejected an invalid request. Every other engine would reject it too."""
        return self.engine_status is not None and 400 <= self.engine_status < 500 and self.engine_status != 429

    @property
    def is_fault_of_backend(self) -> bool:
        """Whether the failure counts against the health of the backend.

        It does not count if the engine is busy, was removed or was restarted, or if the request is invalid. Nor does it
        count if a decoder reported a lack of KV memory, or cannot continue an answer.
        """
        is_innocent = self.failure in _FAILURES_WITHOUT_BLAME
        return not (self.is_backpressure or self.is_fault_of_client or is_innocent)
