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

from proxy.balancer.pick import LeaseTracker

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
class AnswerLengths:
    """Learned lengths of answers whose requests have similar limits."""

    mean_length: float = 0.0
    """Mean of the last answers."""
    answer_count: int = 0
    long_mean_length: float = 0.0
    """Mean of many answers."""
    long_answer_count: int = 0
    reached_length_sum: float = 0.0
    """Lower bound of the mean, from running answers as well; 0.0: none is known."""
    running_count: int = 0
    written_token_sum: float = 0.0
    """Number and tokens of running answers, while they are being counted."""


class HeldKv(LeaseTracker):
    """KV of one answer on its decoder, from its lease to its end. Its `kv` is the charge in tokens."""

    prompt_tokens: int
    max_answer_tokens: int
    """Maximum length of the answer, or the estimate that replaces it. 0: nothing is known of the request."""
    began: float
    """Reading of the decoder's token count at the first token. Negative: the answer has not begun."""
    decoder_kv: DecoderKv
    length_statistics: AnswerLengths
    """Lengths of answers with similar limits."""


@dataclass(frozen=True, slots=True)
class KvFill:
    """KV of all answers of a decoder, relative to the sum of their charges."""

    needed_share: float
    """Their peak, with a discount for growth. Prompts that prefillers still compute count as well."""
    prompts_share: float
    """The KV of their prompts."""


@dataclass(slots=True, eq=False)
class DecoderKv:
    """The KV memory that the answers of one decoder take."""

    held_answers: dict[HeldKv, None] = field(default_factory=dict)
    charged_tokens: float = 0.0
    """Tokens that an answer would have got that is written since the start. The owner counts them."""


class DecodeMemory:
    """KV memory of the decoders of one role, as one worker knows it."""

    def __init__(self) -> None:
        self._lengths_by_limit: dict[int, AnswerLengths] = {}  # by the bit length of the limit
        self._mean_held_tokens = 0.0  # KV tokens of one answer, over the last ones
        self.kv_by_decoder: dict[str, DecoderKv] = {}
        """Decoders with their answers, by name."""

    @property
    def mean_charged_tokens(self) -> float:
        """The mean KV memory charged for the last answers, in tokens."""
        return self._mean_held_tokens

    def likely_answer_tokens(self, request: PickRequest | None) -> float:
        """Return the probable length of an answer. None: the longest of all mean lengths."""
        if request is None:
            return max([lengths.mean_length for lengths in self._lengths_by_limit.values()], default=0.0)
        return self._likely_tokens_for(request.output_tokens)

    def predict_kv_tokens(self, request: PickRequest) -> int:
        """Return the KV that the answer to a request will probably hold at its end, in tokens."""
        limit = request.output_tokens
        return request.decode_load.kv_tokens + int(self._likely_tokens_for(limit)) - limit

    def add_answer(self, held: HeldKv, decoder: str, request: PickRequest) -> None:
        """Charge a decoder with an answer that is leased now, until `remove_answer`."""
        # Each request passes here, so what other methods do is repeated, which saves their calls.
        subject = request.request_subject
        held.max_answer_tokens = limit = 0 if subject is None else subject.output_tokens
        held.compute_charge, kv = request.decode_load
        held.prompt_tokens = max(0, kv - limit)
        held.began = -1.0
        place = limit.bit_length()
        lengths = self._lengths_by_limit.get(place)
        if lengths is None:
            lengths = self._lengths_by_limit[place] = AnswerLengths()
        held.length_statistics = lengths
        likely = lengths.mean_length if lengths.answer_count >= _ENOUGH_LENGTHS else limit
        kv += int(max(likely, lengths.reached_length_sum)) - limit
        held.kv_charge = kv
        self._mean_held_tokens += _HELD_STEP * (kv - self._mean_held_tokens) if self._mean_held_tokens else kv
        holder = self.kv_by_decoder.get(decoder)
        if holder is None:
            holder = self.kv_by_decoder[decoder] = DecoderKv()
        held.decoder_kv = holder
        holder.held_answers[held] = None

    def remove_answer(self, held: HeldKv, answer_tokens: int | None) -> None:
        """Note the end of an answer. `answer_tokens` None: it is not complete, or its length is unknown."""
        del held.decoder_kv.held_answers[held]
        if not answer_tokens or not held.max_answer_tokens:
            return
        lengths = held.length_statistics
        if lengths.answer_count < _LENGTHS:
            lengths.answer_count += 1
        if lengths.long_answer_count < _LONG_MEMORY:
            lengths.long_answer_count += 1
        lengths.mean_length += (answer_tokens - lengths.mean_length) / lengths.answer_count
        lengths.long_mean_length += (answer_tokens - lengths.long_mean_length) / lengths.long_answer_count

    def measure_fill(self, decoders: Iterable[str]) -> dict[str, KvFill]:
        """Return what the answers of these decoders hold and will hold."""
        counted = self._lengths_by_limit.values()
        for lengths in counted:
            lengths.running_count, lengths.written_token_sum = 0, 0.0
        for decoder in self.kv_by_decoder.values():
            for held in decoder.held_answers:
                if held.began >= 0.0 and held.max_answer_tokens:
                    lengths = held.length_statistics
                    lengths.running_count += 1
                    lengths.written_token_sum += decoder.charged_tokens - held.began
        for lengths in counted:
            number = lengths.long_answer_count + lengths.running_count
            all_tokens = lengths.long_answer_count * lengths.long_mean_length + lengths.written_token_sum
            lengths.reached_length_sum = all_tokens / number if number >= _ENOUGH_LENGTHS else 0.0
        return {name: self._fill_of(self.kv_by_decoder[name]) for name in decoders if name in self.kv_by_decoder}

    def forget_decoder(self, decoder: str) -> None:
        """Drop a decoder that has left, if it has no answers."""
        known = self.kv_by_decoder.get(decoder)
        if known is not None and not known.held_answers:
            del self.kv_by_decoder[decoder]

    def _likely_tokens_for(self, limit: int) -> float:
        lengths = self._lengths_by_limit.get(limit.bit_length())
        if lengths is None:
            return limit
        likely = lengths.mean_length if lengths.answer_count >= _ENOUGH_LENGTHS else float(limit)
        return max(likely, lengths.reached_length_sum)

    def _fill_of(self, decoder: DecoderKv) -> KvFill:
        rest: list[tuple[float, float]] = []  # tokens until the end of each answer, and tokens that it holds now
        charged = prompts = 0
        for held in decoder.held_answers:
            written = decoder.charged_tokens - held.began if held.began >= 0.0 else 0.0
            final = max(self._likely_tokens_for(held.max_answer_tokens), _LONGER * written)
            rest.append((final - written, held.prompt_tokens + written))
            charged += held.kv_charge
            prompts += held.prompt_tokens
        if not charged:
            return KvFill(1.0, 1.0)
        rest.sort(key=_remaining, reverse=True)
        peak = total = 0.0
        for number, (left, now) in enumerate(rest, 1):
            total += now
            peak = max(peak, total + number * left)
        needed = peak / (1 + _DISCOUNT * (1 - total / peak))
        return KvFill(_limit_share(needed / charged), _limit_share(prompts / charged))


def _limit_share(share: float) -> float:
    return max(_MIN_SHARE, min(_MAX_SHARE, share))
