"""Blame: what one request's failures say about engines, and when they say nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.balancer.blame import Blame
from proxy.common.backend import Backend, Role
from proxy.common.errors import Failure, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.blame import FailedEngines

P1, P2, P3 = (Backend(Role.PREFILL, "p", port) for port in (1, 2, 3))
D1 = Backend(Role.DECODE, "d", 1)
KINDS = {
    "500": (Failure.STATUS, 500),
    "502": (Failure.STATUS, 502),
    "reset": (Failure.RESET, None),
    "broken": (Failure.BROKEN, None),
    "garbage": (Failure.BAD_ANSWER, None),
    "busy": (Failure.STATUS, 503),
    "bad": (Failure.STATUS, 400),
    "refused": (Failure.CONNECT, None),
    "late": (Failure.TIMEOUT, None),
    "stalled": (Failure.STALLED, None),
    "no-kv": (Failure.MISSING_KV, None),
    "no-memory": (Failure.RECOMPUTED, None),
}


class Told:
    """A request's failures, and who is blamed for them."""

    def __init__(self) -> None:
        self.blamed: list[Backend] = []

    def fails(self, blame: Blame, *failures: tuple[Backend, str]) -> None:
        for backend, word in failures:
            failure, status = KINDS[word]
            error = UpstreamError(failure, backend, word, engine_status=status)
            error.blame = lambda backend=backend: self.blamed.append(backend)
            blame.failed(error)


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([(P1, "500")], [P1]),
        ([(P1, "500"), (P2, "500")], []),
        ([(P1, "500"), (P2, "502")], []),
        ([(P1, "reset"), (P2, "broken")], []),
        ([(P1, "500"), (P2, "500"), (P3, "500")], []),
        ([(P1, "500"), (P1, "500")], [P1, P1]),
        ([(P1, "500"), (P2, "reset")], [P1, P2]),
        ([(P1, "500"), (P2, "busy")], [P1]),
        ([(P1, "500"), (P2, "refused")], [P1]),
        ([(P1, "500"), (D1, "500")], [P1, D1]),
    ],
)
def test_engines_are_not_blamed_for_the_same_breakdown_on_two_of_them(
    failures: Sequence[tuple[Backend, str]], blamed: Sequence[Backend]
) -> None:
    told = Told()
    with Blame() as blame:
        told.fails(blame, *failures)
        assert told.blamed == []
    assert told.blamed == blamed


@pytest.mark.parametrize("word", ["busy", "bad", "refused", "late", "stalled", "no-kv", "no-memory"])
def test_blame_ignores_failures_that_are_no_breakdown(word: str) -> None:
    told = Told()
    with Blame() as blame:
        told.fails(blame, (P1, word))
        assert not blame.is_open
    assert told.blamed == []


def test_engine_is_blamed_once_per_failure() -> None:
    told = Told()
    with Blame() as blame:
        told.fails(blame, (P1, "500"))
        blame.settle()
        blame.settle()
    assert told.blamed == [P1]


def test_breakdowns_of_two_units_of_a_request_count_together() -> None:
    told = Told()
    ways: FailedEngines = {}
    with Blame(ways) as one, Blame(ways) as other:
        told.fails(one, (P1, "500"))
        told.fails(other, (P2, "500"))
    assert told.blamed == []


def test_settled_failure_still_counts_for_a_later_breakdown() -> None:
    told = Told()
    with Blame() as blame:
        told.fails(blame, (P1, "broken"))
        blame.settle()
        told.fails(blame, (P2, "broken"))
    assert told.blamed == [P1]
