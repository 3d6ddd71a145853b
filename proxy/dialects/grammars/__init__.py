"""How families of models write reasoning and tool calls: one file per grammar, and the table of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from proxy.dialects.grammars.kimi import Kimi
from proxy.dialects.grammars.think_tags import ThinkTags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.dialects.grammars.base import Grammar

GRAMMARS: Final[Sequence[Grammar]] = (Kimi(),)
"""The first that recognises the prompt is the answer's."""

UNRECOGNISED: Final = ThinkTags()

PROMPT_TAIL_TOKENS: Final = 64
"""Where the header of the assistant's turn is found, with room for a template that says more."""
# They are that long if a tokenizer has 2**32 ids, and each is written behind a comma and a space.
_PROMPT_TAIL_BYTES: Final = 12 * PROMPT_TAIL_TOKENS

_numbers: Final = re.compile(rb"[0-9]+").findall


def grammar_of(prompt_ids: bytes | None) -> Grammar:
    """The grammar of the answer to this prompt: its token ids, a JSON array; None where they are not known."""
    if prompt_ids is None:
        return UNRECOGNISED
    tail = [int(number) for number in _numbers(prompt_ids[-_PROMPT_TAIL_BYTES:])[-PROMPT_TAIL_TOKENS:]]
    return next((grammar for grammar in GRAMMARS if grammar.recognises(tail)), UNRECOGNISED)
