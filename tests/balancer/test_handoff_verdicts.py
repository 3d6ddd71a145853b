"""Verdicts on handoffs from counters of decoders, by decoder and by pair, and from expired leases of prefillers."""

from __future__ import annotations

import pytest

from proxy.balancer.handoff_verdicts import (
    CounterWatch,
    Culprits,
    ExpiryTotals,
    ExpiryWatch,
    HandoffVerdict,
    PairWatch,
    attribute_growth,
    find_culprits,
    judge_counters,
)
from proxy.balancer.shared.scoreboard import HandoffCount
from proxy.wire.exposition import PromptTokenTotals

TRANSFERRED, COMPUTED, UNKNOWN = HandoffVerdict
BEFORE = PromptTokenTotals(1000.0, 500.0, 200.0)


def grown(transferred: float = 0, computed: float = 0, cached: float = 0) -> PromptTokenTotals:
    return PromptTokenTotals(BEFORE.transferred + transferred, BEFORE.computed + computed, BEFORE.cached + cached)


@pytest.mark.parametrize(
    ("after", "sent", "verdict"),
    [
        (grown(transferred=400), HandoffCount(4, 400), TRANSFERRED),
        (grown(transferred=1, computed=400), HandoffCount(4, 400), TRANSFERRED),
        (grown(computed=400), HandoffCount(4, 400), COMPUTED),
        (grown(computed=50, cached=350), HandoffCount(4, 400), COMPUTED),  # some of it in its prefix cache
        (grown(computed=2000), HandoffCount(4, 400), COMPUTED),  # estimated too low, or others compute there
        (grown(computed=200), HandoffCount(2, 200), None),  # too few
        (grown(), HandoffCount(9, 900), UNKNOWN),  # the counters do not grow
        (PromptTokenTotals(0, 50, 0), HandoffCount(9, 900), UNKNOWN),  # the engine was restarted
        (PromptTokenTotals(1000, 400, 900), HandoffCount(9, 900), UNKNOWN),  # another one behind the same address
    ],
)
def test_verdict_on_a_decoder_that_pulls_kv(
    after: PromptTokenTotals, sent: HandoffCount, verdict: HandoffVerdict | None
) -> None:
    assert judge_counters(BEFORE, after, sent, reads_from_store=False) is verdict


@pytest.mark.parametrize(
    ("after", "sent", "verdict"),
    [
        (grown(transferred=1024, computed=3), HandoffCount(4, 4096), TRANSFERRED),
        (grown(computed=4000), HandoffCount(4, 4096), COMPUTED),
        (grown(computed=2100, cached=2000), HandoffCount(4, 4096), COMPUTED),
        (grown(computed=100, cached=4000), HandoffCount(4, 4096), UNKNOWN),  # it had the rest itself
        (grown(computed=4 * 4096), HandoffCount(4, 4096), COMPUTED),  # estimated too low
        (grown(computed=4 * 4096 + 1), HandoffCount(4, 4096), UNKNOWN),  # others have it compute, too
        (grown(computed=4000), HandoffCount(2, 4096), None),
    ],
)
def test_verdict_on_a_decoder_that_reads_a_store(
    after: PromptTokenTotals, sent: HandoffCount, verdict: HandoffVerdict | None
) -> None:
    assert judge_counters(BEFORE, after, sent, reads_from_store=True) is verdict


def test_first_reading_has_no_verdict_on_earlier_handoffs() -> None:
    watch = CounterWatch(reads_from_store=False)
    assert watch.judge_reading(BEFORE, HandoffCount(7, 700)) == (UNKNOWN, 7)
    assert watch.judge_reading(grown(computed=300), HandoffCount(10, 1000)) == (COMPUTED, 3)


def test_handoffs_accumulate_until_there_are_enough_for_a_verdict() -> None:
    watch = CounterWatch(reads_from_store=False)
    watch.judge_reading(BEFORE, HandoffCount())
    assert watch.judge_reading(grown(computed=100), HandoffCount(1, 100)) is None
    assert watch.judge_reading(grown(computed=200), HandoffCount(2, 200)) is None
    assert watch.judge_reading(grown(computed=300), HandoffCount(3, 300)) == (COMPUTED, 3)
    assert watch.judge_reading(grown(computed=300, transferred=90), HandoffCount(4, 400)) == (TRANSFERRED, 1)


def test_verdict_is_unknown_without_counters_or_after_a_worker_died() -> None:
    watch = CounterWatch(reads_from_store=False)
    watch.judge_reading(BEFORE, HandoffCount(10, 1000))
    assert watch.judge_reading(None, HandoffCount(20, 2000)) == (UNKNOWN, 10)
    assert watch.judge_reading(BEFORE, HandoffCount(25, 2500)) == (UNKNOWN, 5)
    assert watch.judge_reading(grown(computed=9000), HandoffCount(15, 1500)) == (UNKNOWN, 0)


# Pairs


ZERO = PromptTokenTotals(0.0, 0.0, 0.0)
SENT = {0: HandoffCount(3, 300), 1: HandoffCount(3, 300)}


@pytest.mark.parametrize(
    ("grown", "sent", "involved", "attributed"),
    [
        (PromptTokenTotals(0, 300, 0), {1: HandoffCount(3, 300)}, {1}, {1: PromptTokenTotals(0, 300, 0)}),
        (PromptTokenTotals(200, 9, 90), {1: HandoffCount(3, 300)}, {1}, {1: PromptTokenTotals(200, 9, 90)}),
        (
            PromptTokenTotals(100, 300, 0),
            {1: HandoffCount(3, 300)},
            {0, 1},
            {},
        ),  # the other's may have been counted already
        (
            PromptTokenTotals(0, 600, 60),
            SENT,
            {0, 1},
            {0: PromptTokenTotals(0, 300, 30), 1: PromptTokenTotals(0, 300, 30)},
        ),
        (
            PromptTokenTotals(590, 10, 0),
            SENT,
            {0, 1},
            {0: PromptTokenTotals(300, 0, 0), 1: PromptTokenTotals(300, 0, 0)},
        ),
        (PromptTokenTotals(300, 300, 0), SENT, {0, 1}, {}),
        (PromptTokenTotals(300, 0, 300), SENT, {0, 1}, {}),  # whose prompts did it have itself?
        (
            PromptTokenTotals(900, 30, 0),
            {0: HandoffCount(9, 900), 1: HandoffCount(1, 30)},
            {0, 1},
            {0: PromptTokenTotals(900, 0, 0)},
        ),
    ],
)
def test_growth_is_attributed_to_lanes_only_without_doubt(
    grown: PromptTokenTotals,
    sent: dict[int, HandoffCount],
    involved: set[int],
    attributed: dict[int, PromptTokenTotals],
) -> None:
    assert attribute_growth(grown, sent, involved) == attributed


class Decoder:
    """Counters of a simulated decoder, as PairWatch reads them."""

    def __init__(self) -> None:
        self.watch = PairWatch(reads_from_store=False)
        self.told = ZERO
        self.sent = dict[int, HandoffCount]()
        assert self.read() is None

    def serve(self, lane: int, *, fetches: bool) -> None:
        old = self.sent.get(lane, HandoffCount())
        self.sent[lane] = HandoffCount(old.handoff_count + 1, old.handoff_tokens + 100)
        grown = (100, 0, 0) if fetches else (0, 100, 0)
        self.told = PromptTokenTotals(*(a + b for a, b in zip(self.told, grown, strict=True)))

    def read(self) -> dict[int, HandoffVerdict] | None:
        return self.watch.judge_reading(self.told, dict(self.sent), dict(self.sent))


def test_bad_pair_is_found_when_its_handoffs_alternate_with_another_pair() -> None:
    decoder, found = Decoder(), dict[int, HandoffVerdict]()
    for _ in range(3):
        assert 1 not in found
        decoder.serve(0, fetches=True)
        found |= decoder.read() or {}
        decoder.serve(1, fetches=False)
        found |= decoder.read() or {}
    assert found == {0: TRANSFERRED, 1: COMPUTED}


def test_no_verdict_on_pairs_whose_handoffs_are_always_mixed() -> None:
    decoder = Decoder()
    for _ in range(9):
        for _ in range(3):
            decoder.serve(0, fetches=True)
            decoder.serve(1, fetches=False)
        assert decoder.read() == {}


def test_verdict_on_all_pairs_of_a_decoder_changes_in_one_reading() -> None:
    decoder = Decoder()
    for fetches, verdict in ((False, COMPUTED), (True, TRANSFERRED)):
        for _ in range(3):
            decoder.serve(0, fetches=fetches)
            decoder.serve(1, fetches=fetches)
        assert decoder.read() == {0: verdict, 1: verdict}


def test_evidence_from_before_an_engine_restart_is_dropped() -> None:
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(1, fetches=False)
    decoder.read()
    decoder.told = ZERO
    decoder.serve(1, fetches=False)
    decoder.told = ZERO
    assert decoder.read() is None
    for _ in range(2):
        decoder.serve(1, fetches=False)
    assert decoder.read() == {}
    decoder.serve(1, fetches=False)
    assert decoder.read() == {1: COMPUTED}


def test_evidence_is_dropped_when_a_dead_workers_counts_are_lost() -> None:
    """The worker's part of one pair's handoffs is lost, while others go on."""
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(0, fetches=True)
        decoder.serve(1, fetches=False)
        decoder.read()
    decoder.serve(0, fetches=True)
    decoder.sent[1] = HandoffCount(1, 100)
    assert decoder.read() is None


def test_evidence_is_dropped_when_an_engine_reports_no_counters() -> None:
    """An engine reports no counters while it starts, so its later counts may include other requests."""
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(1, fetches=False)
    assert decoder.read() == {}
    assert decoder.watch.judge_reading(None, decoder.sent, decoder.sent) is None
    decoder.serve(1, fetches=False)
    assert decoder.read() is None
    for _ in range(3):
        decoder.serve(1, fetches=False)
    assert decoder.read() == {1: COMPUTED}


def test_evidence_of_the_previous_prefiller_in_a_lane_is_dropped() -> None:
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(1, fetches=False)
    decoder.read()
    decoder.watch.forget_lane(1)
    decoder.serve(1, fetches=False)
    assert decoder.read() == {}


@pytest.mark.parametrize(
    ("bad", "blamed"),
    [
        ("", ("", "", "")),
        ("a1", ("", "", "a1")),
        ("a1 b1", ("1", "", "")),
        ("a1 a2", ("", "a", "")),
        ("a1 a2 b1", ("1", "a", "")),
        ("a1 b2", ("", "", "a1 b2")),
        ("a1 a2 b1 b2", ("12", "", "")),  # each decoder fetches nothing, which explains all
    ],
)
def test_instance_is_blamed_when_all_its_pairs_are_bad(bad: str, blamed: tuple[str, str, str]) -> None:
    decoders, prefillers, pairs = blamed
    assert find_culprits([(p, d) for p, d in bad.split()], "ab", "12") == Culprits(
        frozenset(decoders), frozenset(prefillers), frozenset((p, d) for p, d in pairs.split())
    )


def test_decoder_is_blamed_for_the_only_pair() -> None:
    assert find_culprits([("a", "1")], "a", "1").bad_decoders == {"1"}


# Expired leases


LEASE = 30.0


def watch(**before: int) -> ExpiryWatch:
    """Return a watch that has read these totals at second 0."""
    watch = ExpiryWatch()
    assert watch.judge_totals(0.0, totals(**before), (), LEASE) is None
    return watch


def totals(expired: int = 0, orphans: int = 0, **sent: int) -> ExpiryTotals:
    return ExpiryTotals(float(expired), orphans, sent)


@pytest.mark.parametrize(
    ("at", "read", "fetch_nothing", "found"),
    [
        (10.0, totals(d=9), "", None),  # leases of these may still expire
        (40.0, totals(expired=2, d=9), "", None),  # a few
        (40.0, totals(expired=3, d=9), "", (COMPUTED, 3)),
        (40.0, totals(expired=9, d=9), "", (COMPUTED, 9)),
        (40.0, totals(expired=3, d=90), "", None),
        (60.0, totals(expired=3, d=90), "", (TRANSFERRED, 3)),
        (60.0, totals(d=9), "", (TRANSFERRED, 0)),
        (60.0, totals(d=2), "", None),  # too few to say
        (59.0, totals(d=9), "", None),
        (40.0, totals(expired=9, orphans=9, d=9), "", None),  # this gateway knows of them
        (40.0, totals(expired=9, orphans=5, d=9), "", (COMPUTED, 4)),
        (40.0, totals(expired=9, d=9), "d", None),  # the decoder explains it
        (40.0, totals(expired=9, orphans=9, d=9, e=9), "d", None),  # and this gateway counts them as orphans
        (40.0, totals(expired=15, orphans=9, d=9, e=9), "d", (COMPUTED, 6)),
        (40.0, totals(expired=50, d=9), "", None),  # other clients use the prefiller
        (40.0, None, "", None),
    ],
)
def test_verdict_on_expired_leases(
    at: float, read: ExpiryTotals | None, fetch_nothing: str, found: tuple[HandoffVerdict, int] | None
) -> None:
    one = watch()
    assert one.judge_totals(0.0, totals(d=1), fetch_nothing, LEASE) is None
    assert one.judge_totals(at, read, fetch_nothing, LEASE) == found


def test_expired_leases_of_the_previous_window_count() -> None:
    first = watch()
    assert first.judge_totals(0.0, totals(d=1), (), LEASE) is None
    assert first.judge_totals(60.0, totals(d=5), (), LEASE) == (TRANSFERRED, 0)
    assert first.judge_totals(70.0, totals(expired=4, d=5), (), LEASE) == (COMPUTED, 4)


def test_time_without_handoffs_does_not_count_for_expiries() -> None:
    idle = watch()
    assert idle.judge_totals(600.0, totals(), (), LEASE) is None
    assert idle.judge_totals(900.0, totals(d=5), (), LEASE) is None
    assert idle.judge_totals(960.0, totals(d=5), (), LEASE) == (TRANSFERRED, 0)


def test_no_verdict_on_expiries_after_counters_were_reset() -> None:
    one = watch(expired=40, d=40)
    assert one.judge_totals(60.0, totals(expired=3, d=45), (), LEASE) is None
    assert one.judge_totals(61.0, totals(expired=3, d=50), (), LEASE) is None
    assert one.judge_totals(90.0, totals(expired=8, d=50), (), LEASE) == (COMPUTED, 5)
    assert one.judge_totals(91.0, totals(expired=9, d=20), (), LEASE) is None
