"""Stop strings that no single engine sees, since one wrote their beginning and another the rest. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopGuard:
    """Looks for stop strings that begin before the seam and end behind it.

    An engine keeps back text that may be the beginning of a stop string, but the engine that goes on has never seen
    that text. So the gateway keeps it back instead, until the new text tells.
    """

    def __init__(
        self,
        stops: Sequence[str],
        held: str,
        *,
        late: int = 0,
        before: str = "",
        shows_stop: bool = False,
        tokens_to_minimum: int | None = None,
    ) -> None:
        """`held`: the text before the seam that the client does not have; `late`: how many characters of it come with
        the first new text. `before`: what the client has and a stop string may begin in, needed only with
        `shows_stop`, when the stop string itself is to be shown. `tokens_to_minimum`: how many tokens the answer lacks
        of its minimum, below which stop strings do not count; negative when it has more, None when it has no minimum.
        """
        self._stops = stops
        self._longest = max(map(len, stops))
        self._text = before + held
        self._seam = len(self._text) + late
        self._sent = len(before)
        self._unstoppable_tokens = -1 if tokens_to_minimum is None else tokens_to_minimum
        # A stop string that ends before this position does not count. Without a minimum such a one was written by two
        # engines, and the gateway has not seen its end yet.
        self._had = self._sent
        if tokens_to_minimum is not None:
            self._had = self._seam if tokens_to_minimum < 0 else len(self._text)
        self._lag = 0
        self._shows_stop = shows_stop
        self.is_done = False

    @property
    def unsent(self) -> str:
        """What is kept back now."""
        return "" if self.is_done else self._text[self._sent :]

    def push(self, text: str, *, tokens: int = 0, is_last: bool, own_stop: str | None = None) -> tuple[str, str | None]:
        """Take new text, of that many tokens: what can be shown now, and the stop string if one lies across the seam.

        With that, or with the last text, the guard is done. `own_stop`: the stop string that the engine ended with.
        """
        self._text += text
        self._unstoppable_tokens -= tokens
        if self._unstoppable_tokens >= 0:
            # The engine keeps back as much of what it has generated, which is a character per token at least.
            self._lag = min(self._longest - 1, self._lag + tokens)
            self._had = len(self._text) + (0 if self._shows_stop else self._lag)
        if (found := self._find(own_stop)) is not None:
            begin, end, stop = found
            self.is_done = True
            return self._text[self._sent : end if self._shows_stop else begin], stop
        if is_last or len(self._text) - self._seam >= self._longest - 1:
            self.is_done = True
            return self._text[self._sent :], None
        shown_to = len(self._text) if self._shows_stop else max(self._sent, len(self._text) - self._longest + 1)
        shown, self._sent = self._text[self._sent : shown_to], shown_to
        return shown, None

    def _find(self, own_stop: str | None) -> tuple[int, int, str] | None:
        """The stop string that is complete first, and of several the first in the list (vLLM `check_stop_strings`)."""
        text = self._text if own_stop is None or self._shows_stop else self._text + own_stop
        found = []
        for rank, stop in enumerate(self._stops):
            begin = text.find(stop, max(0, self._had - len(stop) + 1))
            if 0 <= begin < self._seam:
                found.append((begin + len(stop), rank, begin, stop))
        if own_stop is not None and own_stop in self._stops:
            found.append((len(text), self._stops.index(own_stop), -1, own_stop))
        end, _, begin, stop = min(found, default=(0, 0, -1, ""))
        return None if begin < 0 else (begin, end, stop)
