"""The text of models that no other grammar recognises: reasoning stands, if anywhere, between the tags of most models.

What a client has is compared with what this makes of the answer, so a model that writes otherwise is not continued as a
completion; it is never continued wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.dialects.grammars.base import Grammar
from proxy.dialects.grammars.kimi import THINK, THINK_END, KimiParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.dialects.grammars.base import AnswerParser


class ThinkTags(Grammar):
    """Without token ids, which are different ones in each tokenizer, and without tool calls."""

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
