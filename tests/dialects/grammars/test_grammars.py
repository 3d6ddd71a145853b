"""Which grammar an answer has: the prompt tells, and what one family means by a token id means nothing in another."""

from __future__ import annotations

import orjson
import pytest

from proxy.dialects.grammars import PROMPT_TAIL_TOKENS, UNRECOGNISED_GRAMMAR, KimiGrammar, recognise_grammar
from proxy.sim.model.tokenizer import encode_text

HEADER = encode_text("<|im_assistant|>assistant<|im_middle|>")


@pytest.mark.parametrize("before", [0, 1, 5, 100_000])
@pytest.mark.parametrize("behind", [0, PROMPT_TAIL_TOKENS - len(HEADER)])
@pytest.mark.parametrize("indent", [None, orjson.OPT_INDENT_2])
def test_end_of_the_prompt_tells_the_grammar(before: int, behind: int, indent: int | None) -> None:
    prompt = orjson.dumps([7] * before + HEADER + [7] * behind, option=indent)
    assert isinstance(recognise_grammar(prompt), KimiGrammar)


def test_header_far_before_the_end_is_not_recognised() -> None:
    assert recognise_grammar(orjson.dumps(HEADER + [7] * PROMPT_TAIL_TOKENS)) is UNRECOGNISED_GRAMMAR


@pytest.mark.parametrize("prompt", [None, b"", b"[]", b"[1,2]", b"[163588]", b"[null]", b'["a",{}]', b"[1.5e9,-3]"])
def test_of_other_prompts_no_token_id_means_anything(prompt: bytes | None) -> None:
    grammar = recognise_grammar(prompt)
    assert grammar is UNRECOGNISED_GRAMMAR
    assert not grammar.has_tools
    assert not [*grammar.reasoning_end_ids, *grammar.tools_begin_ids]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>a</think>b<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n", None),
    ],
)
def test_most_models_reason_between_the_same_tags(prompt: str, opens: bool | None) -> None:
    assert UNRECOGNISED_GRAMMAR.begins_with_reasoning(prompt) is opens


def test_markers_of_other_families_are_text() -> None:
    parser = UNRECOGNISED_GRAMMAR.make_parser(
        in_reasoning=True, calls_tools=True, shows_blanks=False, reports_half_calls=True, one_call=False
    )
    assert parser.parse_text("a</think>b<|tool_calls_section_begin|>c", finished=True) == {
        "reasoning": "a",
        "content": "b<|tool_calls_section_begin|>c",
    }
