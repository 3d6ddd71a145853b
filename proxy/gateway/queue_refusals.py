"""In which words the queue refuses a request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from proxy.common.errors import RETRY_AFTER_SECONDS, GatewayError, NoBackendAvailable, Overloaded, overloaded

if TYPE_CHECKING:
    from proxy.common.backend import Role

# What is predicted is told no earlier than it is, and up to this part later: those who are refused together must not
# return together.
_SPREAD: Final = 0.2


def queue_full() -> Overloaded:
    """As many wait as may."""
    return overloaded("queue_full", "too many requests are waiting for an instance")


def queue_timeout(wait_seconds: float, absent: Role | None) -> Overloaded | NoBackendAvailable:
    """For a unit that has waited as long as it may. `absent`: the role of which no backend is left, if that is why
    there was no room; None: there were backends, and all were full.
    """
    if absent is not None:
        nobody = NoBackendAvailable(absent)
        nobody.retry_after_seconds = random.uniform(*RETRY_AFTER_SECONDS)
        return nobody
    return overloaded("queue_timeout", f"no instance had room for this request within {wait_seconds:g} s")


def all_refuse(role: Role, seconds: float) -> Overloaded:
    """For a unit that would wait in vain: all instances of a role refuse requests by their own Retry-After, the first
    one for this time.
    """
    error = Overloaded(f"all {role.value} instances refuse requests, for another {seconds:.0f} s", code="all_refuse")
    error.retry_after_seconds = seconds * random.uniform(1.0, 1.0 + _SPREAD)
    return error


def too_late(wanted_seconds: float) -> GatewayError:
    """Its first token cannot come any more when the client wants it: to repeat it as it is cannot help."""
    message = f"the first token cannot come within {wanted_seconds:g} s any more, as x-ttft-deadline-ms asks for"
    return GatewayError(message, code="queue_deadline", status=504)


def too_long_a_wait(predicted_seconds: float, may_wait_seconds: float) -> GatewayError:
    """For a unit that is predicted to wait for longer than it may: 429, whose Retry-After is the difference."""
    error = GatewayError(
        f"this request would probably wait for {predicted_seconds:.1f} s, and {may_wait_seconds:.1f} s are the limit",
        code="queue_predicted",
        status=429,
    )
    error.retry_after_seconds = max(1.0, predicted_seconds - may_wait_seconds) * random.uniform(1.0, 1.0 + _SPREAD)
    return error
