"""Verdicts on KV handoffs, from the counters of decoders and prefillers. Pure functions and their state.

Answers do not show whether a handoff worked: a decoder without a KV connector ignores the parameters, recomputes the
prompt and answers as well as any other. But engines count where the KV of their prompts came from. A verdict compares
the growth of these counters between two readings with the handoffs that were sent in between.

A false alarm is worse than a late one. So COMPUTED requires that there is no other explanation: several handoffs of
prompts that are long enough, counters that have grown, and not one token from another engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from proxy.balancer.shared.scoreboard import HandoffCount
from proxy.wire.exposition import PromptTokenTotals

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping


LEAST_HANDOFFS: Final = 3
"""Minimum number of handoffs for a verdict."""
# A decoder may compute less than the estimated prompt, and part of the prompt may be in its prefix cache.
LEAST_SHARE: Final = 0.25
# If the engine computed this many times more than the handoffs, other clients use it, and nothing follows.
_MAX_SHARE: Final = 4.0

MIN_TOKENS: Final = 32
"""Minimum length of a prompt that counts for a verdict."""
MIN_STORED_TOKENS: Final = 512
"""The same with a store between the engines. A store holds whole blocks: 16 to 128 tokens in vLLM and vLLM-Ascend, and
256 in LMCache."""


class HandoffVerdict(StrEnum):
    """The result of handoffs to a decoder."""

    TRANSFERRED = "transferred"
    COMPUTED = "computed"
    """The decoder computes the prompt again."""
    UNKNOWN = "unknown"


def judge_counters(
    counters_before: PromptTokenTotals,
    counters_after: PromptTokenTotals,
    handoffs_sent: HandoffCount,
    *,
    reads_from_store: bool,
    min_handoffs: int = LEAST_HANDOFFS,
) -> HandoffVerdict | None:
    """Return the verdict on the handoffs between two readings, or None if there were fewer than `min_handoffs`.

    Args:
        counters_before: Counters of the earlier reading.
        counters_after: Counters of the later reading.
        handoffs_sent: Handoffs between the two.
        reads_from_store: The engines share a store. A decoder does not read from the store what its own prefix cache
            has, so only many computed tokens per handoff show that the store had nothing.
        min_handoffs: Minimum number of handoffs for a verdict.
    """
    transferred, computed, cached = (new - old for new, old in zip(counters_after, counters_before, strict=True))
    if min(transferred, computed, cached) < 0:
        return HandoffVerdict.UNKNOWN  # the engine was restarted, or another one answered at the same address
    if transferred > 0:
        return HandoffVerdict.TRANSFERRED
    if handoffs_sent.handoff_count < min_handoffs:
        return None
    if reads_from_store:
        is_much = computed >= handoffs_sent.handoff_count * MIN_STORED_TOKENS
        is_ours = computed + cached <= _MAX_SHARE * handoffs_sent.handoff_tokens
        return HandoffVerdict.COMPUTED if is_much and is_ours else HandoffVerdict.UNKNOWN
    return (
        HandoffVerdict.COMPUTED
        if computed + cached >= LEAST_SHARE * handoffs_sent.handoff_tokens
        else HandoffVerdict.UNKNOWN
    )


@dataclass(slots=True)
class CounterWatch:
    """The last judged reading of one decoder's counters, and the handoffs sent until then."""

    reads_from_store: bool
    last_judged_reading: PromptTokenTotals | None = None
    sent_since_reading: HandoffCount = field(default_factory=HandoffCount)

    def judge_reading(
        self, reading: PromptTokenTotals | None, total_sent: HandoffCount
    ) -> tuple[HandoffVerdict, int] | None:
        """Return the verdict on the handoffs since the last judged reading and their number, or None.

        Args:
            reading: Counters of the decoder. None: it reports none.
            total_sent: All handoffs that were sent before the counters were requested.
        """
        count, tokens = (
            total_sent.handoff_count - self.sent_since_reading.handoff_count,
            total_sent.handoff_tokens - self.sent_since_reading.handoff_tokens,
        )
        if reading is None or self.last_judged_reading is None or count < 0:  # a worker died, and its counts are gone
            verdict: HandoffVerdict | None = HandoffVerdict.UNKNOWN
        else:
            verdict = judge_counters(
                self.last_judged_reading, reading, HandoffCount(count, tokens), reads_from_store=self.reads_from_store
            )
        if verdict is None:
            return None
        self.last_judged_reading, self.sent_since_reading = reading, total_sent
        return verdict, max(0, count)


class ExpiryTotals(NamedTuple):
    """Counts since the start of the prefiller, or of the workers."""

    expired_count: float
    """Leases that ended without a decoder, as the prefiller counts them."""
    orphan_count: int
    """KV caches on the prefiller that this gateway has given up."""
    sent_by_worker: Mapping[Any, int]
    """Handoffs by decoder."""


@dataclass(slots=True)
class ExpiryWatch:
    """The leases of one prefiller since the last verdict.

    vLLM's NixlConnector counts the requests whose KV it has freed because no decoder fetched it in time. pdproxy
    explains some of them: it has given up that KV, or the decoder is known to fetch nothing. The others are lost:
    decoders do not fetch their KV, or their notification does not reach the prefiller.
    """

    _totals_at_start: ExpiryTotals | None = None
    _started_at: float | None = None
    """Clock seconds of the first handoff in this window. None: there was none."""
    _sent_before_start: int = 0
    """Handoffs of the previous window, whose leases expire in this one."""

    def judge_totals(
        self,
        now: float,
        totals: ExpiryTotals | None,
        decoders_fetch_nothing: Collection[Hashable],
        lease_seconds: float,
    ) -> tuple[HandoffVerdict, int] | None:
        """Return whether decoders fetch KV from a prefiller, and the number of lost handoffs; None if it is too early.

        COMPUTED: decoders compute prompts again, because at least a quarter of the handoffs without another explanation
        have expired. TRANSFERRED: fewer have expired within two lease times.

        Args:
            now: Clock seconds.
            totals: Counts until now. None: the prefiller reports none.
            decoders_fetch_nothing: Decoders that are known not to fetch from this prefiller.
            lease_seconds: Time after which the prefiller frees KV that no decoder has fetched.
        """
        since = self._totals_at_start
        if totals is None or since is None:
            self._begin_period(totals, 0)
            return None
        expired, orphans = totals.expired_count - since.expired_count, totals.orphan_count - since.orphan_count
        sent = {
            decoder: count - since.sent_by_worker.get(decoder, 0) for decoder, count in totals.sent_by_worker.items()
        }
        if min(expired, orphans, *sent.values()) < 0:  # a restart, or a worker died and its counts are gone
            self._begin_period(totals, 0)
            return None
        explained = sum(count for decoder, count in sent.items() if decoder in decoders_fetch_nothing)
        doubtful = sum(sent.values()) - explained
        lost = round(expired) - max(orphans, explained)
        # More losses than handoffs are those of another gateway.
        if LEAST_HANDOFFS <= lost <= doubtful + self._sent_before_start and lost >= LEAST_SHARE * doubtful:
            self._begin_period(totals, doubtful)
            return HandoffVerdict.COMPUTED, lost
        if doubtful and self._started_at is None:
            self._started_at = now
        if doubtful < LEAST_HANDOFFS or self._started_at is None or now - self._started_at < 2 * lease_seconds:
            return None
        self._begin_period(totals, doubtful)
        return HandoffVerdict.TRANSFERRED, max(0, lost)

    def _begin_period(self, totals: ExpiryTotals | None, sent_before: int) -> None:
        self._totals_at_start, self._started_at, self._sent_before_start = totals, None, sent_before


Instance = TypeVar("Instance")

_NOTHING: Final = PromptTokenTotals(0.0, 0.0, 0.0)


def attribute_growth(
    counter_growth: PromptTokenTotals, handoffs_by_lane: Mapping[int, HandoffCount], involved_lanes: Collection[int]
) -> dict[int, PromptTokenTotals]:
    """Return the part of a decoder's growth that each lane's handoffs explain, without the lanes that are in doubt.

    A lane is a prefiller's column of the scoreboard. A decoder counts for all prefillers together. The growth can be
    attributed in three cases: all handoffs came from one prefiller, nothing was fetched at all, or the decoder computed
    so little that the prompts of the lane cannot be among it.

    Args:
        counter_growth: Growth of the counters between two readings.
        handoffs_by_lane: Handoffs by lane that the growth includes for certain.
        involved_lanes: Lanes whose handoffs the growth may include.
    """
    if len(involved_lanes) == 1:
        return dict.fromkeys(handoffs_by_lane, counter_growth)
    if not counter_growth.transferred:
        tokens = sum(handoffs.handoff_tokens for handoffs in handoffs_by_lane.values())
        return {
            lane: PromptTokenTotals(0.0, *(part * handoffs.handoff_tokens / tokens for part in counter_growth[1:]))
            for lane, handoffs in handoffs_by_lane.items()
        }
    not_fetched = counter_growth.computed + counter_growth.cached
    return {
        lane: PromptTokenTotals(float(handoffs.handoff_tokens), 0.0, 0.0)
        for lane, handoffs in handoffs_by_lane.items()
        if handoffs.handoff_count >= LEAST_HANDOFFS and not_fetched < LEAST_SHARE * handoffs.handoff_tokens
    }


@dataclass(slots=True)
class _PairEvidence:
    """Growth and handoffs of one pair that are not judged yet."""

    counter_growth: PromptTokenTotals = _NOTHING
    handoff_count: HandoffCount = field(default_factory=HandoffCount)


@dataclass(slots=True)
class PairWatch:
    """Collects what one decoder's counters show about its pairs, until it suffices for a verdict on each.

    A prefiller whose handoffs alternate with those of another one is found as well, because evidence is collected over
    many readings. A pair stays unknown if every interval has mixed handoffs of which some are fetched and some are not.
    """

    reads_from_store: bool
    _last_reading: PromptTokenTotals | None = None
    _sent_by_lane: Mapping[int, HandoffCount] = field(default_factory=dict)
    _evidence_by_lane: dict[int, _PairEvidence] = field(default_factory=dict)

    def judge_reading(
        self, reading: PromptTokenTotals | None, before: Mapping[int, HandoffCount], after: Mapping[int, HandoffCount]
    ) -> dict[int, HandoffVerdict] | None:
        """Return the verdicts by lane that a reading completes, or None if all earlier evidence is invalid.

        Args:
            reading: Counters of the decoder. None: it reports none.
            before: Handoffs by lane when the counters were requested.
            after: Handoffs by lane when they arrived. The reading may include those in between or not.
        """
        last, self._last_reading = self._last_reading, reading
        sent, involved = (
            _handoff_growth_by_lane(self._sent_by_lane, before),
            _handoff_growth_by_lane(self._sent_by_lane, after),
        )
        self._sent_by_lane = before
        grown = (
            None
            if reading is None or last is None
            else PromptTokenTotals(*(b - a for a, b in zip(last, reading, strict=True)))
        )
        if grown is None or min(grown) < 0 or any(handoffs.handoff_count < 0 for handoffs in sent.values()):
            self._evidence_by_lane.clear()  # a restart, or a worker died and its counts are gone
            return None
        verdicts = dict[int, HandoffVerdict]()
        for lane, part in attribute_growth(grown, sent, involved).items():
            evidence = self._evidence_by_lane.setdefault(lane, _PairEvidence())
            evidence.counter_growth = PromptTokenTotals(
                *(a + b for a, b in zip(evidence.counter_growth, part, strict=True))
            )
            evidence.handoff_count = HandoffCount(
                evidence.handoff_count.handoff_count + sent[lane].handoff_count,
                evidence.handoff_count.handoff_tokens + sent[lane].handoff_tokens,
            )
            verdict = judge_counters(
                _NOTHING, evidence.counter_growth, evidence.handoff_count, reads_from_store=self.reads_from_store
            )
            if verdict is not None:
                del self._evidence_by_lane[lane]
                if verdict is not HandoffVerdict.UNKNOWN:
                    verdicts[lane] = verdict
        return verdicts

    def forget_lane(self, lane: int) -> None:
        """Drop the evidence of a lane: its slot belongs to another prefiller now, or the prefiller was restarted."""
        self._evidence_by_lane.pop(lane, None)


def _handoff_growth_by_lane(
    before: Mapping[int, HandoffCount], after: Mapping[int, HandoffCount]
) -> dict[int, HandoffCount]:
    """Return the lanes that have changed, with the difference."""
    growth = {}
    for lane, handoffs in after.items():
        old = before.get(lane, HandoffCount())
        if handoffs != old:
            growth[lane] = HandoffCount(
                handoffs.handoff_count - old.handoff_count, handoffs.handoff_tokens - old.handoff_tokens
            )
    for lane in before.keys() - after.keys():
        growth[lane] = HandoffCount(-before[lane].handoff_count, -before[lane].handoff_tokens)
    return growth


@dataclass(frozen=True, slots=True)
class Culprits(Generic[Instance]):
    """Instances and pairs that do not transfer KV. Each bad pair is explained once."""

    bad_decoders: frozenset[Instance]
    """Decoders that fetch from no prefiller."""
    bad_prefillers: frozenset[Instance]
    """Prefillers from which no decoder fetches, although some decoders fetch from others."""
    bad_pairs: frozenset[tuple[Instance, Instance]]
    """Other bad pairs, as (prefiller, decoder)."""


def find_culprits(
    bad_pairs: Collection[tuple[Instance, Instance]], prefillers: Collection[Instance], decoders: Collection[Instance]
) -> Culprits[Instance]:
    """Blame an instance if all its pairs with available partners are bad, and otherwise the pairs."""
    pairs = frozenset(bad_pairs)
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
