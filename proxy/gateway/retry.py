"""When a failed attempt may be repeated, and how long to wait before it. Pure.

The questions are always the same two: can the engine have begun the work, and has the client seen any of it?
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from proxy.common.errors import Failure

if TYPE_CHECKING:
    from proxy.common.errors import UpstreamError
    from proxy.settings import Retry

_FREE: Final = frozenset(
    {Failure.CONNECT, Failure.BOOTSTRAP, Failure.RECOMPUTED, Failure.REMOVED, Failure.ABORTED},
)
"""Failures after which all attempts may be used."""


def may_retry(error: UpstreamError, *, sent_to_client: bool, attempts: int, max_attempts: int) -> bool:
    """May the request be tried again on another backend, after `attempts` tries that failed in this error's role?

    Nothing is repeated once the client has bytes. A refused connection, a prefiller that decoders cannot meet, a busy
    engine (429, 503), a decoder that gave up for lack of memory, and an instance that was removed or is being stopped
    are no reason to give up, so they may use all attempts.

    A lost or broken answer and a 5xx may have pinned KV cache on a prefiller. Those are repeated once, and so is what a
    stalled backend held. A deadline that passed is not repeated, since a second wait of that length helps no client.
    What is the client's fault fails everywhere.
    """
    return not sent_to_client and attempts < min(_attempts(error, max_attempts), max_attempts)


def _attempts(error: UpstreamError, max_attempts: int) -> int:
    if error.failure in _FREE or error.is_backpressure:
        return max_attempts
    if error.failure in (Failure.TIMEOUT, Failure.MISSING_KV, Failure.NOT_RESUMED) or error.is_clients_fault:
        return 1
    return 2


def backoff_seconds(retry: Retry, attempts: int, draw: float | None = None) -> float:
    """Wait before the next attempt: exponential with full jitter. `draw` is the random number in [0, 1)."""
    draw = random.random() if draw is None else draw
    doublings = min(attempts - 1, 64)  # far beyond any bound, and still a float
    ceiling: float = min(retry.max_delay_seconds, retry.base_delay_seconds * 2**doublings)
    return draw * ceiling
