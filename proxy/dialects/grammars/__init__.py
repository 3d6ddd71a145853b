"""How families of models write reasoning and tool calls: one file per grammar, and the table of them.

ThinkTags is the grammar of all models that no other one recognises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from proxy.dialects.grammars.base import Grammar
from proxy.dialects.grammars.kimi import THINK, THINK_END, Kimi, KimiParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.dialects.grammars.base import AnswerParser


class ThinkTags(Grammar):
    """Reasoning stands, if anywhere, between the tags of most models.

    There are no token ids, which are different ones in each tokenizer, and no tool calls. What a client has is compared
    with what this makes of the answer, so a model that writes otherwise is not continued as a completion; it is never
    continued wrongly.
    """

    has_tools = False

    def recognises(self, prompt_tail: Sequence[int]) -> bool:
        """Everything."""
        return True

    def opens_reasoning(self, prompt_tail: str) -> bool | None:
        """See Grammar. The nearest tag decides."""
        opened, closed = prompt_tail.rfind(THINK), prompt_tail.rfind(THINK_END)
        return None if opened == closed else opened > closed

    def parser(
        self, *, in_reasoning: bool, calls_tools: bool, shows_blanks: bool, tells_half_calls: bool, one_call: bool
    ) -> AnswerParser:
        """See Grammar. Between these tags the Kimi K2 family reasons, too."""
        return KimiParser(in_reasoning=in_reasoning, calls_tools=False, shows_blanks=shows_blanks)


GRAMMARS: Final[Sequence[Grammar]] = (Kimi(),)
"""The first that recognises the prompt is the answer's."""

UNRECOGNISED: Final = ThinkTags()

PROMPT_TAIL_TOKENS: Final = 64
"""Tokens at the end of a prompt that have the header of the assistant's turn, also with long templates."""
# They are that long if a tokenizer has 2**32 ids, and each is written behind a comma and a space.
_PROMPT_TAIL_BYTES: Final = 12 * PROMPT_TAIL_TOKENS

_numbers: Final = re.compile(rb"[0-9]+").findall


def grammar_of(prompt_ids: bytes | None) -> Grammar:
    """The grammar of the answer to this prompt: its token ids, a JSON array; None where they are not known."""
    if prompt_ids is None:
        return UNRECOGNISED
    tail = [int(number) for number in _numbers(prompt_ids[-_PROMPT_TAIL_BYTES:])[-PROMPT_TAIL_TOKENS:]]
    return next((grammar for grammar in GRAMMARS if grammar.recognises(tail)), UNRECOGNISED)
