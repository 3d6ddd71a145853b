"""Shapes: what documents have in common that differ in their messages alone, as most of one application's do.

The bytes before and behind the messages say all but the prompt, and are the same request after request. So what they
mean is read once, and a changed copy is the pieces of a copy made before, with the messages of this one in between: the
same bytes as if it was made anew. Nothing that is in messages is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.wire.document import REMOVED, Document, InvalidDocument, joined
from proxy.wire.members import spans_of
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.wire.document import Body

MESSAGES: Final = "messages"


class Constant(dict[str, object]):
    """Changes that are made once for many documents, never of messages: what becomes of a shape by them is remembered.

    They are told by who they are, as nothing of them is ever set again.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]


UNCHANGED: Final = Constant()


class Shape:
    """Of the documents that are this one with other messages."""

    __slots__ = ("_frames", "_together", "before", "behind", "closing", "empty", "opening", "values")

    def __init__(self, before: bytes, behind: bytes) -> None:
        """What stands before and behind the messages. Raises InvalidDocument where that is no document, or if they are
        not its messages.
        """
        self.before, self.behind = before, behind
        self.opening, self.closing = before + b"[", b"]" + behind
        raw = before + b"[]" + behind
        self.empty = Document(raw)
        """The one that has none."""
        if spans_of(raw).get(MESSAGES, ())[1:] != (len(before), len(before) + 2):
            raise InvalidDocument("the messages are elsewhere")
        values = self.empty.values
        assert isinstance(values, dict)  # it is no long one
        self.values: dict[str, Any] = values
        self._frames: dict[tuple[Constant, Constant], tuple[bytes, bytes]] = {}
        self._together: dict[tuple[Constant, Constant], Constant] = {}

    def together(self, first: Constant, second: Constant) -> Constant:
        """Both changes, one after the other."""
        both = self._together.get((first, second))
        if both is None:
            both = self._together[first, second] = Constant({**first, **second})
        return both

    def frame(self, first: Constant, second: Constant) -> tuple[bytes, bytes]:
        """What stands before and behind the messages with both changes."""
        frame = self._frames.get((first, second))
        if frame is None:
            text = joined(self.empty.with_changes({**first, **second}))
            _, start, end = spans_of(text)[MESSAGES]
            frame = self._frames[first, second] = text[:start], text[end:]
        return frame


class ShapedDocument(Document):
    """A document of a shape that is known."""

    __slots__ = ("_shape", "_written")

    def __init__(self, shape: Shape, written: bytes, messages: list[Any]) -> None:
        """`written`: the messages as they stand there."""
        self._shape = shape
        self.values = values = shape.values.copy()
        values[MESSAGES] = messages
        self._written = written
        self._spans = None
        self._raw = b""

    def view(self, name: str) -> memoryview:
        """See Document."""
        if name == MESSAGES:
            return memoryview(self._written)
        self._locate()
        return super().view(name)

    def with_changes(self, changes: Mapping[str, object]) -> Body:
        """See Document."""
        self._locate()
        return super().with_changes(changes)

    def together(self, first: Mapping[str, object], second: Mapping[str, object]) -> Mapping[str, object]:
        """See Document."""
        if first and type(first) is Constant and type(second) is Constant:
            return self._shape.together(first, second)
        return super().together(first, second)

    def with_both(self, first: Mapping[str, object], second: Mapping[str, object]) -> Body:
        """See Document."""
        if type(first) is not Constant:
            return super().with_both(first, second)
        if not second:
            second = UNCHANGED
        if type(second) is Constant:
            before, behind = self._shape.frame(first, second)
            return before + self._written + behind
        for name, value in second.items():
            if value is REMOVED or name in first or name in self.values:
                return super().with_both(first, second)
        return self._with_more(first, dumps(second)[1:])

    def with_written(self, changes: Mapping[str, object], name: str, value: bytes) -> Body:
        """See Document."""
        if type(changes) is not Constant or name in self.values:
            return super().with_written(changes, name, value)
        return self._with_more(changes, b'"%b":%b}' % (name.encode(), value))

    def _with_more(self, changes: Constant, members: bytes) -> bytes:
        """With changes, and behind them these members, which it does not have, and its closing brace."""
        before, behind = self._shape.frame(changes, UNCHANGED)
        return b"".join((before, self._written, behind[:-1], b",", members))

    def _locate(self) -> None:
        """Find the members, which hardly anybody asks for."""
        if self._spans is None:
            self._raw = self._shape.before + self._written + self._shape.behind
            self._spans = spans_of(self._raw)
