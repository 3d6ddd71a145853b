"""When the tokens of an answer went to the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.observe.metrics import Metrics
    from proxy.observe.record import RequestRecord


class TokenClock:
    """Times the tokens of one unit: the first for the record, the gaps by sample since most are alike.

    Who cannot afford a call for each token does by himself what `tick` does for all but the first; see Tokens.
    """

    __slots__ = ("_has_begun", "_metrics", "_record", "gap_from", "index", "now")

    def __init__(self, record: RequestRecord, metrics: Metrics) -> None:
        self.index = -1
        """Of the last part of the answer that went to the client; -1: none has."""
        self.gap_from = 0.0
        """When the gap began that is timed: one in eight is."""
        self.now = record.clock
        self._has_begun = False
        self._record = record
        self._metrics = metrics

    def tick(self) -> None:
        """Part of the answer went to the client."""
        self.index = index = self.index + 1
        if index & 6:
            return
        if index & 1:
            self.sample()
            return
        if not self._has_begun:
            self._has_begun = True
            self._record.first_token()
        self.gap_from = self.now()

    def sample(self) -> None:
        """The gap that is timed has ended."""
        self._metrics.inter_token_seconds.observe(self.now() - self.gap_from)
