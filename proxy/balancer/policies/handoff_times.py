"""Times of KV handoffs between each prefiller and each decoder, and pairs with a slow link.

A handoff takes from the end of the prefill to the decoder's first token. For each pair of engines this time is learned
as a + b · tokens. A pair with few samples resembles the other pairs of the same two hosts, and these resemble all
pairs. A pair is slow if its handoffs take at least twice as long as those of ordinary pairs. Only then do policies
take the difference into account, so that requests pay nothing for this in fleets without slow pairs.

Samples count for some minutes. A slow pair that gets no requests is tried again after a while.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.pick import PendingSamples, PolicyContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.balancer.engines import EngineFacts
    from proxy.balancer.pick import Candidate
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.common.backend import Backend

logger = logging.getLogger(__name__)

# Handoffs are learned in batches of this number, and at least at this interval.
_BATCH: Final = 16
_LEARN_SECONDS: Final = 1.0
# Maximum number of pairs. The pair without a handoff for the longest time is dropped for another one.
_MAX_PAIRS: Final = 4096
# Samples count less with each later sample of their pair, and with time.
_KEPT: Final = 0.96
_MEMORY_SECONDS: Final = 300.0
# Weight of the more general line, in samples.
_PRIOR_SAMPLES: Final = 1.0
# A pair with this many samples has a reliable line. Then only every fourth handoff is learned, and a handoff that takes
# longer than predicted counts less, because it may have waited for the decoder's memory.
_RELIABLE: Final = 8.0
_THINNED: Final = 4
_ABOVE_WEIGHT: Final = 0.25
# A pair is slow from this multiple of the ordinary time on, and at least this many seconds above it.
_SLOW: Final = 2.0
_STILL_SLOW: Final = 1.4
_MIN_SECONDS: Final = 0.02
# Minimum weight of a pair's own samples to become slow, and to remain slow.
_ENOUGH: Final = 2.5
_STILL_ENOUGH: Final = 0.3
# Number of consecutive slow handoffs after which the status names a pair. One late handoff raises the mean of a pair.
_MIN_SLOW_IN_ROW: Final = 3
# A slow pair without a handoff for this time is taken for an ordinary one until it gets the next request.
_RETRY_SECONDS: Final = 120.0
# A decoder whose requests hold this share of its KV memory may let further requests wait.
_FULL_SHARE: Final = 0.8
# Number of the latest answers of a prefiller whose times are kept.
_MAX_ANSWERS: Final = 64
# Interval at which slow pairs are determined.
_LOOK_SECONDS: Final = 1.0
# Pairs are ordered by their times. The pair at this share of the order is an ordinary one.
_ORDINARY_SHARE: Final = 0.25


@dataclass(slots=True, eq=False)
class _TimeLine:
    """Weighted sums of samples for a straight line through seconds over thousands of tokens."""

    sample_weight: float = 0.0
    sum_x: float = 0.0
    sum_xx: float = 0.0
    sum_y: float = 0.0
    sum_xy: float = 0.0
    last_sample_at: float = 0.0
    """Time of the last sample."""
    intercept_seconds: float = 0.0
    """Seconds of a handoff without tokens."""
    seconds_per_thousand: float = 0.0
    """Seconds per thousand tokens."""

    def add_sample(self, x: float, y: float, weight: float, at: float) -> None:
        """Add a sample, and forget a part of the earlier ones."""
        kept = _KEPT**weight * math.exp(min(0.0, self.last_sample_at - at) / _MEMORY_SECONDS)
        self.sample_weight = kept * self.sample_weight + weight
        self.sum_x = kept * self.sum_x + weight * x
        self.sum_xx = kept * self.sum_xx + weight * x * x
        self.sum_y = kept * self.sum_y + weight * y
        self.sum_xy = kept * self.sum_xy + weight * x * y
        self.last_sample_at = at

    def fit_line(self, prior_line: _TimeLine | None) -> None:
        """Fit the line. `prior_line`: a line that counts as a few samples of this one. None: there is none."""
        count, x, xx, y, xy = self.sample_weight, self.sum_x, self.sum_xx, self.sum_y, self.sum_xy
        if prior_line is not None and prior_line.sample_weight:
            share = _PRIOR_SAMPLES / prior_line.sample_weight
            count += _PRIOR_SAMPLES
            x += share * prior_line.sum_x
            xx += share * prior_line.sum_xx
            y += share * (
                prior_line.intercept_seconds * prior_line.sample_weight
                + prior_line.seconds_per_thousand * prior_line.sum_x
            )
            xy += share * (
                prior_line.intercept_seconds * prior_line.sum_x + prior_line.seconds_per_thousand * prior_line.sum_xx
            )
        spread = count * xx - x * x
        b = (count * xy - x * y) / spread if spread > 1e-6 * count * xx else y / x if x else 0.0
        a = (y - b * x) / count
        if b < 0.0:
            a, b = y / count, 0.0
        elif a < 0.0:
            a, b = 0.0, xy / xx
        self.intercept_seconds, self.seconds_per_thousand = a, b

    def predict_seconds(self, x: float) -> float:
        """Return the time of a handoff of `x` thousand tokens."""
        return self.intercept_seconds + self.seconds_per_thousand * x


@dataclass(slots=True, eq=False)
class _EnginePair:
    prefiller: Backend
    decoder: Backend
    time_line: _TimeLine = field(default_factory=_TimeLine)
    skipped_requests: int = 0
    """Handoffs since the last one that was learned."""
    latest_slow_handoffs: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of the latest handoffs, and of an ordinary pair's. Empty after a handoff that was not slow."""
    last_tried_at: float = -math.inf
    """Time of the last request while the pair was slow."""


def lacks_memory(scoreboard: Scoreboard, decoder: Backend, facts: EngineFacts | None) -> bool:
    """Return whether a decoder probably lets requests wait: it has all the requests or most of the KV that it can."""
    if facts is None:
        return False
    slot, most = decoder.slot, facts.max_num_seqs
    if most is not None and scoreboard.running_requests(slot) >= most:
        return True
    return (
        facts.kv_memory_tokens is not None
        and scoreboard.load_of(slot).kv_tokens >= _FULL_SHARE * facts.kv_memory_tokens
    )


class HandoffTimes:
    """The handoff times that one worker has learned."""

    def __init__(
        self,
        context: PolicyContext | None = None,
        is_full: Callable[[Backend], bool] = lambda decoder: False,
    ) -> None:
        """Create a table without learned handoff times.

        Args:
            context: Has the clock, and the lag of the event loop. None: the loop is never late.
            is_full: Returns whether a decoder probably lets requests wait for its memory. Long handoffs to it are not
                learned.
        """
        context = context or PolicyContext()
        self.now = context.clock
        self.slow_pairs_by_decoder: dict[str, dict[str, _EnginePair]] = {}
        """Slow pairs by the keys of prefiller and decoder. Empty unless there are some."""
        self.far_prefillers: dict[str, _EnginePair] = {}
        """The fastest pair of each prefiller that has only slow pairs, by its key."""
        self._is_full = is_full
        self._pairs_by_names: dict[tuple[str, str], _EnginePair] = {}  # in the order of their last handoffs
        self._lines_by_hosts: dict[tuple[str, str], _TimeLine] = {}
        self._line_of_all = _TimeLine()
        self._ordinary_line = _TimeLine()
        self._mean_tokens = 0.0  # thousands of tokens of an ordinary handoff
        self._look_due = -math.inf
        self._learn_due = -math.inf
        self._pending: PendingSamples[tuple[_EnginePair, float, float]] = PendingSamples(context)
        self._answers: dict[str, deque[tuple[str, float, float]]] = {}
        """The key of the decoder, and when the prompt was sent and answered, by the prefiller's key."""

    def record_prefill_answer(self, prefiller: Backend, decoder: Backend, sent_at: float, answered_at: float) -> None:
        """Note the answer of a prefiller that answers after the transfer to a decoder.

        `sent_at` and `answered_at` are the times at which it got the prompt and answered.
        """
        answers = self._answers.setdefault(prefiller.key, deque(maxlen=_MAX_ANSWERS))
        answers.append((decoder.key, sent_at, answered_at))

    def last_answer_ahead(self, prefiller: Backend, decoder: Backend, sent_at: float) -> float:
        """Return the time of the last answer to a prompt that a prefiller got before `sent_at`, or -inf.

        A later prompt is usually computed after that time. Answers to prompts sent later show nothing, and neither do
        those after a transfer to the same decoder, whose link may be slow.
        """
        answers = self._answers.get(prefiller.key, ())
        ahead = [answered for other, before, answered in answers if before < sent_at and other != decoder.key]
        return max(ahead, default=-math.inf)

    def record_handoff(
        self, prefiller: Backend, decoder: Backend, prompt_tokens: int, began_at: float, ended_at: float
    ) -> None:
        """Note a handoff of a prompt of `prompt_tokens` tokens, with the times of its beginning and end."""
        key = prefiller.key, decoder.key
        pair = self._pairs_by_names.get(key)
        if pair is None:
            pair = self._pairs_by_names[key] = _EnginePair(prefiller, decoder)
            if len(self._pairs_by_names) > _MAX_PAIRS:
                del self._pairs_by_names[next(iter(self._pairs_by_names))]
        elif pair.time_line.sample_weight >= _RELIABLE and not self.slow_pairs_by_decoder:
            pair.skipped_requests += 1
            if pair.skipped_requests < _THINNED:
                return
            pair.skipped_requests = 0
        self._pending.add_sample((pair, prompt_tokens / 1000, ended_at - began_at), began_at, ended_at)
        if len(self._pending) % _BATCH == 0 or pair.time_line.sample_weight < 1 or self.now() >= self._learn_due:
            self._learn_pending()

    def record_pick(self, prefiller: Backend, decoder: Backend) -> None:
        """Note that a pair has got a request. Only needed while pairs are slow."""
        pair = self.slow_pairs_by_decoder.get(prefiller.key, {}).get(decoder.key)
        if pair is not None:
            pair.last_tried_at = self.now()

    def extra_handoff_seconds(
        self, prefiller: Backend, candidates: Sequence[Candidate], prompt_tokens: int
    ) -> list[float] | None:
        slow = self.slow_pairs_by_decoder.get(prefiller.key)
        if slow is None:
            return None
        now = self.now()
        return [
            self._extra_seconds_of_pair(slow.get(candidate.backend.key), prompt_tokens, now) for candidate in candidates
        ]

    def least_extra_handoff_seconds(self, prefillers: Sequence[Backend], prompt_tokens: int) -> list[float]:
        now = self.now()
        return [
            self._extra_seconds_of_pair(self.far_prefillers.get(prefiller.key), prompt_tokens, now)
            for prefiller in prefillers
        ]

    def _extra_seconds_of_pair(self, pair: _EnginePair | None, tokens: int, now: float) -> float:
        if pair is None or now - max(pair.last_tried_at, pair.time_line.last_sample_at) > _RETRY_SECONDS:
            return 0.0
        return max(
            0.0, pair.time_line.predict_seconds(tokens / 1000) - self._ordinary_line.predict_seconds(tokens / 1000)
        )

    def forget_backend(self, backend: Backend) -> None:
        """Drop the handoff times of a backend that has left."""
        self._answers.pop(backend.key, None)
        gone = [key for key in self._pairs_by_names if backend.key in key]
        for key in gone:
            del self._pairs_by_names[key]
        if gone:
            self._find_slow_pairs(self.now())

    def slow_pairs_of(self, decoder: Backend) -> Mapping[str, Mapping[str, Any]]:
        """Return the slow pairs of a decoder for administrators, by the prefiller's address."""
        tokens = self._mean_tokens
        return {
            pair.prefiller.name: {
                "tokens": round(1000 * tokens),
                "seconds": round(pair.time_line.predict_seconds(tokens), 4),
                "ordinary_seconds": round(self._ordinary_line.predict_seconds(tokens), 4),
            }
            for partners in self.slow_pairs_by_decoder.values()
            for pair in partners.values()
            if pair.decoder == decoder
        }

    def slow_handoffs_of(self, decoder: Backend) -> dict[str, tuple[float, float]]:
        """Return the least of the latest handoff times of slow pairs whose latest handoffs were all slow.

        Returns:
            Seconds of the handoff and of an ordinary pair's, by the prefiller's address. The line of a pair would mix
            them with earlier handoffs, and a pair that is avoided gets no further ones.
        """
        return {
            pair.prefiller.name: min(pair.latest_slow_handoffs)
            for partners in self.slow_pairs_by_decoder.values()
            for pair in partners.values()
            if pair.decoder == decoder and len(pair.latest_slow_handoffs) >= _MIN_SLOW_IN_ROW
        }

    def _learn_pending(self) -> None:
        """Learn from the handoffs for which the lag of the event loop is known."""
        now = self.now()
        self._learn_due = now + _LEARN_SECONDS
        for (pair, x, seconds), _, is_timely in self._pending.take_settled():
            key = pair.prefiller.key, pair.decoder.key
            if not is_timely or self._pairs_by_names.get(key) is not pair:
                continue
            line = pair.time_line
            if self._ordinary_line.sample_weight:
                ordinary_seconds = self._ordinary_line.predict_seconds(x)
                if seconds < max(_SLOW * ordinary_seconds, _MIN_SECONDS):
                    pair.latest_slow_handoffs.clear()
                else:
                    pair.latest_slow_handoffs = [
                        *pair.latest_slow_handoffs[1 - _MIN_SLOW_IN_ROW :],
                        (seconds, ordinary_seconds),
                    ]
            is_long = seconds > line.predict_seconds(x) and line.sample_weight > 0
            if is_long and self._is_full(pair.decoder):
                continue
            weight = _ABOVE_WEIGHT if is_long and line.sample_weight >= _RELIABLE else 1.0
            hosts = pair.prefiller.host, pair.decoder.host
            group = self._lines_by_hosts.get(hosts)
            if group is None:
                group = self._lines_by_hosts[hosts] = _TimeLine()
            for each in (self._line_of_all, group, line):
                each.add_sample(x, seconds, weight, now)
            self._line_of_all.fit_line(None)
            group.fit_line(self._line_of_all)
            line.fit_line(group)
            self._pairs_by_names[key] = self._pairs_by_names.pop(key)
        if now >= self._look_due:
            self._find_slow_pairs(now)

    def _find_slow_pairs(self, now: float) -> None:
        """Determine the pairs of engines with slow handoffs."""
        self._look_due = now + _LOOK_SECONDS * max(1.0, len(self._pairs_by_names) / 256)
        pairs = [pair for pair in self._pairs_by_names.values() if pair.time_line.sample_weight >= _STILL_ENOUGH]
        hosts = {(pair.prefiller.host, pair.decoder.host) for pair in pairs}
        self._lines_by_hosts = {key: line for key, line in self._lines_by_hosts.items() if key in hosts}
        before, self.slow_pairs_by_decoder, self.far_prefillers = self.slow_pairs_by_decoder, {}, {}
        decoders = {pair.decoder.key for pair in pairs}
        if len(pairs) < 2 or not self._line_of_all.sample_weight:
            return
        tokens = self._mean_tokens = self._line_of_all.sum_x / self._line_of_all.sample_weight
        times = sorted(pair.time_line.predict_seconds(tokens) for pair in pairs)
        least = times[int(_ORDINARY_SHARE * (len(times) - 1))]
        self._ordinary_line = min(
            (pair.time_line for pair in pairs if pair.time_line.predict_seconds(tokens) >= least),
            key=lambda line: line.predict_seconds(tokens),
        )
        for pair in pairs:
            prefiller, decoder = pair.prefiller.key, pair.decoder.key
            was_slow = decoder in before.get(prefiller, {})
            seconds = pair.time_line.predict_seconds(tokens)
            most, enough = (_STILL_SLOW, _STILL_ENOUGH) if was_slow else (_SLOW, _ENOUGH)
            if pair.time_line.sample_weight >= enough and seconds >= max(most * least, least + _MIN_SECONDS):
                self.slow_pairs_by_decoder.setdefault(prefiller, {})[decoder] = pair
                if not was_slow:
                    self._log_pair(pair, "is slow", seconds, least)
            elif was_slow:
                self._log_pair(pair, "is no longer slow", seconds, least)
        for key, partners in self.slow_pairs_by_decoder.items():
            if len(partners) == len(decoders):
                self.far_prefillers[key] = min(
                    partners.values(), key=lambda pair: pair.time_line.predict_seconds(tokens)
                )

    def _log_pair(self, pair: _EnginePair, event_text: str, seconds: float, ordinary: float) -> None:
        logger.log(
            logging.WARNING if event_text == "is slow" else logging.INFO,
            "handoff times: a pair of instances %s",
            event_text,
            extra={
                "fields": {
                    "prefiller": pair.prefiller.name,
                    "decoder": pair.decoder.name,
                    "tokens": round(1000 * self._mean_tokens),
                    "seconds": round(seconds, 3),
                    "ordinary_seconds": round(ordinary, 3),
                }
            },
        )
