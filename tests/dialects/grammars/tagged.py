"""A grammar that is not in the table: its models write like Kimi's, but with other tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from proxy.dialects import grammars as kimi
from proxy.dialects.grammars import AnswerParser, Grammar
from proxy.sim.model import tokenizer

TAGS: Final = {
    tokenizer.THINK: "<reason>",
    tokenizer.THINK_END: "</reason>",
    tokenizer.SECTION_BEGIN: "<calls>",
    tokenizer.SECTION_END: "</calls>",
    tokenizer.CALL_BEGIN: "<call>",
    tokenizer.ARGUMENT_BEGIN: "<arguments>",
    tokenizer.CALL_END: "</call>",
}
_SPELLED: Final = {tag: tokenizer.MARKERS[token] for token, tag in TAGS.items()}
_HALF_TAGS: Final = frozenset(tag[:end] for tag in _SPELLED for end in range(1, len(tag)))


class Tagged(Grammar):
    """Its chat template begins turns as Kimi's does."""

    reasoning_end_ids = (tokenizer.THINK_END, tokenizer.SECTION_BEGIN)
    tools_begin_ids = (tokenizer.SECTION_BEGIN,)

    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Recognise the header of the assistant's turn."""
        return tokenizer.ASSISTANT in prompt_tail

    def begins_with_reasoning(self, prompt_tail: str) -> bool | None:
        """Return whether the nearest tag opens reasoning."""
        opened, closed = prompt_tail.rfind("<reason>"), prompt_tail.rfind("</reason>")
        return None if opened == closed else opened > closed

    def make_parser(self, **reading: bool) -> AnswerParser:
        """Return a parser of the same answers as Kimi's, with other tags."""
        return _TaggedParser(kimi.KimiGrammar().make_parser(**reading))


class _TaggedParser(AnswerParser):
    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._half_tag = ""

    @property
    def held_text(self) -> str:
        return self._parser.held_text + self._half_tag

    @property
    def is_in_tool_section(self) -> bool:
        return self._parser.is_in_tool_section

    def parse_text(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        text = self._half_tag + text
        begin = text.rfind("<")
        is_half = begin >= 0 and text[begin:] in _HALF_TAGS and not finished
        self._half_tag = text[begin:] if is_half else ""
        text = text.removesuffix(self._half_tag)
        for tag, marker in _SPELLED.items():
            text = text.replace(tag, marker)
        return self._parser.parse_text(text, finished=finished)
