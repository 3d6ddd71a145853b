"""How many prompts a prefiller computes side by side: it tells, and answers show whether that is how it works.

Most engines compute prompts one after the other, or several in one step that takes the sum of their times. Others are
several engines behind one address (data-parallel ranks), which may tell how many, and of which some are idle while
others have several prompts, as most of those who share out prompts do not know what they take. To hold prompts back is
right only where it is known when a prefiller is free. So one gets all at once, as if its load were counted in tokens,
until its answers show that it computes in order, one after the other, and as soon as those of several ranks do not
come as fast as if each prompt had one for itself.

What that is measured by needs no costs to be known: if it is so, then there are some that explain the answers.

That prompts are held back is a learned restriction, so it must prove itself: a prefiller must compute as much with the
prompts that it may have as with more. Now and then it gets more, to find out. If it computes less with those that it
may have, nothing is held back for an hour.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heapreplace
from math import inf, log, sqrt
from typing import TYPE_CHECKING, Final

from proxy.balancer.policies.prefill_cost import misfit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.policies.prefill_cost import PrefillSample

_MOST_LANES: Final = 64
# So many answers to prompts that had company are enough for a first look, then so many more, and twice as many each
# time that they do not settle it; the last ones count.
_ENOUGH: Final = 12
_MORE: Final = 8
_LAST: Final = 32
# What was found is believed for so many answers: twice as many each time that it is found again.
_BELIEVED_IN_TURN: Final = 32
_BELIEVED: Final = 32
_BELIEVED_AT_MOST: Final = 1024
# One after the other it explains answers better than side by side by such a factor, and is off by so much at most.
_BETTER: Final = 0.4
_OFF: Final = 0.25
# Who computes in turn answers in turn: nobody is believed to do so of whose last answers so many overtake another one,
# or not to do so if fewer do. Where none of so many does it is enough if lengths differ, by such a part of their mean:
# of engines that compute prompts in chunks, several in a step, what each step takes is not known so well.
_IN_ORDER: Final = 16
_OVERTAKING: Final = 3
_UNLIKE: Final = 0.25
# Side by side on so many ranks it is off by so much at most.
_OFF_ON_RANKS: Final = 0.1
# Answers come from one step if such a part of the time since their prompts were sent is between them at most, and no
# more than so many seconds.
_AT_ONCE: Final = 0.02
_AT_ONCE_SECONDS: Final = 0.01

# Sooner answers tell nothing: nobody would be held back for so long.
_LEAST_SECONDS: Final = 0.05

# Of answers with the prompts that a prefiller may have, and with more, the last groups of so many for each lane; and
# how many groups are enough.
_GROUP: Final = 3
_GROUPS: Final = 20
_ENOUGH_GROUPS: Final = 6
# The next prompts are sent a little before those before them have ended: so many times what it computes at a time.
_AHEAD: Final = 2
# Throughput with more prompts is higher if the logarithm of the ratio is more than this, and this number of deviations.
_HIGHER: Final = 0.03
_SURE: Final = 2.0
# What was found is not believed any more after this number of answers that taught nothing since then, because the event
# loop was late, if they are more than the others.
_MOST_LATE: Final = 64
DOUBT_SECONDS: Final = 3600.0
"""Nothing is held back for this time after a prefiller has computed more with more prompts."""


class _Throughput:
    """What a prefiller computed with some numbers of prompts under way: the last groups of answers, one after another.

    Answers that come at once are in one group: of prompts that are computed together only the first takes time.
    """

    __slots__ = ("_group", "_groups")

    def __init__(self) -> None:
        self._groups: deque[tuple[float, float, float, float]] = deque(maxlen=_GROUPS)
        """Answers, uncached tokens, what their attention grows with, and seconds."""
        self._group = (0.0, 0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether there are enough groups."""
        return len(self._groups) >= _ENOUGH_GROUPS

    def add(self, sample: PrefillSample, size: int) -> bool:
        """Add an answer to a group of this size, or to the next one. Return whether a group has become complete."""
        count, uncached, attention, seconds = self._group
        is_complete = count >= size and not _is_at_once(sample)
        if is_complete:
            self._groups.append(self._group)
            count = uncached = attention = seconds = 0.0
        self._group = count + 1, uncached + sample.uncached, attention + sample.attention, seconds + sample.seconds
        return is_complete

    def rate(self, shape: Sequence[float]) -> tuple[float, float]:
        """Return the predicted seconds of work that are done in a second, and the variance of the logarithm of that."""
        first, token, attention = shape
        works = [first * count + token * tokens + attention * each for count, tokens, each, _ in self._groups]
        seconds = [each for *_, each in self._groups]
        work, number = sum(works), len(works)
        rate = work / max(sum(seconds), 1e-9)
        squares = sum([(each - rate * its_seconds) ** 2 for each, its_seconds in zip(works, seconds, strict=True)])
        return rate, squares / (work * work) * number / (number - 1)


class Concurrency:
    """Of one prefiller."""

    __slots__ = (
        *("lanes", "ranks", "is_orderly", "doubted_until"),
        *("_answers", "_belief", "_believed", "_more", "_overtaking", "_steps", "_unseen"),
        *("_at", "_beyond", "_late", "_timely", "_tried"),
    )

    def __init__(self, ranks: int | None = None) -> None:
        """`ranks`: see EngineFacts. One, or None, says little: there may be a load balancer in front of several."""
        self.ranks = ranks
        self.lanes = min(ranks or 1, _MOST_LANES)
        """Prompts that it computes side by side, if it works as is thought."""
        self.is_orderly: bool | None = None
        """It works so by what was seen: when it is free can be predicted. None: it is not known yet."""
        self._belief = self._believed = 0
        # Of the last answers: tokens, what their attention grows with, and seconds since the answer before or since
        # the prompt was sent.
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_LAST)
        self._answers: deque[tuple[float, float, float]] = deque(maxlen=_LAST)
        self._overtaking: deque[float] = deque(maxlen=_LAST)  # see PrefillSample.overtook, of those that had company
        self._unseen, self._more = _ENOUGH, _MORE
        self._at, self._beyond = _Throughput(), _Throughput()  # with as many prompts as it may have, and with more
        self._tried = 0  # groups of the latter since something was believed
        self.doubted_until = -inf
        """Until this time of the clock nothing is held back, since it computed more with more prompts."""
        self._late = self._timely = 0  # answers since something was believed

    @property
    def is_serial(self) -> bool:
        """It is known to compute one after the other."""
        return self.lanes == 1 and self.is_orderly is True

    @property
    def wanted(self) -> float:
        """Prompts that it may have under way: all where it is not known how it works. To find out whether one that has
        computed one after the other still does takes more than one.
        """
        if not self.is_orderly:
            return inf
        return self.lanes if self._believed or (self.lanes > 1 and self._tried >= _ENOUGH_GROUPS) else 3 * self.lanes

    def forget_limit(self) -> None:
        """Note that it may have another number of prompts from now on."""
        self._at = _Throughput()

    def learn(self, sample: PrefillSample, shape: Sequence[float] = (), now: float = 0.0) -> None:
        """Learn from a prompt that has been computed.

        Args:
            sample: The prompt.
            shape: What prompts take by prediction, as in `PrefillCost.shape`; empty: throughput is not compared.
            now: When the prompt had been computed, on the clock.
        """
        self._timely += 1
        if shape:
            self._compare(sample, shape, now)
        if self._believed:
            self._believed -= 1
            return
        if sample.whole < _LEAST_SECONDS:
            return
        if self.lanes > 1 and sample.ahead >= self.lanes:
            return
        uncached, attention = sample.uncached, sample.attention
        if self._steps and _is_at_once(sample):
            tokens, attentions, seconds = self._steps.pop()
            self._steps.append((tokens + uncached, attentions + attention, seconds + sample.seconds))
            if self._overtaking:
                self._overtaking[-1] = 0.0  # in which order the answers of one step come says nothing
        else:
            self._steps.append((uncached, attention, sample.seconds))
        self._answers.append((uncached, attention, sample.whole))
        if sample.ahead:
            self._overtaking.append(sample.overtook)
            self._unseen -= 1
            if not self._unseen:
                self._look()

    def miss(self) -> None:
        """Note an answer that teaches nothing, as the event loop was late. What cannot prove itself is not believed."""
        self._late += 1
        if self._late > max(_MOST_LATE, self._timely):
            self._believe(False)
            self.is_orderly = None
            self._believed = self._belief = 0

    def _compare(self, sample: PrefillSample, shape: Sequence[float], now: float) -> None:
        """Compare what it computes with the prompts that it may have with what it computes with more."""
        if sample.fill > _AHEAD:
            self._tried += self._beyond.add(sample, _GROUP * self.lanes)
        elif sample.fill >= 1:
            self._at.add(sample, _GROUP * self.lanes)
        if now >= self.doubted_until and self.is_orderly and self._is_lower(shape):
            self.doubted_until = now + DOUBT_SECONDS
            self._believe(False)
        elif now >= self.doubted_until > -inf:
            self.doubted_until = -inf
            self._at, self._beyond = _Throughput(), _Throughput()

    def _is_lower(self, shape: Sequence[float]) -> bool:
        """Return whether it surely computes less with the prompts that it may have than with more.

        With these, several lanes do as many seconds of work in a second, as long as nothing else is known.
        """
        if not self._beyond.is_known or not (self._at.is_known or self.lanes > 1):
            return False
        at, at_variance = self._at.rate(shape) if self._at.is_known else (float(self.lanes), 0.0)
        beyond, beyond_variance = self._beyond.rate(shape)
        return log(beyond / at) > _HIGHER + _SURE * sqrt(at_variance + beyond_variance)

    def _look(self) -> None:
        self._unseen = self._more
        self._more *= 2
        side_by_side = misfit(self._answers)
        if self.lanes > 1:
            self._believe(side_by_side < _OFF_ON_RANKS)
            return
        in_turn = misfit(self._steps)
        if sum(self._overtaking) >= _OVERTAKING:
            if in_turn > side_by_side:
                self._believe(False)
        elif in_turn < min(_BETTER * side_by_side, _OFF) or (
            len(self._overtaking) >= _IN_ORDER and self._are_unlike and not any(self._overtaking)
        ):
            self._believe(True)

    @property
    def _are_unlike(self) -> bool:
        """Prompts are of different lengths."""
        lengths = [uncached for uncached, *_ in self._answers]
        mean = sum(lengths) / len(lengths)
        return sum(abs(length - mean) for length in lengths) > _UNLIKE * mean * len(lengths)

    def _believe(self, is_orderly: bool) -> None:
        is_orderly = is_orderly and self.doubted_until == -inf
        self._tried = self._late = self._timely = 0
        if self._belief and is_orderly is self.is_orderly:
            self._belief = min(2 * self._belief, _BELIEVED_AT_MOST)
        else:
            self._belief = _BELIEVED_IN_TURN if is_orderly and self.lanes == 1 else _BELIEVED
        self._believed = self._belief
        self.is_orderly = is_orderly
        self._steps.clear()
        self._answers.clear()
        self._overtaking.clear()
        self._unseen, self._more = _ENOUGH, _MORE


def _is_at_once(sample: PrefillSample) -> bool:
    """Return whether a prompt was answered at the same time as the one before it."""
    return sample.seconds <= min(_AT_ONCE_SECONDS, _AT_ONCE * sample.whole)


def soonest_free(lefts: Sequence[float], behind: Sequence[float]) -> float:
    """When one of several is free again that still take so long, and those that are behind them one after the other."""
    free = list(lefts)
    heapify(free)
    for seconds in behind:
        heapreplace(free, free[0] + seconds)
    return free[0]
