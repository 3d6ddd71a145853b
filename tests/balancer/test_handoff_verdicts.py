"""What two readings of a decoder's counters say of the hand-overs between them: bad where nothing else explains it."""

from __future__ import annotations

import pytest

from proxy.balancer.handoff_verdicts import CounterWatch, HandoffVerdict, judge
from proxy.balancer.shared.scoreboard import HandoffCount
from proxy.wire.exposition import PromptTokens

BEFORE = PromptTokens(1000.0, 500.0, 200.0)


def grown(transferred: float = 0, computed: float = 0, cached: float = 0) -> PromptTokens:
    return PromptTokens(BEFORE.transferred + transferred, BEFORE.computed + computed, BEFORE.cached + cached)


@pytest.mark.parametrize(
    ("after", "sent", "verdict"),
    [
        (grown(transferred=400), HandoffCount(4, 400), HandoffVerdict.TRANSFERRED),
        (grown(transferred=1, computed=400), HandoffCount(4, 400), HandoffVerdict.TRANSFERRED),
        (grown(computed=400), HandoffCount(4, 400), HandoffVerdict.COMPUTED),
        (
            grown(computed=50, cached=350),
            HandoffCount(4, 400),
            HandoffVerdict.COMPUTED,
        ),  # some of it in its prefix cache
        (
            grown(computed=2000),
            HandoffCount(4, 400),
            HandoffVerdict.COMPUTED,
        ),  # estimated too low, or others compute there
        (grown(computed=200), HandoffCount(2, 200), None),  # too few to say
        (grown(), HandoffCount(9, 900), HandoffVerdict.UNKNOWN),  # it does not count what it does
        (PromptTokens(0, 50, 0), HandoffCount(9, 900), HandoffVerdict.UNKNOWN),  # it has started anew
        (
            PromptTokens(1000, 400, 900),
            HandoffCount(9, 900),
            HandoffVerdict.UNKNOWN,
        ),  # another one behind the same address
    ],
)
def test_verdict_on_a_decoder_that_pulls_kv(
    after: PromptTokens, sent: HandoffCount, verdict: HandoffVerdict | None
) -> None:
    assert judge(BEFORE, after, sent, from_store=False) is verdict


@pytest.mark.parametrize(
    ("after", "sent", "verdict"),
    [
        (grown(transferred=1024, computed=3), HandoffCount(4, 4096), HandoffVerdict.TRANSFERRED),
        (grown(computed=4000), HandoffCount(4, 4096), HandoffVerdict.COMPUTED),
        (grown(computed=2100, cached=2000), HandoffCount(4, 4096), HandoffVerdict.COMPUTED),
        (grown(computed=100, cached=4000), HandoffCount(4, 4096), HandoffVerdict.UNKNOWN),  # it had the rest itself
        (grown(computed=4 * 4096), HandoffCount(4, 4096), HandoffVerdict.COMPUTED),  # estimated too low
        (grown(computed=4 * 4096 + 1), HandoffCount(4, 4096), HandoffVerdict.UNKNOWN),  # others have it compute, too
        (grown(computed=4000), HandoffCount(2, 4096), None),
    ],
)
def test_verdict_on_a_decoder_that_reads_a_store(
    after: PromptTokens, sent: HandoffCount, verdict: HandoffVerdict | None
) -> None:
    assert judge(BEFORE, after, sent, from_store=True) is verdict


def test_first_reading_has_no_verdict_on_earlier_handoffs() -> None:
    watch = CounterWatch(from_store=False)
    assert watch.read(BEFORE, HandoffCount(7, 700)) == (HandoffVerdict.UNKNOWN, 7)
    assert watch.read(grown(computed=300), HandoffCount(10, 1000)) == (HandoffVerdict.COMPUTED, 3)


def test_handoffs_accumulate_until_there_are_enough_for_a_verdict() -> None:
    watch = CounterWatch(from_store=False)
    watch.read(BEFORE, HandoffCount())
    assert watch.read(grown(computed=100), HandoffCount(1, 100)) is None
    assert watch.read(grown(computed=200), HandoffCount(2, 200)) is None
    assert watch.read(grown(computed=300), HandoffCount(3, 300)) == (HandoffVerdict.COMPUTED, 3)
    assert watch.read(grown(computed=300, transferred=90), HandoffCount(4, 400)) == (HandoffVerdict.TRANSFERRED, 1)


def test_verdict_is_unknown_without_counters_or_after_a_worker_died() -> None:
    watch = CounterWatch(from_store=False)
    watch.read(BEFORE, HandoffCount(10, 1000))
    assert watch.read(None, HandoffCount(20, 2000)) == (HandoffVerdict.UNKNOWN, 10)
    assert watch.read(BEFORE, HandoffCount(25, 2500)) == (HandoffVerdict.UNKNOWN, 5)
    assert watch.read(grown(computed=9000), HandoffCount(15, 1500)) == (HandoffVerdict.UNKNOWN, 0)
