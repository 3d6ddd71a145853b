"""How a request ended: who ended it, in which stage, and with which status."""

from __future__ import annotations

from asyncio import CancelledError
from typing import TYPE_CHECKING, Final, NamedTuple

from proxy.errors import ClientStalled, Failure, GatewayError, ShuttingDown, UpstreamError

if TYPE_CHECKING:
    from proxy.observe.record import RequestRecord

_TOLD_FAILURES: Final = (Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.RECOMPUTED)


class Outcome(NamedTuple):
    """Of one request."""

    term: str
    """Two letters: who ended it, and the stage. The first: `-` nobody, it is complete; C the client left; c the client
    stalled; S an engine failed; s an engine was too slow; P the gateway refused; K it was cut off by a shutdown. The
    second is the stage, R while the request was being read."""
    status: int
    """For log and metrics; 499 where the client left before there was one."""
    broken: tuple[str, str] | None = None
    """Which side broke an answer off whose status had been sent, and why; None: it is whole, or nothing was sent."""


COMPLETE: Final = Outcome("--", 200)


def outcome_of(record: RequestRecord, error: BaseException) -> Outcome:
    """The outcome of a request that was ended by this error."""
    term, status = _term_and_status(record, error)
    return Outcome(term, status, _broken(error) if record.committed else None)


def _term_and_status(record: RequestRecord, error: BaseException) -> tuple[str, int]:
    stage = record.stage.value if record.stage else "R"
    if isinstance(error, ClientStalled):
        return "cD", 200
    if isinstance(error, ShuttingDown) and record.committed:
        return "KD", 200
    if isinstance(error, CancelledError | ConnectionError):  # whichever of the two is noticed first
        return "C" + stage, 200 if record.committed else 499
    if isinstance(error, UpstreamError):
        who = "s" if error.failure is Failure.TIMEOUT else "S"
        return who + stage, 200 if record.committed else error.status
    # GatewayError and aiohttp's HTTPException have one; what else ends a request is a mistake of ours.
    return "P" + stage, 200 if record.committed else getattr(error, "status", 500)


def _broken(error: BaseException) -> tuple[str, str]:
    if isinstance(error, UpstreamError):
        return "engine", (error.failure if error.failure in _TOLD_FAILURES else Failure.BROKEN).value
    if isinstance(error, ClientStalled):
        return "client", "write_timeout"
    if isinstance(error, ShuttingDown):
        return "gateway", "draining"
    if isinstance(error, GatewayError):
        return "gateway", "refused"
    return "client", "left"
