"""Removes quotations of a request from an engine's error message, so that a log can have the message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE_CHARACTERS: Final = 8
_STRIDE: Final = 5
RUN_CHARACTERS: Final = _PIECE_CHARACTERS + _STRIDE - 1
"""Length from which a text that occurs in the message and in the request is always a quotation.

Each such text contains one of the pieces, which begin at every fifth character of the request.
"""
_MIN_CHARACTERS: Final = 3
"""The same for a whole string of the request, and for a word with a digit."""
_MAX_TEXT_CHARACTERS: Final = 500_000
"""Length of the texts up to which a message is searched for them, so that it takes a few hundredths of a second."""
_ELLIPSIS: Final = "…"
_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\([nrtfb])|\\(.)")
_CODED_WORD: Final = re.compile(r"[^\W_]*\d[^\W_]*")


def without_quotations(message: str, texts: Sequence[str]) -> str:
    """Return a message in which an ellipsis replaces each part that also occurs in one of the texts.

    Case and the kind of white space do not matter. Escapes such as those of JSON are read first. Returns an empty text
    if the texts are too long to search, or if nothing but quotations remains.
    """
    if sum(map(len, texts)) > _MAX_TEXT_CHARACTERS:
        return ""
    message = _plain(_ESCAPE.sub(_unescaped, message))
    folded = _fold(message)
    searched = [_plain(text).casefold() for text in texts]
    whole = "\0".join(searched)  # a character that no text contains any more
    pieces = {whole[start : start + _PIECE_CHARACTERS] for start in range(0, len(whole), _STRIDE)}
    quoted = bytearray(len(folded))
    for start in range(len(folded) - _PIECE_CHARACTERS + 1):
        if folded[start : start + _PIECE_CHARACTERS] in pieces:  # with the characters beside it that no piece covers
            _mark(quoted, start - _STRIDE + 1, start + RUN_CHARACTERS)
    for text in {text for text in searched if _MIN_CHARACTERS <= len(text) < RUN_CHARACTERS}:
        for found in re.finditer(re.escape(text), folded):
            _mark(quoted, *found.span())
    for found in _CODED_WORD.finditer(folded):
        if len(found[0]) >= _MIN_CHARACTERS and found[0] in whole:
            _mark(quoted, *found.span())
    return _cut_out(message, quoted)


def _fold(message: str) -> str:
    """Return the message without differences of case, and with the same length."""
    return "".join(folded if len(folded := letter.casefold()) == 1 else letter for letter in message)


def _plain(text: str) -> str:
    """Return a text with one space for each run of white space and of characters that cannot be printed."""
    text = " ".join(text.split())
    if not text.isprintable():
        text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text


def _unescaped(found: re.Match[str]) -> str:
    code, byte, control, other = found.groups()
    if control:
        return " "
    return other or chr(int(code or byte, 16))


def _mark(quoted: bytearray, start: int, end: int) -> None:
    start, end = max(0, start), min(end, len(quoted))
    quoted[start:end] = b"\1" * (end - start)


def _cut_out(message: str, quoted: bytearray) -> str:
    """Return the message with an ellipsis for each marked run."""
    parts, is_empty = [], True
    for start, letter in enumerate(message):
        if not quoted[start]:
            parts.append(letter)
            is_empty &= not letter.isalnum()
        elif not start or not quoted[start - 1]:
            parts.append(_ELLIPSIS)
    return "" if is_empty else "".join(parts).strip()
