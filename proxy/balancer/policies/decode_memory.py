"""Lengths of answers, and the KV memory that the answers of each decoder will need together at most.

An answer holds most KV at its end, but answers do not end at the same time. So the sum of their final sizes is too much
for a decoder that begins answers one by one, and their present size is too little for one that began them together. The
peak is the largest sum in the future if each answer grows by one token per step and ends at its likely length.

A mean of the answers that have ended misses long answers, because these end late. So the lengths that running answers
have reached count, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from proxy.balancer.pick import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.balancer.pick import PickRequest

# Mean lengths of answers are learned over about this number of answers.
_LENGTHS: Final = 20
# Minimum number of answers for the use of a mean length.
_ENOUGH_LENGTHS: Final = 8
# Number of ended answers that running answers are compared with.
_LONG_MEMORY: Final = 1000
# An answer that is longer than the likely length will probably be longer by this factor.
_LONGER: Final = 1.25
# Discount of a peak that is still to come, as a multiple of the growth until then. Without a discount, requests would
# wait minutes for memory that others need much later. Without the peak, decoders would preempt answers with long
# prompts and compute these again.
_DISCOUNT: Final = 2.5
# Bounds of the peak, relative to the charges of the answers.
_MIN_SHARE: Final = 0.25
_MAX_SHARE: Final = 16.0
_HELD_STEP: Final = 0.05

_remaining = itemgetter(0)


@dataclass(slots=True)
class Lengths:
    """Learned lengths of answers whose requests have similar limits."""

    mean: float = 0.0
    """Mean of the last answers."""
    number: int = 0
    long_mean: float = 0.0
    """Mean of many answers."""
    long_number: int = 0
    reached: float = 0.0
    """Lower bound of the mean, from running answers as well; 0.0: none is known."""
    running: int = 0
    written: float = 0.0
    """Number and tokens of running answers, while they are being counted."""


class HeldKv(Tracker):
    """KV of one answer on its decoder, from its lease to its end. Its `kv` is the charge in tokens."""

    __slots__ = ("began", "holder", "lengths", "limit", "prompt_tokens")

    prompt_tokens: int
    limit: int
    """Maximum length of the answer, or the estimate that replaces it. 0: nothing is known of the request."""
    began: float
    """Reading of the decoder's token count at the first token. Negative: the answer has not begun."""
    holder: DecoderKv
    lengths: Lengths
    """Lengths of answers with similar limits."""


@dataclass(frozen=True, slots=True)
class Fill:
    """KV of all answers of a decoder, relative to the sum of their charges."""

    needed: float
    """Their peak, with a discount for growth. Prompts that prefillers still compute count as well."""
    prompts: float
    """The KV of their prompts."""


@dataclass(slots=True, eq=False)
class DecoderKv:
    """The KV memory that the answers of one decoder take."""

    answers: dict[HeldKv, None] = field(default_factory=dict)
    tokens: float = 0.0
    """Tokens that an answer would have got that is written since the start. The owner counts them."""


class DecodeMemory:
    """KV memory of the decoders of one role, as one worker knows it."""

    def __init__(self) -> None:
        self._lengths: dict[int, Lengths] = {}  # by the bit length of the limit
        self._held = 0.0  # KV tokens of one answer, over the last ones
        self.decoders: dict[str, DecoderKv] = {}
        """Decoders with their answers, by name."""

    @property
    def mean_charge(self) -> float:
        """The mean KV memory charged for the last answers, in tokens."""
        return self._held

    def likely_tokens(self, request: PickRequest | None) -> float:
        """Return the probable length of an answer. None: the longest of all mean lengths."""
        if request is None:
            return max([lengths.mean for lengths in self._lengths.values()], default=0.0)
        return self._likely(request.output_tokens)

    def charge(self, request: PickRequest) -> int:
        """Return the KV that the answer to a request will probably hold at its end, in tokens."""
        limit = request.output_tokens
        return request.decode.kv_tokens + int(self._likely(limit)) - limit

    def lease(self, held: HeldKv, decoder: str, request: PickRequest) -> None:
        """Charge a decoder with an answer that is leased now, until `leave`."""
        # Each request passes here, so what other methods do is repeated, which saves their calls.
        subject = request.subject
        held.limit = limit = 0 if subject is None else subject.output_tokens
        held.compute, kv = request.decode
        held.prompt_tokens = max(0, kv - limit)
        held.began = -1.0
        place = limit.bit_length()
        lengths = self._lengths.get(place)
        if lengths is None:
            lengths = self._lengths[place] = Lengths()
        held.lengths = lengths
        likely = lengths.mean if lengths.number >= _ENOUGH_LENGTHS else limit
        kv += int(max(likely, lengths.reached)) - limit
        held.kv = kv
        self._held += _HELD_STEP * (kv - self._held) if self._held else kv
        holder = self.decoders.get(decoder)
        if holder is None:
            holder = self.decoders[decoder] = DecoderKv()
        held.holder = holder
        holder.answers[held] = None

    def leave(self, held: HeldKv, answer_tokens: int | None) -> None:
        """Note the end of an answer. `answer_tokens` None: it is not complete, or its length is unknown."""
        del held.holder.answers[held]
        if not answer_tokens or not held.limit:
            return
        lengths = held.lengths
        if lengths.number < _LENGTHS:
            lengths.number += 1
        if lengths.long_number < _LONG_MEMORY:
            lengths.long_number += 1
        lengths.mean += (answer_tokens - lengths.mean) / lengths.number
        lengths.long_mean += (answer_tokens - lengths.long_mean) / lengths.long_number

    def look(self, decoders: Iterable[str]) -> dict[str, Fill]:
        """Return what the answers of these decoders hold and will hold."""
        counted = self._lengths.values()
        for lengths in counted:
            lengths.running, lengths.written = 0, 0.0
        for decoder in self.decoders.values():
            for held in decoder.answers:
                if held.began >= 0.0 and held.limit:
                    lengths = held.lengths
                    lengths.running += 1
                    lengths.written += decoder.tokens - held.began
        for lengths in counted:
            number = lengths.long_number + lengths.running
            all_tokens = lengths.long_number * lengths.long_mean + lengths.written
            lengths.reached = all_tokens / number if number >= _ENOUGH_LENGTHS else 0.0
        return {name: self._fill(self.decoders[name]) for name in decoders if name in self.decoders}

    def forget(self, decoder: str) -> None:
        """Drop a decoder that has left, if it has no answers."""
        known = self.decoders.get(decoder)
        if known is not None and not known.answers:
            del self.decoders[decoder]

    def _likely(self, limit: int) -> float:
        lengths = self._lengths.get(limit.bit_length())
        if lengths is None:
            return limit
        likely = lengths.mean if lengths.number >= _ENOUGH_LENGTHS else float(limit)
        return max(likely, lengths.reached)

    def _fill(self, decoder: DecoderKv) -> Fill:
        rest: list[tuple[float, float]] = []  # tokens until the end of each answer, and tokens that it holds now
        charged = prompts = 0
        for held in decoder.answers:
            written = decoder.tokens - held.began if held.began >= 0.0 else 0.0
            final = max(self._likely(held.limit), _LONGER * written)
            rest.append((final - written, held.prompt_tokens + written))
            charged += held.kv
            prompts += held.prompt_tokens
        if not charged:
            return Fill(1.0, 1.0)
        rest.sort(key=_remaining, reverse=True)
        peak = total = 0.0
        for number, (left, now) in enumerate(rest, 1):
            total += now
            peak = max(peak, total + number * left)
        needed = peak / (1 + _DISCOUNT * (1 - total / peak))
        return Fill(_bounded(needed / charged), _bounded(prompts / charged))


def _bounded(share: float) -> float:
    return max(_MIN_SHARE, min(_MAX_SHARE, share))
