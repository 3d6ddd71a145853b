"""Nearly every token of a stream is an event that differs from the one before it only in its text and its token id.

Engines serialise each chunk of an answer alike. Once one was parsed, the next ones are recognised by their bytes, for a
third of what parsing costs. An event that differs in any other place, or has an escape in its text, is parsed as usual.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

# The members of a chat's delta and of a completion's choice that hold text. Inside a JSON string the quotes would be
# escaped, so these bytes are a member's name wherever they stand.
_TEXT_BEGINS: Final = re.compile(rb'"(content|text|reasoning|reasoning_content)" ?: ?"(?=[^"])')
_IDS_BEGIN: Final = re.compile(rb'"token_ids" ?: ?\[')
_plain_text: Final = re.compile(rb'[^"\\\x00-\x1f]+').match
_one_id: Final = re.compile(rb"[0-9]{1,9}(?=\])").match


class Token(NamedTuple):
    """The text and the token id of an event, and where its ids are."""

    text: bytes
    """UTF-8."""
    id: int
    ids_start: int
    """Where the list of ids begins, at its bracket."""
    ids_end: int


class Shape:
    """What all of them have in common: three pieces of bytes, around the text and around the id."""

    __slots__ = ("_behind", "_between", "_head", "is_reasoning")

    def __init__(self, head: bytes, between: bytes, behind: bytes, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        """Whether the text is a chat's reasoning."""
        self._head = head
        self._between = between
        self._behind = behind

    @classmethod
    def of(cls, raw: bytes) -> Shape | None:
        """The shape of a whole event with exactly one text and one token id; None when it has anything else."""
        texts, ids = _TEXT_BEGINS.findall(raw), _IDS_BEGIN.findall(raw)
        begins, list_begins = _TEXT_BEGINS.search(raw), _IDS_BEGIN.search(raw)
        if len(texts) != 1 or len(ids) != 1 or begins is None or list_begins is None:
            return None
        text, number = _plain_text(raw, begins.end()), _one_id(raw, list_begins.end())
        if text is None or number is None or raw[text.end()] != _QUOTE or list_begins.start() < text.end():
            return None
        is_reasoning = begins[1].startswith(b"reasoning")
        pieces = raw[: begins.end()], raw[text.end() : list_begins.end()], raw[number.end() :]
        return cls(*pieces, is_reasoning=is_reasoning)

    def find(self, raw: bytes) -> Token | None:
        """The token of an event that has this shape; None for any other."""
        if not raw.startswith(self._head):
            return None
        text = _plain_text(raw, len(self._head))
        if text is None:
            return None
        between = text.end()
        if not raw.startswith(self._between, between):
            return None
        number = between + len(self._between)
        end = len(raw) - len(self._behind)
        digits = raw[number:end]
        # Nothing but digits: a list of several ids has a comma.
        if not 0 < len(digits) < 10 or not digits.isdigit() or not raw.endswith(self._behind):
            return None
        return Token(text.group(), int(digits), number - 1, end + 1)


_QUOTE: Final = ord('"')
