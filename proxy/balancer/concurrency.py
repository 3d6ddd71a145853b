"""How many prompts a prefiller computes side by side: it tells, or prompts that wait otherwise than predicted do.

Most engines compute prompts one after the other, or several in one step that takes the sum of their times. Others are
several engines behind one address (data-parallel ranks): with only one prompt at a time most of them would idle. So one
that does not tell how many those are gets some more than it is thought to compute every now and then, until it has
shown what becomes of them.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# So many prompts that came when there were more than it is thought to compute decide it, if most of them agree.
_ENOUGH: Final = 12
_MOST: Final = 7
# That is believed for so many answers. To find out what several engines do costs less: the order is lost anyhow.
_BELIEVED: Final = 1000
_BELIEVED_OF_SEVERAL: Final = 250
# Of the predicted wait, how much was spared or came on top: less than this is no sign.
_SPARED: Final = 0.4
_ADDED: Final = 0.5
# Shorter waits tell nothing, nor those that are short beside the prompt's own time.
LEAST_WAIT_SECONDS: Final = 0.05
_LEAST_WAIT_SHARE: Final = 0.5
_MOST_LANES: Final = 64


class Concurrency:
    """Of one prefiller."""

    __slots__ = ("lanes", "ranks", "_believed", "_less", "_more", "_seen")

    def __init__(self, ranks: int | None = None) -> None:
        """`ranks`: see EngineFacts. Several are believed in for good; one, or None, says little: there may be a load
        balancer in front of it.
        """
        self.ranks = ranks
        self.lanes = min(ranks or 1, _MOST_LANES)
        """Prompts that it computes side by side."""
        self._believed = inf if self.lanes > 1 else 0.0  # for so many answers more
        self._seen = self._more = self._less = 0

    @property
    def is_serial(self) -> bool:
        """It is known to compute one after the other."""
        return self.lanes == 1 and self._believed > 0

    @property
    def wanted(self) -> int:
        """Prompts that it may have under way: to find out, more than it is thought to compute."""
        return self.lanes if self._believed else 2 * self.lanes + 1

    def saw(self, ahead: int, wait_seconds: float, work_seconds: float, seconds: float) -> None:
        """A prompt has been computed. So many were there when it was sent; by prediction it would wait so long and take
        so long; and it was answered after `seconds`.
        """
        if self._believed:
            self._believed -= 1
        elif ahead > self.lanes and wait_seconds > max(LEAST_WAIT_SECONDS, _LEAST_WAIT_SHARE * work_seconds):
            spared = 1 - (seconds - work_seconds) / wait_seconds
            self._more += spared > _SPARED
            self._less += spared < -_ADDED
            self._seen += 1
            if self._more >= _MOST or self._seen - self._more > _ENOUGH - _MOST:  # the rest would change nothing
                self._decide()

    def _decide(self) -> None:
        if self._more >= _MOST and self.lanes < _MOST_LANES:
            self.lanes *= 2  # and maybe more: that is to be found out
        else:
            if self.lanes > 1 and 2 * self._less > self._seen:
                self.lanes -= max(1, self.lanes // 4)
            self._believed = _BELIEVED if self.lanes == 1 else _BELIEVED_OF_SEVERAL
        self._seen = self._more = self._less = 0


def soonest_free(lefts: Sequence[float], behind: Sequence[float]) -> float:
    """When one of several is free again that still take so long, and those that are behind them one after the other."""
    free = list(lefts)
    heapify(free)
    for seconds in behind:
        heapreplace(free, free[0] + seconds)
    return free[0]
