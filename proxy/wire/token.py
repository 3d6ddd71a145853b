"""Nearly every token of a stream is an event that differs from the one before it only in its text and its token id.

Engines serialise each chunk of an answer alike. Once one was parsed, the next ones are recognised by their bytes, for a
small part of what parsing costs. An event that differs in any other place is parsed as usual.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.wire.engine_members import NO_KV_PARAMS, names_engine_members

# The members of a chat's delta and of a completion's choice that hold text. Inside a JSON string the quotes would be
# escaped, so these bytes are a member's name wherever they stand.
_TEXT_BEGINS: Final = re.compile(rb'"(content|text|reasoning|reasoning_content)" ?: ?"(?=[^"])')
_IDS_BEGIN: Final = re.compile(rb'"token_ids" ?: ?\[')
_one_id: Final = re.compile(rb"[0-9]{1,9}(?=\])").match
_END: Final = b"}\n\n"
_plain_text: Final = re.compile(rb'[^"\\\x00-\x1f]+(?=")').match


class Shape:
    """What all of them have in common: the pieces of bytes around the text, and around the id if there is one."""

    __slots__ = ("behind", "between", "head", "is_reasoning")

    def __init__(self, head: bytes, between: bytes | None, behind: bytes, *, is_reasoning: bool) -> None:
        self.head = head
        """Up to the text, the quote before it included."""
        self.between = between
        """From the quote behind the text up to the id, the bracket before it included; None: there is no id."""
        self.behind = behind
        """The rest, with the bracket behind the id, or the quote behind the text."""
        self.is_reasoning = is_reasoning
        """Whether the text is a chat's reasoning."""

    @classmethod
    def of(cls, raw: bytes) -> Shape | None:
        """The shape of a whole event with exactly one text and at most one token id; None when it has anything else."""
        texts, ids = [*_TEXT_BEGINS.finditer(raw)], [*_IDS_BEGIN.finditer(raw)]
        if len(texts) != 1 or len(ids) > 1 or _has_more_of_engines(raw):
            return None
        begin = texts[0].end()
        text = _plain_text(raw, begin)
        if text is None:
            return None
        is_reasoning = texts[0][1].startswith(b"reasoning")
        if not ids:
            return cls(raw[:begin], None, raw[text.end() :], is_reasoning=is_reasoning)
        number = _one_id(raw, ids[0].end())
        if number is None or number.start() < text.end():
            return None
        return cls(raw[:begin], raw[text.end() : number.start()], raw[number.end() :], is_reasoning=is_reasoning)

    def is_around(self, raw: bytes) -> bool:
        """Is an event like this at its beginning and its end, whatever is between?"""
        return raw.startswith(self.head) and raw.endswith(self.behind)


def _has_more_of_engines(raw: bytes) -> bool:
    """Whether an event has members for engines alone that are more than `NO_KV_PARAMS` at its end."""
    before, _, behind = raw.rpartition(NO_KV_PARAMS)
    return names_engine_members(before if behind == _END else raw)
