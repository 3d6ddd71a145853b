"""The text of token ids, which only engines know: those who need it yield the ids and are sent the text. No IO."""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import orjson

from proxy.dialects.grammars import PROMPT_TAIL_TOKENS
from proxy.resume.resumption import CannotResume

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.resume.transcript import Transcript

# How many kinds of special tokens an answer may have that its text does not show.
_MAX_HIDDEN: Final = 4
# What the text of an unfinished character ends in.
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"

# Such as `<|im_end|>`, `</s>` and `[EOS]`.
_MAY_BE_SPECIAL: Final = re.compile(r"<.+>|\[.+\]", re.DOTALL).search

T = TypeVar("T")
Steps = Generator[Sequence[int], str | None, T]
"""Yields token ids, is sent their text, None if that cannot be had, and returns a T."""


def text_of(transcript: Transcript, kept: int, begin: int = 0, hidden: Collection[int] = ()) -> Steps[str]:
    """The text of an answer's first `kept` ids, from the one at `begin` on, without `hidden` ones.

    Raises CannotResume.
    """
    ids = transcript.ids[begin:kept]
    if hidden:
        ids = array(ids.typecode, [token for token in ids if token not in hidden])
    text = (yield ids) if ids else ""
    if text is None:
        raise CannotResume("no engine told the text of the answer's token ids")
    return text


def hidden_ids(transcript: Transcript, kept: int, text: str, shown: str) -> Steps[set[int]]:
    """The special tokens among an answer's first `kept` ids that its text, `shown`, does not have.

    Empty if it has all of them, or if they are not found. `text` is that of the ids. A search for the first such token
    halves the answer time and again, and so takes some ten questions. Raises CannotResume.
    """
    hidden: set[int] = set()
    while not _agree(text, shown):
        if len(hidden) == _MAX_HIDDEN or not _MAY_BE_SPECIAL(text):
            return set()
        # The text of the first `low` ids agrees with what was shown, and that of the first `high` ids does not.
        low, high = 0, kept
        while high - low > 1:
            middle = (low + high) // 2
            agrees = _agree((yield from text_of(transcript, middle, hidden=hidden)), shown)
            low, high = (middle, high) if agrees else (low, middle)
        if not _MAY_BE_SPECIAL((yield from text_of(transcript, high, low))):
            return set()
        hidden.add(transcript.ids[low])
        text = yield from text_of(transcript, kept, hidden=hidden)
    return hidden


def _agree(text: str, shown: str) -> bool:
    """Whether one of two texts is the beginning of the other, but for an unfinished character."""
    text = text.rstrip(_UNFINISHED)
    return shown.startswith(text) or text.startswith(shown)


def prompt_tail(transcript: Transcript) -> Steps[str]:
    """The text of the end of the prompt. Raises CannotResume."""
    assert transcript.prompt_ids is not None
    tail = yield orjson.loads(transcript.prompt_ids)[-PROMPT_TAIL_TOKENS:]
    if tail is None:
        raise CannotResume("no engine told the text of the prompt's token ids")
    return tail
