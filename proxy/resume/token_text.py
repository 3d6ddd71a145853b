"""The text of token ids, which only engines know: those who need it yield the ids and are sent the text. No IO."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

import orjson

from proxy.dialects.grammars import PROMPT_TAIL_TOKENS
from proxy.resume.resumption import CannotResume

if TYPE_CHECKING:
    from proxy.resume.transcript import Transcript

T = TypeVar("T")
Steps = Generator[Sequence[int], str | None, T]
"""Yields token ids, is sent their text, None if that cannot be had, and returns a T."""


def text_of(transcript: Transcript, kept: int, begin: int = 0) -> Steps[str]:
    """The text of an answer's first `kept` ids, from the one at `begin` on. Raises CannotResume."""
    text = (yield transcript.ids[begin:kept]) if kept > begin else ""
    if text is None:
        raise CannotResume("no engine told the text of the answer's token ids")
    return text


def prompt_tail(transcript: Transcript) -> Steps[str]:
    """The text of the end of the prompt. Raises CannotResume."""
    assert transcript.prompt_ids is not None
    tail = yield orjson.loads(transcript.prompt_ids)[-PROMPT_TAIL_TOKENS:]
    if tail is None:
        raise CannotResume("no engine told the text of the prompt's token ids")
    return tail
