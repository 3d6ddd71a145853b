"""What is said of pairs: only what follows, and who is blamed for it."""

from __future__ import annotations

import pytest

from proxy.balancer.handoff_verdicts import Culprits, HandoffVerdict, PairWatch, attribute, culprits
from proxy.balancer.shared.scoreboard import HandoffCount
from proxy.wire.exposition import PromptTokens

ZERO = PromptTokens(0.0, 0.0, 0.0)
SENT = {0: HandoffCount(3, 300), 1: HandoffCount(3, 300)}


@pytest.mark.parametrize(
    ("grown", "sent", "involved", "attributed"),
    [
        (PromptTokens(0, 300, 0), {1: HandoffCount(3, 300)}, {1}, {1: PromptTokens(0, 300, 0)}),
        (PromptTokens(200, 9, 90), {1: HandoffCount(3, 300)}, {1}, {1: PromptTokens(200, 9, 90)}),
        (PromptTokens(100, 300, 0), {1: HandoffCount(3, 300)}, {0, 1}, {}),  # the other's may have been counted already
        (PromptTokens(0, 600, 60), SENT, {0, 1}, {0: PromptTokens(0, 300, 30), 1: PromptTokens(0, 300, 30)}),
        (PromptTokens(590, 10, 0), SENT, {0, 1}, {0: PromptTokens(300, 0, 0), 1: PromptTokens(300, 0, 0)}),
        (PromptTokens(300, 300, 0), SENT, {0, 1}, {}),
        (PromptTokens(300, 0, 300), SENT, {0, 1}, {}),  # whose prompts did it have itself?
        (
            PromptTokens(900, 30, 0),
            {0: HandoffCount(9, 900), 1: HandoffCount(1, 30)},
            {0, 1},
            {0: PromptTokens(900, 0, 0)},
        ),
    ],
)
def test_growth_is_attributed_to_lanes_only_without_doubt(
    grown: PromptTokens, sent: dict[int, HandoffCount], involved: set[int], attributed: dict[int, PromptTokens]
) -> None:
    assert attribute(grown, sent, involved) == attributed


class Decoder:
    """One that fetches from lane 0 and computes the prompts of lane 1, unless it is told otherwise."""

    def __init__(self) -> None:
        self.watch = PairWatch(from_store=False)
        self.told = ZERO
        self.sent = dict[int, HandoffCount]()
        assert self.read() is None

    def serve(self, lane: int, *, fetches: bool) -> None:
        old = self.sent.get(lane, HandoffCount())
        self.sent[lane] = HandoffCount(old.count + 1, old.tokens + 100)
        grown = (100, 0, 0) if fetches else (0, 100, 0)
        self.told = PromptTokens(*(a + b for a, b in zip(self.told, grown, strict=True)))

    def read(self) -> dict[int, HandoffVerdict] | None:
        return self.watch.read(self.told, dict(self.sent), dict(self.sent))


def test_bad_pair_is_found_when_its_handoffs_alternate_with_another_pair() -> None:
    decoder, found = Decoder(), dict[int, HandoffVerdict]()
    for _ in range(3):
        assert 1 not in found
        decoder.serve(0, fetches=True)
        found |= decoder.read() or {}
        decoder.serve(1, fetches=False)
        found |= decoder.read() or {}
    assert found == {0: HandoffVerdict.TRANSFERRED, 1: HandoffVerdict.COMPUTED}


def test_no_verdict_on_pairs_whose_handoffs_are_always_mixed() -> None:
    decoder = Decoder()
    for _ in range(9):
        for _ in range(3):
            decoder.serve(0, fetches=True)
            decoder.serve(1, fetches=False)
        assert decoder.read() == {}


def test_verdict_on_all_pairs_of_a_decoder_changes_in_one_reading() -> None:
    decoder = Decoder()
    for fetches, verdict in ((False, HandoffVerdict.COMPUTED), (True, HandoffVerdict.TRANSFERRED)):
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
    assert decoder.read() == {1: HandoffVerdict.COMPUTED}


def test_evidence_is_dropped_when_a_dead_workers_counts_are_lost() -> None:
    """Its part of one pair's hand-overs is gone, while others go on."""
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(0, fetches=True)
        decoder.serve(1, fetches=False)
        decoder.read()
    decoder.serve(0, fetches=True)
    decoder.sent[1] = HandoffCount(1, 100)
    assert decoder.read() is None


def test_evidence_is_dropped_when_an_engine_reports_no_counters() -> None:
    """As while it starts: nobody knows what it has counted meanwhile."""
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(1, fetches=False)
    assert decoder.read() == {}
    assert decoder.watch.read(None, decoder.sent, decoder.sent) is None
    decoder.serve(1, fetches=False)
    assert decoder.read() is None
    for _ in range(3):
        decoder.serve(1, fetches=False)
    assert decoder.read() == {1: HandoffVerdict.COMPUTED}


def test_evidence_of_the_previous_prefiller_in_a_lane_is_dropped() -> None:
    decoder = Decoder()
    for _ in range(2):
        decoder.serve(1, fetches=False)
    decoder.read()
    decoder.watch.forget(1)
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
    assert culprits([(p, d) for p, d in bad.split()], "ab", "12") == Culprits(
        frozenset(decoders), frozenset(prefillers), frozenset((p, d) for p, d in pairs.split())
    )


def test_decoder_is_blamed_for_the_only_pair() -> None:
    assert culprits([("a", "1")], "a", "1").decoders == {"1"}
