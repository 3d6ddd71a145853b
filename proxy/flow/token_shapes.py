"""What the tokens of a stream look like, learned from those that were parsed. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.wire.token import Shape

if TYPE_CHECKING:
    from proxy.dialects.segment import Segment
    from proxy.wire.sse import Event

# Some streams have no shape, and an attempt to learn one costs more than parsing a token.
_MAX_ATTEMPTS: Final = 8


class TokenShapes:
    """The shapes that the tokens of one decoder's stream have, one after the other."""

    __slots__ = ("_attempts_left", "current")

    def __init__(self) -> None:
        self.current: Shape | None = None
        """The shape of the present tokens, as long as they add to the same text; None while it is not known."""
        self._attempts_left = _MAX_ATTEMPTS

    def learn(self, segment: Segment, event: Event, choice: dict[str, Any], *, has_tools: bool) -> None:
        """Learn what the next tokens look like if this one, which was parsed, looks different from those before it.

        `has_tools`: the answer has called tools, so that its chunks may differ in more than their text.
        """
        is_token = choice.get("finish_reason") is None and choice.get("logprobs") is None and not has_tools
        if is_token and self.current is not None and self.current.is_around(event.raw):
            return
        self.current = None
        if is_token and self._attempts_left and segment.data is event.data:
            self._attempts_left -= 1
            self.current = Shape.of(event.raw)

    def was_right(self) -> None:
        """Tokens had the present shape, so another one is worth learning when they change: SGLang's chunks tell the
        second in which they were written.
        """
        self._attempts_left = _MAX_ATTEMPTS
