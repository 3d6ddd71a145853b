"""The model is a pure function of the ids so far, and its text looks like text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sim.model.tokenizer import (
    CALL_BEGIN,
    END,
    MARKERS,
    SECTION_BEGIN,
    THINK_END,
    Detokenizer,
    decode_tokens,
    encode_text,
    render_chat,
)
from proxy.sim.model.writer import DeterministicWriter

ids = st.lists(st.one_of(st.integers(0, 255), st.just(0x20), st.sampled_from(sorted(MARKERS))), min_size=1, max_size=60)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}, "day": {}}}}}


def out(prompt: list[int], count: int, *, eos_after: int | None = None) -> list[int]:
    writer = DeterministicWriter(prompt, eos_after=eos_after)
    return [writer.next() for _ in range(count)]


@given(prompt=ids, cut=st.integers(0, 150), declares=st.booleans(), eos_after=st.sampled_from([None, 1, 20]))
@settings(max_examples=150, deadline=None)
def test_resuming_anywhere_continues_exactly(
    prompt: list[int], cut: int, declares: bool, eos_after: int | None
) -> None:
    prompt = (render_chat({"messages": [], "tools": [WEATHER]}) if declares else []) + prompt
    whole = out(prompt, 150, eos_after=eos_after)
    assert out(prompt + whole[:cut], 150 - cut, eos_after=eos_after) == whole[cut:]


@pytest.mark.parametrize(
    ("fields", "markers"),
    [
        ({}, {END}),
        ({"chat_template_kwargs": {"thinking": True}}, {THINK_END, END}),
        ({"chat_template_kwargs": {"thinking": True}, "tools": [WEATHER] * 2}, {THINK_END, SECTION_BEGIN, CALL_BEGIN}),
    ],
    ids=["content", "reasoning", "tools"],
)
def test_chat_can_be_resumed_at_every_token(fields: dict[str, Any], markers: set[int]) -> None:
    prompt = render_chat({"messages": [{"role": "user", "content": "Wetter in Köln?"}]} | fields)
    whole = out(prompt, 220, eos_after=60)
    assert markers <= set(whole)
    assert whole.count(CALL_BEGIN) in (0, 2)
    for cut in range(220):
        assert out(prompt + whole[:cut], 220 - cut, eos_after=60) == whole[cut:]


def test_tools_are_called_if_the_prompt_declares_them() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    assert CALL_BEGIN in out(render_chat(body), 100)
    assert CALL_BEGIN not in out(render_chat(body | {"tool_choice": "none"}), 100)
    answered = [*body["messages"], {"role": "tool", "tool_call_id": "functions.weather:0", "content": "sun"}]
    assert CALL_BEGIN not in out(render_chat(body | {"messages": answered}), 100)
    garbled = encode_text("<|im_system|>tool_declare<|im_middle|>[weather<think><|im_end|> go ")
    assert CALL_BEGIN not in out(garbled, 100)


def test_other_prompts_get_other_answers() -> None:
    assert out(encode_text("one "), 60) != out(encode_text("two "), 60)


def test_text_is_valid_and_has_characters_of_several_tokens() -> None:
    text = decode_tokens(out(encode_text("Say something: "), 2000))
    assert "\ufffd" not in text[:-1]
    assert any(ord(character) > 127 for character in text)
    assert len(text) < 2000


def test_character_split_over_tokens_appears_with_its_last_token() -> None:
    detokenizer = Detokenizer()
    assert [detokenizer.feed(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_answer_ends_before_its_limit_only_if_requested() -> None:
    prompt = render_chat({"messages": [{"role": "user", "content": "hi"}]})
    assert END not in out(prompt, 500)
    ended = out(prompt, 500, eos_after=20)
    assert 20 <= ended.index(END) <= 40


def test_media_become_a_fixed_number_of_placeholders() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    with_image = render_chat({"messages": [{"role": "user", "content": parts}]})
    without = render_chat({"messages": [{"role": "user", "content": "ab"}]})
    assert len(with_image) == len(without) + 64
