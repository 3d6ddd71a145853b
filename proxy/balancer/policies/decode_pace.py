"""How fast decoders write answers, by how many they write at a time: learned from those that have ended.

An answer tells its tokens, and its decoder's history in how many streams at a time it was written: seconds in each
bucket of streams. What one stream gets in each bucket begins on the straight line that the others tell of a step's
seconds, and is corrected by the relative error of every answer that was written there: along what it spent where, and
the less the more it is spread (half of the way to Kaczmarz's projection, which would believe each answer wholly). How
slow each backend is beside the others is learned by itself.

Up to the knee a decoder makes more tokens a second the more streams it has, beyond it fewer; what is beyond it never
ends, because what is slower stays longer. Only what was seen is believed, and only where a decline is more than answers
differ among each other: what always gets faster has no knee.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_EVERY: Final = 16  # up to here each number of streams has a bucket of its own, and then an eighth more
_BUCKETS: Final = 40
SIZES: Final = tuple(range(_EVERY + 1)) + tuple(
    accumulate(range(_BUCKETS), lambda size, _: size + size // 8, initial=_EVERY + 2)
)
"""The most streams of each bucket; the last one has all that are more."""

# What took less tells more of this process and its reads, which bring several tokens at once, than of a decoder.
_LEAST_SECONDS: Final = 0.1
_STEP: Final = 0.15
_SLOWNESS_STEP: Final = 0.03
_MOST_SLOWNESS: Final = math.log(4)
# A sample this far off is held to be as far off as this: its client may have read slowly.
_MOST_ERROR: Final = math.log(2.5)
# So many answers' worth of a bucket are enough to believe what it says.
_ENOUGH: Final = 4.0
# What a bucket says is of no more answers than these: it forgets.
_MOST_SEEN: Final = 2 / _STEP - 1
# What answers are off what was expected of them, squared: it is thought to be this before any were, counts as so many
# then, and is learned as fast in the end.
_FIRST_NOISE: Final = 0.2**2
_FIRST_ANSWERS: Final = 8
_NOISE_STEP: Final = 0.02
# A step of one stream takes so many times what each one more adds, as long as nothing is known: of the machines that
# were measured it is 10 and 13.
_FIRST_STEPS: Final = 10.0
# Throughput beyond the knee is less than this part of what it was at it, in logarithms ...
_LEAST_DECLINE: Final = -math.log(0.85)
# ... and by so many times as much as the means of two buckets may differ without a decline.
_SURE: Final = 2.5
# What was seen beyond the knee is tried again after so long, by one decoder.
TRUSTED_SECONDS: Final = 600.0
# With fewer streams than this there is nothing to find out.
_LEAST_SCOUTED: Final = 4
# What a stream costs beyond a step of its own is no less than this part of the step, whatever the fit says: with 0 one
# decoder would get all that is sent in a moment.
_LEAST_SLOPE: Final = 0.01
# Differences in speed up to here are noise.
_EQUAL_SPEED: Final = math.log(1.05)


PLACES: Final = tuple(min(bisect_left(SIZES, streams), len(SIZES) - 1) for streams in range(SIZES[-1] + 1))
"""Of the bucket for so many streams; more than there are places for are in the last one."""


class DecodePace:
    """Of one role, as one worker knows it."""

    def __init__(self) -> None:
        self.rates = [0.0] * len(SIZES)
        """Tokens a second of one stream, by bucket; 0: not known."""
        self.most = math.inf
        """Streams that a decoder had better have at most: those at its knee; infinite: none was seen."""
        self.scout = math.inf
        """The same for one of them, which is to find out what is not known: more than the others where the knee was
        seen long ago, fewer where nobody has had so few."""
        self.step, self.slope = _FIRST_STEPS, 1.0
        """Seconds a token takes, without other streams and more for each of them, so far as they stand in a straight
        line below the knee. Only their ratio counts as long as nothing is known."""
        self.token_seconds = 0.0
        """What a token takes of a decoder that makes as many as it can; 0: not known."""
        self.samples = 0
        self._seen = [0.0] * len(SIZES)  # answers' worth of each bucket
        self._seen_at = [-math.inf] * len(SIZES)
        self._noise, self._noted = _FIRST_NOISE, _FIRST_ANSWERS
        self._slowness: dict[Hashable, float] = {}  # logarithms

    def slowness(self, backend: Hashable) -> float:
        """How many times as long it takes as the others; 1.0: as they do, or not known."""
        slowness = self._slowness.get(backend, 0.0)
        return 1.0 if abs(slowness) < _EQUAL_SPEED else math.exp(slowness)

    def learn(self, backend: Hashable, spent: Sequence[tuple[int, float]], tokens: int, now: float) -> None:
        """An answer of so many tokens has spent so many seconds in each of these buckets. Of one that was written in
        less than a tenth of a second nothing is learned.
        """
        seconds = sum(each for _, each in spent)
        if tokens < 1 or seconds < _LEAST_SECONDS:
            return
        rates, slowness = self.rates, self._slowness.get(backend, 0.0)
        for place, _ in spent:
            if not rates[place]:
                rates[place] = self._likely(place) or tokens / seconds
        expected = sum(rates[place] * each for place, each in spent)
        error = math.log(tokens / expected) + slowness
        if self.samples >= _ENOUGH:
            error = max(-_MOST_ERROR, min(_MOST_ERROR, error))
        self.samples += 1
        shares = [(place, rates[place] * each / expected) for place, each in spent]
        length = math.sqrt(sum(share * share for _, share in shares))
        for place, share in shares:
            rates[place] *= math.exp(max(_STEP, 1 / (1 + self._seen[place])) * error * share / length)
            self._seen[place] += share
            if share > 0.05:
                self._seen_at[place] = now
        if all(self._seen[place] >= _ENOUGH for place, share in shares if share > 0.1):
            self._noted += 1
            self._noise += max(_NOISE_STEP, 1 / self._noted) * (error * error - self._noise)
            slower = slowness - _SLOWNESS_STEP * error
            self._slowness[backend] = max(-_MOST_SLOWNESS, min(_MOST_SLOWNESS, slower))

    def look(self, now: float) -> None:
        """Take what was learned by now for the knee and for what streams cost."""
        known = [place for place in range(1, len(SIZES)) if self._seen[place] >= _ENOUGH / 2]
        self.most = self.scout = math.inf
        made = {place: SIZES[place] * self.rates[place] for place in known}
        best = max(known, key=made.__getitem__, default=0)
        self.token_seconds = 1 / made[best] if known else 0.0
        beyond = [place for place in known if place > best and self._declines(best, place)]
        if beyond:
            good = max(place for place in known if place < beyond[0])
            self.most = self.scout = float(SIZES[(good + beyond[0]) // 2])
            if now - max(self._seen_at[place] for place in beyond) > TRUSTED_SECONDS:
                self.scout = float(SIZES[beyond[0]])
            known = [place for place in known if place < beyond[0]]
        if known:
            self.scout = min(self.scout, self._fewer(known, now))
        if len(known) > 1:
            self._fit(known)

    def _fewer(self, known: Sequence[int], now: float) -> float:
        """How few streams one decoder should have because none has had so few lately; infinite: some have."""
        most = SIZES[max(known)]
        least, enough = most / 2, most * 0.8
        if most < _LEAST_SCOUTED or any(
            least <= SIZES[place] <= enough and now - self._seen_at[place] < TRUSTED_SECONDS for place in known
        ):
            return math.inf
        return int(0.7 * most)

    def forget(self, backend: Hashable) -> None:
        """It has left."""
        self._slowness.pop(backend, None)

    def _likely(self, place: int) -> float:
        """What the known bucket closest to this one lets expect of it; 0.0: nothing is known of any."""
        known = [other for other, rate in enumerate(self.rates) if rate]
        if not known:
            return 0.0
        near = min(known, key=lambda other: abs(other - place))
        return self.rates[near] * (self.step + self.slope * SIZES[near]) / (self.step + self.slope * SIZES[place])

    def _declines(self, best: int, place: int) -> bool:
        """Whether surely far fewer tokens a second are made in a bucket than in the best one."""
        answers = sum(1 / min(_MOST_SEEN, self._seen[each]) for each in (best, place))
        decline = math.log(SIZES[best] * self.rates[best] / (SIZES[place] * self.rates[place]))
        return decline > _LEAST_DECLINE + _SURE * math.sqrt(self._noise * answers)

    def _fit(self, known: Sequence[int]) -> None:
        """The straight line, by least squares in which each bucket counts as often as it was seen, up to a bound."""
        weights = [min(self._seen[place], 50.0) for place in known]
        total = sum(weights)
        streams = [SIZES[place] for place in known]
        seconds = [1 / self.rates[place] for place in known]
        mean_streams = sum(map(float.__mul__, weights, map(float, streams))) / total
        mean_seconds = sum(map(float.__mul__, weights, seconds)) / total
        both = zip(weights, streams, seconds, strict=True)
        slope = sum(weight * (at - mean_streams) * (each - mean_seconds) for weight, at, each in both)
        spread = sum(weight * (at - mean_streams) ** 2 for weight, at in zip(weights, streams, strict=True))
        slope = max(slope / spread, _LEAST_SLOPE * mean_seconds)
        self.step, self.slope = max(mean_seconds - slope * mean_streams, slope), slope
