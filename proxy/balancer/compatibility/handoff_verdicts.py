"""Whether decoders fetch the KV that is handed over to them, judged by the counters of both sides. Pure.

No answer tells: a decoder without a KV connector takes the parameters, computes the prompt once more and answers as
well as any. But engines count where their prompts' KV came from. Between two readings of these counters hand-overs were
sent; what the counters grew by says whether they were of any use.

A false alarm is worse than silence, so a decoder computes only when there is no other explanation: several hand-overs,
each of a prompt that is worth one, and not a single token came from elsewhere, while the counters did move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from proxy.balancer.shared.scoreboard import HandoffCount
from proxy.wire.exposition import PromptTokens

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping


LEAST_HANDOVERS: Final = 3
# What a decoder had to compute of a prompt may be less than was estimated, and part of it was in its prefix cache.
LEAST_SHARE: Final = 0.25
# Where this much more was computed than was handed over, others ask the engine, too, and who computed is not known.
_MOST_SHARE: Final = 4.0

MIN_TOKENS: Final = 32
"""A prompt that is shorter says nothing."""
MIN_STORED_TOKENS: Final = 512
"""Likewise where a store is between the engines. It holds whole blocks: of 16 to 128 tokens in vLLM and vLLM-Ascend,
256 in LMCache."""


class HandoffVerdict(StrEnum):
    """What becomes of KV that is handed over to a decoder."""

    TRANSFERRED = "transferred"
    COMPUTED = "computed"
    """The decoder computes the prompt once more."""
    UNKNOWN = "unknown"


def judge(
    before: PromptTokens, after: PromptTokens, sent: HandoffCount, *, from_store: bool, least: int = LEAST_HANDOVERS
) -> HandoffVerdict | None:
    """The verdict on the hand-overs between two readings. None: there were less than `least`, too few to say as yet.

    `from_store`: what the decoder has in its own prefix cache it does not look for in the store, so that only much
    computed per hand-over says that it found nothing there.
    """
    transferred, computed, cached = (new - old for new, old in zip(after, before, strict=True))
    if min(transferred, computed, cached) < 0:
        return HandoffVerdict.UNKNOWN  # the engine has started anew, or another one behind the same address was asked
    if transferred > 0:
        return HandoffVerdict.TRANSFERRED
    if sent.count < least:
        return None
    if from_store:
        is_much = computed >= sent.count * MIN_STORED_TOKENS
        is_ours = computed + cached <= _MOST_SHARE * sent.tokens
        return HandoffVerdict.COMPUTED if is_much and is_ours else HandoffVerdict.UNKNOWN
    return HandoffVerdict.COMPUTED if computed + cached >= LEAST_SHARE * sent.tokens else HandoffVerdict.UNKNOWN


@dataclass(slots=True)
class CounterWatch:
    """What is known of one decoder's counters: the last reading that was judged, and what had been sent by then."""

    from_store: bool
    told: PromptTokens | None = None
    sent: HandoffCount = field(default_factory=HandoffCount)

    def read(self, told: PromptTokens | None, sent: HandoffCount) -> tuple[HandoffVerdict, int] | None:
        """Take a reading, None if the engine tells nothing; `sent` were the hand-overs before it was asked for.

        The verdict on the hand-overs since the last one, and how many these are. None: it is too early to say.
        """
        count, tokens = sent.count - self.sent.count, sent.tokens - self.sent.tokens
        if told is None or self.told is None or count < 0:  # a worker died, and its part is gone
            found: HandoffVerdict | None = HandoffVerdict.UNKNOWN
        else:
            found = judge(self.told, told, HandoffCount(count, tokens), from_store=self.from_store)
        if found is None:
            return None
        self.told, self.sent = told, sent
        return found, max(0, count)


class Totals(NamedTuple):
    """Counts since the prefiller or the workers started."""

    expired: float
    """Leases that ended without a decoder, as the prefiller counts them."""
    orphans: int
    """KV caches on it that this gateway has given up."""
    sent: Mapping[Any, int]
    """Hand-overs, by decoder."""


@dataclass(slots=True)
class ExpiryWatch:
    """What is known of one prefiller's leases since the last verdict.

    vLLM's NixlConnector counts the requests whose KV it has freed because no decoder fetched it in time. This gateway
    can explain some of that: it has given KV up itself, and some decoders are known to fetch nothing. What remains was
    handed over and lost: decoders do not come for it, or their notice does not reach the prefiller.
    """

    _since: Totals | None = None
    _started: float | None = None
    """When the first hand-over was seen; None: there was none."""
    _sent_before: int = 0
    """Hand-overs in the window before this one, whose leases expire in this one."""

    def read(
        self, now: float, totals: Totals | None, fetch_nothing: Collection[Hashable], lease_seconds: float
    ) -> tuple[HandoffVerdict, int] | None:
        """Take a reading at `now`, in seconds; None if the engine tells nothing. `fetch_nothing`: decoders that are
        known not to fetch from this prefiller.

        COMPUTED, as soon as a good part of what was handed over was lost, with how many; TRANSFERRED, when two leases
        long less than that was. None: it is too early to say.
        """
        since = self._since
        if totals is None or since is None:
            self._begin(totals, 0)
            return None
        expired, orphans = totals.expired - since.expired, totals.orphans - since.orphans
        sent = {decoder: count - since.sent.get(decoder, 0) for decoder, count in totals.sent.items()}
        if min(expired, orphans, *sent.values()) < 0:  # it has started anew, or a worker died and its part is gone
            self._begin(totals, 0)
            return None
        explained = sum(count for decoder, count in sent.items() if decoder in fetch_nothing)
        doubtful = sum(sent.values()) - explained
        lost = round(expired) - max(orphans, explained)
        # More than was sent is what others have lost.
        if LEAST_HANDOVERS <= lost <= doubtful + self._sent_before and lost >= LEAST_SHARE * doubtful:
            self._begin(totals, doubtful)
            return HandoffVerdict.COMPUTED, lost
        if doubtful and self._started is None:
            self._started = now
        if doubtful < LEAST_HANDOVERS or self._started is None or now - self._started < 2 * lease_seconds:
            return None
        self._begin(totals, doubtful)
        return HandoffVerdict.TRANSFERRED, max(0, lost)

    def _begin(self, totals: Totals | None, sent_before: int) -> None:
        self._since, self._started, self._sent_before = totals, None, sent_before


Instance = TypeVar("Instance")

_NOTHING: Final = PromptTokens(0.0, 0.0, 0.0)


def attribute(
    grown: PromptTokens, sent: Mapping[int, HandoffCount], involved: Collection[int]
) -> dict[int, PromptTokens]:
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
    sent: HandoffCount = field(default_factory=HandoffCount)


@dataclass(slots=True)
class PairWatch:
    """What one decoder's counters have told of its pairs since the last verdict on each."""

    from_store: bool
    _told: PromptTokens | None = None
    _sent: Mapping[int, HandoffCount] = field(default_factory=dict)
    _evidence: dict[int, _Evidence] = field(default_factory=dict)

    def read(
        self, told: PromptTokens | None, before: Mapping[int, HandoffCount], after: Mapping[int, HandoffCount]
    ) -> dict[int, HandoffVerdict] | None:
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
        found = dict[int, HandoffVerdict]()
        for lane, part in attribute(grown, sent, involved).items():
            known = self._evidence.setdefault(lane, _Evidence())
            known.grown = PromptTokens(*(a + b for a, b in zip(known.grown, part, strict=True)))
            known.sent = HandoffCount(known.sent.count + sent[lane].count, known.sent.tokens + sent[lane].tokens)
            verdict = judge(_NOTHING, known.grown, known.sent, from_store=self.from_store)
            if verdict is not None:
                del self._evidence[lane]
                if verdict is not HandoffVerdict.UNKNOWN:
                    found[lane] = verdict
        return found

    def forget(self, lane: int) -> None:
        """Drop the evidence of a lane: its slot belongs to another prefiller now, or the prefiller was restarted."""
        self._evidence.pop(lane, None)


def _growth(before: Mapping[int, HandoffCount], after: Mapping[int, HandoffCount]) -> dict[int, HandoffCount]:
    """The lanes that have changed, and by how much."""
    growth = {}
    for lane, handovers in after.items():
        old = before.get(lane, HandoffCount())
        if handovers != old:
            growth[lane] = HandoffCount(handovers.count - old.count, handovers.tokens - old.tokens)
    for lane in before.keys() - after.keys():
        growth[lane] = HandoffCount(-before[lane].count, -before[lane].tokens)
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
