"""The model is a pure function of the ids so far, and its text looks like text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sim.model import Writer
from proxy.sim.tokenizer import (
    CALL_BEGIN,
    END,
    MARKERS,
    SECTION_BEGIN,
    THINK_END,
    Detokenizer,
    decode,
    encode,
    render_chat,
)

ids = st.lists(st.one_of(st.integers(0, 255), st.just(0x20), st.sampled_from(sorted(MARKERS))), min_size=1, max_size=60)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}, "day": {}}}}}


def out(prompt: list[int], count: int, *, tools: bool = False, eos_after: int | None = None) -> list[int]:
    writer = Writer(prompt, tools=tools, eos_after=eos_after)
    return [writer.next() for _ in range(count)]


@given(prompt=ids, cut=st.integers(0, 150), tools=st.booleans(), eos_after=st.sampled_from([None, 1, 20]))
@settings(max_examples=150, deadline=None)
def test_resuming_anywhere_continues_exactly(prompt: list[int], cut: int, tools: bool, eos_after: int | None) -> None:
    whole = out(prompt, 150, tools=tools, eos_after=eos_after)
    assert out(prompt + whole[:cut], 150 - cut, tools=tools, eos_after=eos_after) == whole[cut:]


@given(cut=st.integers(0, 250))
@settings(max_examples=60, deadline=None)
def test_resuming_in_reasoning_or_a_tool_call_continues_exactly(cut: int) -> None:
    body = {
        "messages": [{"role": "user", "content": "Wetter in Köln?"}],
        "tools": [WEATHER, WEATHER],
        "chat_template_kwargs": {"thinking": True},
    }
    prompt = render_chat(body)
    whole = out(prompt, 250, tools=True)
    assert {THINK_END, SECTION_BEGIN, CALL_BEGIN, END} <= set(whole)
    assert out(prompt + whole[:cut], 250 - cut, tools=True) == whole[cut:]


def test_other_prompts_get_other_answers() -> None:
    assert out(encode("one "), 60) != out(encode("two "), 60)


def test_text_is_valid_and_has_characters_of_several_tokens() -> None:
    text = decode(out(encode("Say something: "), 2000))
    assert "\ufffd" not in text[:-1]
    assert any(ord(character) > 127 for character in text)
    assert len(text) < 2000


def test_a_character_split_over_tokens_appears_with_its_last_token() -> None:
    detokenizer = Detokenizer()
    assert [detokenizer.feed(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_the_answer_ends_by_itself_only_when_asked() -> None:
    prompt = render_chat({"messages": [{"role": "user", "content": "hi"}]})
    assert END not in out(prompt, 500)
    ended = out(prompt, 500, eos_after=20)
    assert 20 <= ended.index(END) <= 40


def test_media_become_a_fixed_number_of_placeholders() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    with_image = render_chat({"messages": [{"role": "user", "content": parts}]})
    without = render_chat({"messages": [{"role": "user", "content": "ab"}]})
    assert len(with_image) == len(without) + 64
