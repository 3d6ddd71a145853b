"""Grammars: how a family of models writes reasoning and tool calls, which continuing its answers needs.

A Grammar has no state and does no IO; an AnswerParser is the state of one answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class AnswerParser(ABC):
    """Makes chat deltas of one answer's text, however that is cut, as the engines' parser does."""

    __slots__ = ()

    reads_markers: ClassVar[bool] = True
    """It needs the text with its special tokens, exactly as the model wrote them."""

    @property
    @abstractmethod
    def unsaid(self) -> str:
        """The part of the present text that is read and not yet in a delta, such as half a marker."""

    @property
    @abstractmethod
    def in_tools(self) -> bool:
        """The text so far ends inside the part of an answer that calls tools."""

    @abstractmethod
    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """Take the next text and return what it says: an OpenAI chat delta, {} for nothing. `finished`: no text will
        follow.
        """


class Grammar(ABC):
    """How a family of models writes. It is recognised by the prompt, before a model has written anything."""

    reasoning_end_ids: ClassVar[Sequence[int]] = ()
    """Token ids of the markers that end reasoning; empty where they are not known."""
    tools_begin_ids: ClassVar[Sequence[int]] = ()
    """Token ids of the markers that begin tool calls; empty where they are not known."""
    has_tools: ClassVar[bool] = True
    """Its parser reads tool calls."""

    @abstractmethod
    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Return whether the last token ids of a prompt are of this family's tokenizer and chat template."""

    @abstractmethod
    def opens_reasoning(self, prompt_tail: str) -> bool | None:
        """Whether an answer behind this end of a prompt begins in reasoning; None: nothing in it tells. Special tokens
        are in the text.
        """

    @abstractmethod
    def parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, tells_half_calls: bool, one_call: bool
    ) -> AnswerParser:
        """For one answer. `in_reasoning`: it begins there. `calls_tools`: the request has tools; otherwise their
        markers are text. `shows_blanks`: engines show white space at the end of reasoning and before the first content
        at once. `tells_half_calls`: a call whose name is not complete at the end of the answer is told. `one_call`:
        further ones are not told.
        """


class Verbatim(AnswerParser):
    """The parser of answers whose engines have none: all text is content."""

    __slots__ = ()

    reads_markers = False
    unsaid = ""
    in_tools = False

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """See AnswerParser."""
        return {"content": text} if text or finished else {}
