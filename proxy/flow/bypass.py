"""The way around whoever reads a stream, for tokens that look like one that was read. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.upstream.fast_forward import Tokens

if TYPE_CHECKING:
    from proxy.flow.client import ClientWriter
    from proxy.flow.token_clock import TokenClock
    from proxy.flow.token_shapes import TokenShapes
    from proxy.resume.transcript import Transcript
    from proxy.upstream.response import Response
    from proxy.wire.token import Shape

_NO_IDS: Final[frozenset[int]] = frozenset()


class Bypass:
    """Of a reader of one decoder's stream, which is a subclass."""

    __slots__ = ("_is_bypassed", "_passed_from", "_shape", "_tokens")

    def __init__(self) -> None:
        self._tokens: Tokens | None = None
        """Those that may bypass this reader; None before there are any."""
        self._shape: Shape | None = None
        """Theirs."""
        self._is_bypassed = False
        self._passed_from = -1
        """Tokens.index since when."""

    def _let_pass(
        self,
        shape: Shape,
        response: Response,
        client: ClientWriter | None,
        clock: TokenClock | None,
        transcript: Transcript | None,
        *,
        hides_ids: bool,
    ) -> bool:
        """Have the next events of the answer bypass this reader, if they have this shape. False: they cannot.

        `client` None: they are only kept. `transcript` None: nobody will ask for them. `hides_ids`: theirs are not for
        the client.
        """
        tokens = self._tokens
        if tokens is None or shape is not self._shape:
            line = None
            if client is not None and (line := client.line) is None:
                return False
            notes, settle, skips = None, _settle_nothing, _NO_IDS
            if transcript is not None:
                notes, settle = transcript.noting(is_reasoning=shape.is_reasoning), transcript.settle
                if shape.is_reasoning:
                    skips = frozenset(transcript.grammar.reasoning_end_ids)
            tokens = self._tokens = Tokens(shape, notes, settle, line, clock, skips=skips, hides_ids=hides_ids)
            self._shape = shape
        if clock is not None:
            tokens.index = clock.index
        self._passed_from = tokens.index
        self._is_bypassed = True
        response.pass_on(tokens)
        return True

    def _look_back(self, clock: TokenClock | None, shapes: TokenShapes) -> None:
        """Something else has come than tokens that bypass this reader."""
        self._is_bypassed = False
        tokens = self._tokens
        assert tokens is not None
        if clock is not None:
            clock.index = tokens.index
        if tokens.index > self._passed_from:
            shapes.was_right()


def _settle_nothing() -> None:
    """Of tokens that are not noted."""
