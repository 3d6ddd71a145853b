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
class _Line:
    """Weighted sums of samples for a straight line through seconds over thousands of tokens."""

    count: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    at: float = 0.0
    """Time of the last sample."""
    a: float = 0.0
    """Seconds of a handoff without tokens."""
    b: float = 0.0
    """Seconds per thousand tokens."""

    def add(self, x: float, y: float, weight: float, at: float) -> None:
        """Add a sample, and forget a part of the earlier ones."""
        kept = _KEPT**weight * math.exp(min(0.0, self.at - at) / _MEMORY_SECONDS)
        self.count = kept * self.count + weight
        self.x = kept * self.x + weight * x
        self.xx = kept * self.xx + weight * x * x
        self.y = kept * self.y + weight * y
        self.xy = kept * self.xy + weight * x * y
        self.at = at

    def solve(self, prior: _Line | None) -> None:
        """Fit the line. `prior`: a line that counts as a few samples of this one. None: there is none."""
        count, x, xx, y, xy = self.count, self.x, self.xx, self.y, self.xy
        if prior is not None and prior.count:
            share = _PRIOR_SAMPLES / prior.count
            count += _PRIOR_SAMPLES
            x += share * prior.x
            xx += share * prior.xx
            y += share * (prior.a * prior.count + prior.b * prior.x)
            xy += share * (prior.a * prior.x + prior.b * prior.xx)
        spread = count * xx - x * x
        b = (count * xy - x * y) / spread if spread > 1e-6 * count * xx else y / x if x else 0.0
        a = (y - b * x) / count
        if b < 0.0:
            a, b = y / count, 0.0
        elif a < 0.0:
            a, b = 0.0, xy / xx
        self.a, self.b = a, b

    def seconds(self, x: float) -> float:
        """Return the time of a handoff of `x` thousand tokens."""
        return self.a + self.b * x


@dataclass(slots=True, eq=False)
class _Pair:
    prefiller: Backend
    decoder: Backend
    line: _Line = field(default_factory=_Line)
    skipped: int = 0
    """Handoffs since the last one that was learned."""
    slow_row: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of the latest handoffs, and of an ordinary pair's. Empty after a handoff that was not slow."""
    tried_at: float = -math.inf
    """Time of the last request while the pair was slow."""


def lacks_memory(scoreboard: Scoreboard, decoder: Backend, facts: EngineFacts | None) -> bool:
    """Return whether a decoder probably lets requests wait: it has all the requests or most of the KV that it can."""
    if facts is None:
        return False
    slot, most = decoder.slot, facts.max_num_seqs
    if most is not None and scoreboard.running(slot) >= most:
        return True
    return facts.kv_tokens is not None and scoreboard.load(slot).kv_tokens >= _FULL_SHARE * facts.kv_tokens


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
        self.clock = context.clock
        self.slow: dict[str, dict[str, _Pair]] = {}
        """Slow pairs by the keys of prefiller and decoder. Empty unless there are some."""
        self.far: dict[str, _Pair] = {}
        """The fastest pair of each prefiller that has only slow pairs, by its key."""
        self._is_full = is_full
        self._pairs: dict[tuple[str, str], _Pair] = {}  # in the order of their last handoffs
        self._hosts: dict[tuple[str, str], _Line] = {}
        self._all = _Line()
        self._ordinary = _Line()
        self._tokens = 0.0  # thousands of tokens of an ordinary handoff
        self._look_due = -math.inf
        self._learn_due = -math.inf
        self._pending: PendingSamples[tuple[_Pair, float, float]] = PendingSamples(context)
        self._answers: dict[str, deque[tuple[str, float, float]]] = {}
        """The key of the decoder, and when the prompt was sent and answered, by the prefiller's key."""

    def note_answer(self, prefiller: Backend, decoder: Backend, sent: float, answered: float) -> None:
        """Note the answer of a prefiller that answers after the transfer to a decoder.

        `sent` and `answered` are the times at which it got the prompt and answered.
        """
        answers = self._answers.setdefault(prefiller.key, deque(maxlen=_MAX_ANSWERS))
        answers.append((decoder.key, sent, answered))

    def last_answer_ahead(self, prefiller: Backend, decoder: Backend, sent: float) -> float:
        """Return the time of the last answer to a prompt that a prefiller got before `sent`, or -inf.

        A later prompt is usually computed after that time. Answers to prompts sent later show nothing, and neither do
        those after a transfer to the same decoder, whose link may be slow.
        """
        answers = self._answers.get(prefiller.key, ())
        ahead = [answered for other, before, answered in answers if before < sent and other != decoder.key]
        return max(ahead, default=-math.inf)

    def note(self, prefiller: Backend, decoder: Backend, tokens: int, began: float, ended: float) -> None:
        """Note a handoff of a prompt of `tokens` tokens, with the times of its beginning and end."""
        key = prefiller.key, decoder.key
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(prefiller, decoder)
            if len(self._pairs) > _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
        elif pair.line.count >= _RELIABLE and not self.slow:
            pair.skipped += 1
            if pair.skipped < _THINNED:
                return
            pair.skipped = 0
        self._pending.add((pair, tokens / 1000, ended - began), began, ended)
        if len(self._pending) % _BATCH == 0 or pair.line.count < 1 or self.clock() >= self._learn_due:
            self._learn()

    def note_pick(self, prefiller: Backend, decoder: Backend) -> None:
        """Note that a pair has got a request. Only needed while pairs are slow."""
        pair = self.slow.get(prefiller.key, {}).get(decoder.key)
        if pair is not None:
            pair.tried_at = self.clock()

    def extra_seconds(self, prefiller: Backend, candidates: Sequence[Candidate], tokens: int) -> list[float] | None:
        slow = self.slow.get(prefiller.key)
        if slow is None:
            return None
        now = self.clock()
        return [self._extra(slow.get(candidate.backend.key), tokens, now) for candidate in candidates]

    def least_extra_seconds(self, prefillers: Sequence[Backend], tokens: int) -> list[float]:
        now = self.clock()
        return [self._extra(self.far.get(prefiller.key), tokens, now) for prefiller in prefillers]

    def _extra(self, pair: _Pair | None, tokens: int, now: float) -> float:
        if pair is None or now - max(pair.tried_at, pair.line.at) > _RETRY_SECONDS:
            return 0.0
        return max(0.0, pair.line.seconds(tokens / 1000) - self._ordinary.seconds(tokens / 1000))

    def forget(self, backend: Backend) -> None:
        """Drop the handoff times of a backend that has left."""
        self._answers.pop(backend.key, None)
        gone = [key for key in self._pairs if backend.key in key]
        for key in gone:
            del self._pairs[key]
        if gone:
            self._look(self.clock())

    def slow_pairs_of(self, decoder: Backend) -> Mapping[str, Mapping[str, Any]]:
        """Return the slow pairs of a decoder for administrators, by the prefiller's address."""
        tokens = self._tokens
        return {
            pair.prefiller.name: {
                "tokens": round(1000 * tokens),
                "seconds": round(pair.line.seconds(tokens), 4),
                "ordinary_seconds": round(self._ordinary.seconds(tokens), 4),
            }
            for partners in self.slow.values()
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
            pair.prefiller.name: min(pair.slow_row)
            for partners in self.slow.values()
            for pair in partners.values()
            if pair.decoder == decoder and len(pair.slow_row) >= _MIN_SLOW_IN_ROW
        }

    def _learn(self) -> None:
        """Learn from the handoffs for which the lag of the event loop is known."""
        now = self.clock()
        self._learn_due = now + _LEARN_SECONDS
        for (pair, x, seconds), _, is_timely in self._pending.settled():
            key = pair.prefiller.key, pair.decoder.key
            if not is_timely or self._pairs.get(key) is not pair:
                continue
            line = pair.line
            if self._ordinary.count:
                ordinary_seconds = self._ordinary.seconds(x)
                if seconds < max(_SLOW * ordinary_seconds, _MIN_SECONDS):
                    pair.slow_row.clear()
                else:
                    pair.slow_row = [*pair.slow_row[1 - _MIN_SLOW_IN_ROW :], (seconds, ordinary_seconds)]
            is_long = seconds > line.seconds(x) and line.count > 0
            if is_long and self._is_full(pair.decoder):
                continue
            weight = _ABOVE_WEIGHT if is_long and line.count >= _RELIABLE else 1.0
            hosts = pair.prefiller.host, pair.decoder.host
            group = self._hosts.get(hosts)
            if group is None:
                group = self._hosts[hosts] = _Line()
            for each in (self._all, group, line):
                each.add(x, seconds, weight, now)
            self._all.solve(None)
            group.solve(self._all)
            line.solve(group)
            self._pairs[key] = self._pairs.pop(key)
        if now >= self._look_due:
            self._look(now)

    def _look(self, now: float) -> None:
        """Determine the pairs of engines with slow handoffs."""
        self._look_due = now + _LOOK_SECONDS * max(1.0, len(self._pairs) / 256)
        pairs = [pair for pair in self._pairs.values() if pair.line.count >= _STILL_ENOUGH]
        hosts = {(pair.prefiller.host, pair.decoder.host) for pair in pairs}
        self._hosts = {key: line for key, line in self._hosts.items() if key in hosts}
        before, self.slow, self.far = self.slow, {}, {}
        decoders = {pair.decoder.key for pair in pairs}
        if len(pairs) < 2 or not self._all.count:
            return
        tokens = self._tokens = self._all.x / self._all.count
        times = sorted(pair.line.seconds(tokens) for pair in pairs)
        least = times[int(_ORDINARY_SHARE * (len(times) - 1))]
        self._ordinary = min(
            (pair.line for pair in pairs if pair.line.seconds(tokens) >= least), key=lambda line: line.seconds(tokens)
        )
        for pair in pairs:
            prefiller, decoder = pair.prefiller.key, pair.decoder.key
            was_slow = decoder in before.get(prefiller, {})
            seconds = pair.line.seconds(tokens)
            most, enough = (_STILL_SLOW, _STILL_ENOUGH) if was_slow else (_SLOW, _ENOUGH)
            if pair.line.count >= enough and seconds >= max(most * least, least + _MIN_SECONDS):
                self.slow.setdefault(prefiller, {})[decoder] = pair
                if not was_slow:
                    self._log(pair, "is slow", seconds, least)
            elif was_slow:
                self._log(pair, "is no longer slow", seconds, least)
        for key, partners in self.slow.items():
            if len(partners) == len(decoders):
                self.far[key] = min(partners.values(), key=lambda pair: pair.line.seconds(tokens))

    def _log(self, pair: _Pair, what: str, seconds: float, ordinary: float) -> None:
        logger.log(
            logging.WARNING if what == "is slow" else logging.INFO,
            "handoff times: a pair of instances %s",
            what,
            extra={
                "fields": {
                    "prefiller": pair.prefiller.name,
                    "decoder": pair.decoder.name,
                    "tokens": round(1000 * self._tokens),
                    "seconds": round(seconds, 3),
                    "ordinary_seconds": round(ordinary, 3),
                }
            },
        )
