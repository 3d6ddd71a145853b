"""Whose KV a decoder's counters speak of: what can be said of each pair of a prefiller and a decoder. Pure.

A decoder counts for all prefillers together. Between two readings something follows for a pair only where there is no
doubt: all hand-overs came from one prefiller, nothing was fetched at all, or the decoder computed so little that the
prompts of this prefiller cannot be among it. What follows is collected over the readings until it is enough to judge,
so that a prefiller whose hand-overs alternate with another's is found as well. Under traffic in which every interval is
mixed, and some is fetched and some is not, a pair stays unknown.

Prefillers are told apart by their lanes in the scoreboard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from proxy.balancer.fitness.handovers import LEAST_HANDOVERS, LEAST_SHARE, Verdict, judge
from proxy.balancer.shared.scoreboard import Handovers
from proxy.wire.exposition import PromptTokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Instance = TypeVar("Instance")

_NOTHING: Final = PromptTokens(0.0, 0.0, 0.0)


def attribute(grown: PromptTokens, sent: Mapping[int, Handovers], involved: Collection[int]) -> dict[int, PromptTokens]:
    """What of a decoder's growth each lane's hand-overs account for; nothing for lanes of which it cannot be said.

    `sent`: the hand-overs that the growth has in it for certain. `involved`: the lanes of those that it may have in it.
    """
    if len(involved) == 1:
        return dict.fromkeys(sent, grown)
    if not grown.transferred:
        tokens = sum(handovers.tokens for handovers in sent.values())
        return {
            lane: PromptTokens(0.0, *(part * handovers.tokens / tokens for part in grown[1:]))
            for lane, handovers in sent.items()
        }
    not_fetched = grown.computed + grown.cached
    return {
        lane: PromptTokens(float(handovers.tokens), 0.0, 0.0)
        for lane, handovers in sent.items()
        if handovers.count >= LEAST_HANDOVERS and not_fetched < LEAST_SHARE * handovers.tokens
    }


@dataclass(slots=True)
class _Evidence:
    """What is known of one pair and has not been judged."""

    grown: PromptTokens = _NOTHING
    sent: Handovers = field(default_factory=Handovers)


@dataclass(slots=True)
class PairWatch:
    """What one decoder's counters have told of its pairs since the last verdict on each."""

    from_store: bool
    _told: PromptTokens | None = None
    _sent: Mapping[int, Handovers] = field(default_factory=dict)
    _evidence: dict[int, _Evidence] = field(default_factory=dict)

    def read(
        self, told: PromptTokens | None, before: Mapping[int, Handovers], after: Mapping[int, Handovers]
    ) -> dict[int, Verdict] | None:
        """Take a reading, None if the engine tells nothing. `before` and `after`: the hand-overs by lane when it was
        asked and when it had answered; what is in between it may have counted or not.

        The verdicts that this has led to. None: what was known before does not count any more.
        """
        last, self._told = self._told, told
        sent, involved = _growth(self._sent, before), _growth(self._sent, after)
        self._sent = before
        grown = (
            None if told is None or last is None else PromptTokens(*(b - a for a, b in zip(last, told, strict=True)))
        )
        if grown is None or min(grown) < 0 or any(handovers.count < 0 for handovers in sent.values()):
            self._evidence.clear()  # the engine has started anew, or a worker died and its part is gone
            return None
        found = dict[int, Verdict]()
        for lane, part in attribute(grown, sent, involved).items():
            known = self._evidence.setdefault(lane, _Evidence())
            known.grown = PromptTokens(*(a + b for a, b in zip(known.grown, part, strict=True)))
            known.sent = Handovers(known.sent.count + sent[lane].count, known.sent.tokens + sent[lane].tokens)
            verdict = judge(_NOTHING, known.grown, known.sent, from_store=self.from_store)
            if verdict is not None:
                del self._evidence[lane]
                if verdict is not Verdict.UNKNOWN:
                    found[lane] = verdict
        return found

    def forget(self, lane: int) -> None:
        """Drop the evidence of a lane: its slot belongs to another prefiller now, or the prefiller was restarted."""
        self._evidence.pop(lane, None)


def _growth(before: Mapping[int, Handovers], after: Mapping[int, Handovers]) -> dict[int, Handovers]:
    """The lanes that have changed, and by how much."""
    growth = {}
    for lane, handovers in after.items():
        old = before.get(lane, Handovers())
        if handovers != old:
            growth[lane] = Handovers(handovers.count - old.count, handovers.tokens - old.tokens)
    for lane in before.keys() - after.keys():
        growth[lane] = Handovers(-before[lane].count, -before[lane].tokens)
    return growth


@dataclass(frozen=True, slots=True)
class Culprits(Generic[Instance]):
    """The instances and pairs to blame where no KV is fetched; each bad pair is explained once."""

    decoders: frozenset[Instance]
    """Decoders that fetch from no prefiller."""
    prefillers: frozenset[Instance]
    """No decoder fetches from them, though not all of these fetch nothing anyway."""
    pairs: frozenset[tuple[Instance, Instance]]
    """The other ones: prefiller, decoder."""


def culprits(
    bad: Collection[tuple[Instance, Instance]], prefillers: Collection[Instance], decoders: Collection[Instance]
) -> Culprits[Instance]:
    """Blame an instance where all its pairs, with the partners that are up, are among the bad ones."""
    pairs = frozenset(bad)
    bad_decoders = frozenset(
        decoder for decoder in decoders if prefillers and all((prefiller, decoder) in pairs for prefiller in prefillers)
    )
    bad_prefillers = frozenset(
        prefiller
        for prefiller in prefillers
        if not bad_decoders.issuperset(decoders) and all((prefiller, decoder) in pairs for decoder in decoders)
    )
    return Culprits(
        bad_decoders,
        bad_prefillers,
        frozenset(pair for pair in pairs if pair[0] not in bad_prefillers and pair[1] not in bad_decoders),
    )
