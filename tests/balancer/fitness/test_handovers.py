"""What two readings of a decoder's counters say of the hand-overs between them: bad where nothing else explains it."""

from __future__ import annotations

import pytest

from proxy.balancer.fitness.handovers import CounterWatch, Verdict, judge
from proxy.balancer.shared.scoreboard import Handovers
from proxy.wire.exposition import PromptTokens

BEFORE = PromptTokens(1000.0, 500.0, 200.0)


def grown(transferred: float = 0, computed: float = 0, cached: float = 0) -> PromptTokens:
    return PromptTokens(BEFORE.transferred + transferred, BEFORE.computed + computed, BEFORE.cached + cached)


@pytest.mark.parametrize(
    ("after", "sent", "verdict"),
    [
        (grown(transferred=400), Handovers(4, 400), Verdict.TRANSFERRED),
        (grown(transferred=1, computed=400), Handovers(4, 400), Verdict.TRANSFERRED),
        (grown(computed=400), Handovers(4, 400), Verdict.COMPUTED),
        (grown(computed=50, cached=350), Handovers(4, 400), Verdict.COMPUTED),  # some of it in its prefix cache
        (grown(computed=2000), Handovers(4, 400), Verdict.COMPUTED),  # estimated too low, or others compute there
        (grown(computed=200), Handovers(2, 200), None),  # too few to say
        (grown(), Handovers(9, 900), Verdict.UNKNOWN),  # it does not count what it does
        (PromptTokens(0, 50, 0), Handovers(9, 900), Verdict.UNKNOWN),  # it has started anew
        (PromptTokens(1000, 400, 900), Handovers(9, 900), Verdict.UNKNOWN),  # another one behind the same address
    ],
)
def test_a_decoder_that_is_handed_parameters(after: PromptTokens, sent: Handovers, verdict: Verdict | None) -> None:
    assert judge(BEFORE, after, sent, from_store=False) is verdict


@pytest.mark.parametrize(
    ("after", "sent", "verdict"),
    [
        (grown(transferred=1024, computed=3), Handovers(4, 4096), Verdict.TRANSFERRED),
        (grown(computed=4000), Handovers(4, 4096), Verdict.COMPUTED),
        (grown(computed=2100, cached=2000), Handovers(4, 4096), Verdict.COMPUTED),
        (grown(computed=100, cached=4000), Handovers(4, 4096), Verdict.UNKNOWN),  # it had the rest itself
        (grown(computed=4 * 4096), Handovers(4, 4096), Verdict.COMPUTED),  # estimated too low
        (grown(computed=4 * 4096 + 1), Handovers(4, 4096), Verdict.UNKNOWN),  # others have it compute, too
        (grown(computed=4000), Handovers(2, 4096), None),
    ],
)
def test_a_decoder_that_looks_in_a_store(after: PromptTokens, sent: Handovers, verdict: Verdict | None) -> None:
    assert judge(BEFORE, after, sent, from_store=True) is verdict


def test_the_first_reading_says_nothing_of_what_was_before() -> None:
    watch = CounterWatch(from_store=False)
    assert watch.read(BEFORE, Handovers(7, 700)) == (Verdict.UNKNOWN, 7)
    assert watch.read(grown(computed=300), Handovers(10, 1000)) == (Verdict.COMPUTED, 3)


def test_hand_overs_are_counted_until_there_are_enough() -> None:
    watch = CounterWatch(from_store=False)
    watch.read(BEFORE, Handovers())
    assert watch.read(grown(computed=100), Handovers(1, 100)) is None
    assert watch.read(grown(computed=200), Handovers(2, 200)) is None
    assert watch.read(grown(computed=300), Handovers(3, 300)) == (Verdict.COMPUTED, 3)
    assert watch.read(grown(computed=300, transferred=90), Handovers(4, 400)) == (Verdict.TRANSFERRED, 1)


def test_an_engine_without_counters_is_unknown_and_so_is_what_a_dead_worker_had_counted() -> None:
    watch = CounterWatch(from_store=False)
    watch.read(BEFORE, Handovers(10, 1000))
    assert watch.read(None, Handovers(20, 2000)) == (Verdict.UNKNOWN, 10)
    assert watch.read(BEFORE, Handovers(25, 2500)) == (Verdict.UNKNOWN, 5)
    assert watch.read(grown(computed=9000), Handovers(15, 1500)) == (Verdict.UNKNOWN, 0)
