"""What the tokens of a stream look like, learned from those that were parsed. No IO."""

from __future__ import annotations

from typing import Final

from proxy.wire.token import Shape

# Some streams have no shape, and an attempt to learn one costs more than parsing a token.
_MAX_ATTEMPTS: Final = 8


class TokenShapes:
    """The shapes that the tokens of one decoder's stream have, one after the other."""

    __slots__ = ("_attempts_left", "current")

    def __init__(self) -> None:
        self.current: Shape | None = None
        """The shape of the present tokens, as long as they add to the same text; None while it is not known."""
        self._attempts_left = _MAX_ATTEMPTS

    def learn(self, raw: bytes, *, is_token: bool, is_whole: bool) -> None:
        """Learn what the next tokens look like if this event, which was parsed, looks different from those before it.

        `is_token`: it shows text, and what comes behind it may differ in no more than its text. `is_whole`: it was
        parsed as it came.
        """
        if is_token and self.current is not None and self.current.is_around(raw):
            return
        self.current = None
        if is_token and self._attempts_left and is_whole:
            self._attempts_left -= 1
            self.current = Shape.of(raw)

    def was_right(self) -> None:
        """Tokens had the present shape, so another one is worth learning when they change: SGLang's chunks tell the
        second in which they were written.
        """
        self._attempts_left = _MAX_ATTEMPTS
