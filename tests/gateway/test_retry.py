"""The matrix of failures that may be retried."""

from __future__ import annotations

import pytest

from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.gateway.retry import backoff_seconds, may_retry
from proxy.settings import Retry

NEVER, ONCE, ALWAYS = 0, 1, 99


def failed(failure: Failure, status: int | None = None, role: Role = Role.DECODE) -> UpstreamError:
    return UpstreamError(failure, Backend(role, "10.0.0.1", 8000), "failed", engine_status=status)


MATRIX = [
    # Nothing was sent, or the engine only said that it is busy, or gave the work up: free to repeat.
    (Failure.CONNECT, None, ALWAYS),
    (Failure.BOOTSTRAP, None, ALWAYS),
    (Failure.RESTARTED, None, ALWAYS),
    (Failure.STATUS, 429, ALWAYS),
    (Failure.STATUS, 503, ALWAYS),
    (Failure.RECOMPUTED, None, ALWAYS),
    (Failure.REMOVED, None, ALWAYS),
    (Failure.ABORTED, None, ALWAYS),
    (Failure.NOT_RESUMED, None, NEVER),
    # The engine may have begun: once.
    (Failure.RESET, None, ONCE),
    (Failure.BROKEN, None, ONCE),
    (Failure.STALLED, None, ONCE),
    (Failure.BAD_ANSWER, None, ONCE),
    (Failure.STATUS, 500, ONCE),
    (Failure.STATUS, 501, ONCE),
    (Failure.STATUS, 502, ONCE),
    (Failure.STATUS, 504, ONCE),
    # A second wait of the same length helps no client.
    (Failure.TIMEOUT, None, NEVER),
    # The connector has asked for it again already.
    (Failure.MISSING_KV, None, NEVER),
    # The client's fault is one everywhere.
    *((Failure.STATUS, status, NEVER) for status in (400, 401, 403, 404, 408, 413, 422, 499)),
]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("failure", "status", "repeats"), MATRIX)
def test_retries_follow_the_matrix_of_failures(failure: Failure, status: int | None, repeats: int, role: Role) -> None:
    max_attempts = 5
    allowed = [
        may_retry(
            failed(failure, status, role), sent_to_client=False, attempt_count=attempts, max_attempts=max_attempts
        )
        for attempts in range(1, max_attempts + 2)
    ]
    assert allowed == [attempts <= min(repeats, max_attempts - 1) for attempts in range(1, max_attempts + 2)]


def test_matrix_has_every_failure() -> None:
    assert {failure for failure, _, _ in MATRIX} == set(Failure)


@pytest.mark.parametrize(("failure", "status", "repeats"), MATRIX)
def test_requests_are_not_retried_after_the_client_has_bytes(
    failure: Failure, status: int | None, repeats: int
) -> None:
    assert not may_retry(failed(failure, status), sent_to_client=True, attempt_count=1, max_attempts=5)


@pytest.mark.parametrize(("failure", "status", "repeats"), MATRIX)
@pytest.mark.parametrize("max_attempts", [0, 1])
def test_one_attempt_means_no_retry(failure: Failure, status: int | None, repeats: int, max_attempts: int) -> None:
    assert not may_retry(failed(failure, status), sent_to_client=False, attempt_count=1, max_attempts=max_attempts)


def test_wait_doubles_up_to_its_limit() -> None:
    retry = Retry(base_delay_seconds=0.1, max_delay_seconds=0.5)
    longest = [backoff_seconds(retry, attempts, random_draw=1.0) for attempts in (1, 2, 3, 4, 5, 100)]
    assert longest == [0.1, 0.2, 0.4, 0.5, 0.5, 0.5]


def test_wait_is_random_between_zero_and_its_limit() -> None:
    retry = Retry(base_delay_seconds=0.1, max_delay_seconds=0.5)
    assert backoff_seconds(retry, 2, random_draw=0.0) == 0.0
    assert backoff_seconds(retry, 2, random_draw=0.25) == 0.05
    waits = [backoff_seconds(retry, 2) for _ in range(100)]
    assert all(0.0 <= wait < 0.2 for wait in waits)
    assert len(set(waits)) > 1


def test_very_high_attempt_number_has_a_wait() -> None:
    assert backoff_seconds(Retry(base_delay_seconds=0.1, max_delay_seconds=0.5), 5000, random_draw=1.0) == 0.5
