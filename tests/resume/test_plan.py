"""How an answer whose decoder was lost goes on: the decision in every situation, and answers without a trace of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from proxy.common.terms import Action
from proxy.dialects.grammars import KimiParser
from proxy.dialects.segment import Meaning
from proxy.gateway.delivery import Delivery
from proxy.resume.engines import VLLM, CannotResume
from proxy.resume.overlap import AnswerMismatch
from proxy.resume.plan import plan_resumption
from proxy.resume.situation import ChatTokenApi, Resumption, Situation
from proxy.resume.transcript import Transcript
from proxy.sim.engine import SimulatedEngine
from proxy.sim.model.tokenizer import ARGUMENT_BEGIN, CALL_BEGIN, SECTION_BEGIN, Detokenizer, decode_tokens, encode_text
from proxy.wire import document
from proxy.wire.openai import Api
from proxy.wire.sse import EventSplitter
from tests.asking import ask, request
from tests.canned import data
from tests.gateway.test_delivery import DONE, ENGINE, THINKING, TOOLS, WITH_USAGE, call_of, take
from tests.resume.test_seam import STOP_STRINGS, STOP_TEXTS, Found, engine_chunks, naive_engine
from tests.selection.covering import values

PROMPT = encode_text("<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>")
CHAT = request(Api.CHAT, stream=True, max_tokens=100)
COMPLETION = request(Api.COMPLETIONS, stream=True, max_tokens=100)

Told = tuple[str, list[int]]


def answered(
    api: Api, ids: Sequence[int], *, in_reasoning: bool = False, prompt: list[int] | None = None
) -> Transcript:
    """Return a transcript of these IDs, which arrived one by one as from an engine with parsers."""
    transcript = Transcript()
    transcript.prompt_ids = orjson.dumps(PROMPT if prompt is None else prompt)
    parser, detokenizer = KimiParser(in_reasoning=in_reasoning), Detokenizer(keep_markers=True)
    for token in ids:
        text = detokenizer.feed(token)
        transcript.add_choice({"text": text} if api is Api.COMPLETIONS else {"delta": parser.parse_text(text)}, [token])
    return transcript


def situation(body: dict[str, Any], ids: Sequence[int], *, in_reasoning: bool = False, **facts: Any) -> Situation:
    call = VLLM.make_observable_call(call_of(body))
    return Situation(
        **{
            "engine": VLLM,
            "repeats_seeded_answers": True,
            "call": call,
            "answer_head": {"id": "x"},
            "transcript": answered(call.api, ids, in_reasoning=in_reasoning),
            "is_answer_shown": True,
            "shows_ids": False,
            "dropped_ids": (),
            "decoder_count": 1,
            "chat_token_api": ChatTokenApi.NATIVE_MEMBER,
            "shows_blanks": False,
            "keeps_length": True,
            "max_model_len": 1000,
            **facts,
        }
    )


def decided(
    situation: Situation,
    text_of: Callable[[Sequence[int]], str | None] = lambda ids: decode_tokens(ids, keep_markers=True),
) -> tuple[Resumption, int]:
    """Return the decision, and how often it needed the text of token IDs."""
    steps, asked = plan_resumption(situation), 0
    try:
        ids = next(steps)
        while True:
            asked += 1
            ids = steps.send(text_of(ids))
    except StopIteration as end:
        return end.value, asked


def body_of(resumption: Resumption) -> Any:
    """Return the members that the next engine receives on both legs."""
    assert resumption.call is not None
    changes = {"kv_transfer_params": dict(resumption.call.kv_params)} if resumption.call.kv_params else {}
    return orjson.loads(document.join_body(resumption.call.make_body(changes)))


def nobody_tells(ids: Sequence[int]) -> None:
    return None


HELLO = encode_text("Hello ")
LONG = encode_text("river " * 11)

# Which way


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize(("count", "action"), [(0, "restart"), (1, "restart"), (63, "restart"), (64, "goes on")])
def test_short_answer_restarts_when_the_client_has_nothing(body: dict[str, Any], count: int, action: str) -> None:
    here = situation(body, LONG[:count], is_answer_shown=False)
    resumption, asked = decided(here)
    assert (resumption.action is Action.RESTART) is (action == "restart")
    if action == "restart":
        assert resumption == Resumption(Action.RESTART, here.call)
        assert asked == 0


def test_short_answer_continues_when_the_client_has_a_part() -> None:
    assert decided(situation(COMPLETION, HELLO[:1]))[0].action is Action.COMPLETION_TOKENS


SECTION = [SECTION_BEGIN, CALL_BEGIN, *encode_text("functions.f:0"), ARGUMENT_BEGIN]
GREEDY: dict[str, Any] = {"temperature": 0}
WAYS: list[tuple[str, dict[str, Any], list[int], dict[str, Any], Action | None]] = [
    ("a completion", COMPLETION, HELLO, {}, Action.COMPLETION_TOKENS),
    (
        "a completion, whatever chats can",
        COMPLETION,
        HELLO,
        {"chat_token_api": "completions"},
        Action.COMPLETION_TOKENS,
    ),
    ("content", CHAT, HELLO, {}, Action.CHAT_TOKENS),
    ("content, private key", CHAT, HELLO, {"chat_token_api": "ascend_private"}, Action.CHAT_TOKENS),
    ("content, old engines", CHAT, HELLO, {"chat_token_api": "completions"}, Action.RAW_TOKENS),
    ("reasoning", CHAT, HELLO, {"in_reasoning": True}, Action.CHAT_TOKENS),
    ("reasoning, old engines", CHAT, HELLO, {"in_reasoning": True, "chat_token_api": "completions"}, Action.RAW_TOKENS),
    ("a call begins", CHAT | {"tools": TOOLS}, HELLO + SECTION[:1], {}, Action.ROLL_BACK),
    ("the name of a call", CHAT | {"tools": TOOLS}, HELLO + SECTION[:5], {}, Action.ROLL_BACK),
    (
        "a call begins, old engines",
        CHAT | {"tools": TOOLS},
        HELLO + SECTION[:1],
        {"chat_token_api": "completions"},
        Action.RAW_TOKENS,
    ),
    ("a call is told", CHAT | {"tools": TOOLS}, HELLO + SECTION, {}, Action.SUFFIX),
    ("arguments", CHAT | {"tools": TOOLS}, HELLO + SECTION + encode_text('{"a"'), {}, Action.SUFFIX),
    (
        "arguments, old engines",
        CHAT | {"tools": TOOLS},
        HELLO + SECTION + encode_text("{"),
        {"chat_token_api": "completions"},
        Action.SUFFIX,
    ),
    (
        "behind all calls",
        CHAT | {"tools": TOOLS},
        HELLO + SECTION + encode_text("{}<|tool_call_end|><|tool_calls_section_end|>"),
        {},
        Action.RAW_TOKENS,
    ),
    ("no prompt ids", COMPLETION, HELLO, {"prompt_ids": None}, None),
    ("no prompt ids, greedy", COMPLETION | GREEDY, HELLO, {"prompt_ids": None}, Action.REPLAY),
    ("no prompt ids, seeded", COMPLETION | {"seed": 7}, HELLO, {"prompt_ids": None}, Action.REPLAY),
    ("no prompt ids, a little warm", COMPLETION | {"temperature": 0.1}, HELLO, {"prompt_ids": None}, None),
    ("no ids", COMPLETION | GREEDY, [], {}, Action.REPLAY),
    ("a prompt of embeddings", COMPLETION | {"prompt_embeds": "AAAA"}, HELLO, {}, None),
    ("a picture", request(Api.CHAT, [{"type": "image_url", "image_url": {}}]), HELLO, {}, None),
    ("a picture, greedy", request(Api.CHAT, [{"type": "image_url"}], **GREEDY), HELLO, {}, Action.REPLAY),
    ("text in parts", request(Api.CHAT, [{"type": "text", "text": "Hi"}]), HELLO, {}, Action.CHAT_TOKENS),
    ("JSON", CHAT | {"response_format": {"type": "json_object"}}, HELLO, {}, None),
    ("JSON, greedy", CHAT | {"response_format": {"type": "json_object"}} | GREEDY, HELLO, {}, Action.REPLAY),
    ("JSON of a completion", COMPLETION | {"structured_outputs": {"json": {}}}, HELLO, {}, None),
    ("text by a format", CHAT | {"response_format": {"type": "text"}}, HELLO, {}, Action.CHAT_TOKENS),
    ("a tool by force", CHAT | {"tools": TOOLS, "tool_choice": "required"}, HELLO, {}, None),
    ("a named tool", CHAT | {"tools": TOOLS, "tool_choice": {"type": "function"}}, HELLO, {}, None),
    ("a strict tool", CHAT | {"tools": [{"function": {"name": "f", "strict": True}}]}, HELLO, {}, None),
    ("a tool by choice", CHAT | {"tools": TOOLS, "tool_choice": "auto"}, HELLO, {}, Action.CHAT_TOKENS),
    (
        "JSON, before its grammar",
        CHAT | {"response_format": {"type": "json_object"}},
        HELLO,
        {"in_reasoning": True},
        Action.CHAT_TOKENS,
    ),
    (
        "JSON, before its grammar, old engines",
        CHAT | {"response_format": {"type": "json_object"}},
        HELLO,
        {"in_reasoning": True, "chat_token_api": "completions"},
        None,
    ),
]


@pytest.mark.parametrize(("body", "ids", "facts", "action"), [way[1:] for way in WAYS], ids=[way[0] for way in WAYS])
def test_action_depends_on_the_situation(
    body: dict[str, Any], ids: list[int], facts: dict[str, Any], action: Action | None
) -> None:
    facts = dict(facts)
    if "chat_token_api" in facts:
        facts["chat_token_api"] = ChatTokenApi(facts["chat_token_api"])
    forgets_prompt = "prompt_ids" in facts and facts.pop("prompt_ids") is None
    here = situation(body, ids, **facts)
    if forgets_prompt:
        here.transcript.prompt_ids = None
    if action is None:
        with pytest.raises(CannotResume):
            decided(here)
        resumption, _ = decided(situation(body, ids, **facts, is_answer_shown=False))
        assert resumption.action is Action.RESTART
        return
    resumption, _ = decided(here)
    assert resumption.action is action
    if action is Action.REPLAY:
        assert resumption.call is here.call
        assert resumption.prompt_ids is None
        assert resumption.kept_ids == 0


def test_unresumable_answer_restarts_when_the_client_has_nothing() -> None:
    here = situation(COMPLETION | {"structured_outputs": {}}, LONG, is_answer_shown=False)
    assert decided(here)[0] == Resumption(Action.RESTART, here.call)


@pytest.mark.parametrize(
    ("body", "ids", "chats"),
    [
        (COMPLETION, HELLO, "native"),
        (COMPLETION | {"stop": ["."]}, HELLO, "native"),  # which no text can be half of
        (CHAT, HELLO, "native"),
        (CHAT, HELLO, "ascend_private"),
    ],
)
def test_most_answers_go_on_without_the_text_of_their_ids(body: dict[str, Any], ids: list[int], chats: str) -> None:
    assert decided(situation(body, ids, chat_token_api=ChatTokenApi(chats)), nobody_tells)[0].kept_ids == len(ids)


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        (COMPLETION | {"stop": ["STOP"]}, {}),
        (CHAT, {"chat_token_api": ChatTokenApi.COMPLETIONS_API}),
        (CHAT | {"tools": TOOLS}, {"ids": HELLO + SECTION}),
    ],
)
def test_answer_that_needs_the_text_of_its_ids_cannot_go_on_without(
    body: dict[str, Any], facts: dict[str, Any]
) -> None:
    ids = facts.pop("ids", HELLO)
    with pytest.raises(CannotResume, match="detokenized"):
        decided(situation(body, ids, **facts), nobody_tells)


def test_tools_need_a_grammar_that_is_known_here() -> None:
    here = situation(CHAT | {"tools": TOOLS}, HELLO, chat_token_api=ChatTokenApi.COMPLETIONS_API)
    here.transcript.prompt_ids = orjson.dumps(encode_text("<s>[INST] Hi [/INST]"))
    with pytest.raises(CannotResume, match="not known here"):
        decided(here)
    for body in (CHAT, CHAT | {"tools": TOOLS, "tool_choice": "none"}, CHAT | {"tools": []}):
        there = situation(body, HELLO, chat_token_api=ChatTokenApi.COMPLETIONS_API, transcript=here.transcript)
        assert decided(there)[0].action is Action.RAW_TOKENS


@pytest.mark.parametrize("prompt", [PROMPT, encode_text("<s>[INST] Hi [/INST]")], ids=["Kimi", "another"])
def test_tool_call_begins_where_the_models_own_marker_is(prompt: list[int]) -> None:
    """163595 begins tool calls in Kimi's vocabulary, and is a word in a larger one."""
    here = situation(CHAT, [])
    here = replace(here, transcript=answered(Api.CHAT, HELLO, prompt=prompt))
    here.transcript.add_choice({"delta": {}}, [SECTION_BEGIN])
    assert decided(here)[0].action is (Action.ROLL_BACK if prompt is PROMPT else Action.CHAT_TOKENS)


# The client's part of the answer


def test_ids_that_showed_nothing_are_generated_again() -> None:
    ids = encode_text("Hi 日")
    for cut in (4, 5):
        resumption, _ = decided(situation(COMPLETION, ids[:cut]))
        assert resumption.kept_ids == 3
        assert body_of(resumption)["prompt"] == PROMPT + ids[:3]
    assert decided(situation(COMPLETION, ids))[0].kept_ids == 6


def test_chat_as_completion_is_cut_before_an_unfinished_character() -> None:
    for cut in (4, 5):
        resumption, _ = decided(
            situation(CHAT, encode_text("Hi 日")[:cut], chat_token_api=ChatTokenApi.COMPLETIONS_API)
        )
        assert resumption.kept_ids == 3


@pytest.mark.parametrize("chats", list(ChatTokenApi))
def test_unfinished_character_at_the_very_beginning_is_generated_again(chats: ChatTokenApi) -> None:
    """The client has seen no text, but its ids."""
    here = situation(CHAT | {"return_token_ids": True}, encode_text("日")[:2], shows_ids=True, chat_token_api=chats)
    resumption, _ = decided(here)
    assert resumption.kept_ids == 0
    assert resumption.seam is not None
    assert resumption.seam.swallowed_ids == encode_text("日")[:2]


def test_answer_that_has_shown_nothing_yet_may_have_begun_in_reasoning() -> None:
    """The prompt decides, not the answer."""
    begun = PROMPT + encode_text("<think>")
    transcript = answered(Api.CHAT, encode_text("日")[:2], in_reasoning=True, prompt=begun)
    here = situation(
        CHAT | {"return_token_ids": True},
        [],
        transcript=transcript,
        shows_ids=True,
        chat_token_api=ChatTokenApi.COMPLETIONS_API,
    )
    resumption, _ = decided(here)
    assert resumption.seam is not None
    choice = {"index": 0, "text": "日 then", "finish_reason": None, "token_ids": encode_text("日 then")}
    ((chunk, _),) = resumption.seam.rewrite_chunk({"choices": [choice]}, recomputed=False)
    assert chunk["choices"][0]["delta"] == {"reasoning": "日 then"}


@pytest.mark.parametrize(
    ("shows_ids", "shown", "swallowed"), [(True, True, [0xE6, 0x97, 9]), (False, True, []), (True, False, [])]
)
def test_ids_that_the_client_has_are_not_sent_again(shows_ids: bool, shown: bool, swallowed: list[int]) -> None:
    ids = LONG + encode_text("日")[:2]
    here = situation(COMPLETION, ids, shows_ids=shows_ids, is_answer_shown=shown, dropped_ids=[9])
    resumption, _ = decided(here)
    assert resumption.seam is not None
    assert resumption.seam.swallowed_ids == swallowed


def chunked(*chunks: tuple[str, str]) -> Transcript:
    """Return the transcript of a completion from chunks of shown text and of text of IDs.

    A ÿ at the end stands for the first half of the character.
    """
    transcript = Transcript()
    transcript.prompt_ids = orjson.dumps(PROMPT)
    for shown, said in chunks:
        transcript.add_choice(
            {"text": shown}, [*encode_text(said[:-1]), 0xC3] if said.endswith("\xff") else encode_text(said)
        )
    return transcript


@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([("Hello", "Hello")], 5),
        ([("Hel", "Hel"), ("lo", "lo")], 5),
        ([("Hel", "Hel"), ("lo", "lo\xff")], 5),  # the last id of the chunk is the beginning of a character
        ([("Hell", "Hell"), ("o", "o\xff")], 5),
        ([("Hello", "Hello!")], 5),
    ],
)
def test_chunk_of_several_ids_may_not_have_shown_the_last(chunks: list[tuple[str, str]], kept: int) -> None:
    transcript = chunked(*chunks)
    assert decided(situation(COMPLETION, [], transcript=transcript))[0].kept_ids == kept


def test_text_that_does_not_match_the_ids_cannot_go_on() -> None:
    with pytest.raises(CannotResume, match="do not match"):
        decided(situation(COMPLETION, [], transcript=chunked(("Hello", "Hallo"))))


@pytest.mark.parametrize("fields", [{}, {"stop": ["STOP"]}], ids=["", "stop"])
@pytest.mark.parametrize("said", ["so<|im_end|>it was<|im_end|>", "<think>a [b] <c></think>so it was"])
@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_answer_whose_text_lacks_special_tokens_goes_on(
    body: dict[str, Any], said: str, fields: dict[str, Any]
) -> None:
    """The last chunk has two ids, or a stop string may begin in it, so the text decides where it ends."""
    ids = [*encode_text("word " * 100), *encode_text(said), *encode_text(" and more")]
    transcript = Transcript()
    transcript.prompt_ids = orjson.dumps(PROMPT)
    detokenizer = Detokenizer()
    for end in range(2 - len(ids) % 2, len(ids) + 1, 2):
        chunk = ids[max(0, end - 2) : end]
        text = "".join(map(detokenizer.feed, chunk))
        transcript.add_choice({"delta": {"content": text}} if body is CHAT else {"text": text}, chunk)
    here = situation(body | fields | {"max_tokens": 600}, [], transcript=transcript, parses_reasoning=False)
    resumption, asked = decided(here)
    assert resumption.action is (Action.CHAT_TOKENS if body is CHAT else Action.COMPLETION_TOKENS)
    assert resumption.kept_ids == len(ids)
    assert asked < 30


def test_plan_finds_the_text_that_a_lost_engine_held_back() -> None:
    """The engine sent the ids but not yet the text, in which a stop string may begin."""
    transcript = Transcript()
    transcript.prompt_ids = orjson.dumps(PROMPT)
    for end in range(1, 10):
        transcript.add_choice(
            {"text": "Hello wor"[max(0, end - 4) : max(0, end - 3)]}, encode_text("Hello wor"[end - 1 : end])
        )
    assert transcript.content_text == "Hello "
    resumption, asked = decided(situation(COMPLETION | {"stop": ["STOP"]}, [], transcript=transcript))
    assert asked == 1
    assert resumption.kept_ids == 9
    assert resumption.seam is not None
    assert resumption.seam.withheld_text == "wor"


@pytest.mark.parametrize(("held", "kept"), [(8, 13), (9, 13), (12, 13)])
def test_no_engine_holds_back_more_than_stop_strings_may_be_the_beginning_of(held: int, kept: int) -> None:
    """Twice, because an answer that was joined before may be held back here, too; what is beyond is generated again."""
    transcript = Transcript()
    transcript.prompt_ids = orjson.dumps(PROMPT)
    transcript.add_choice({"text": "Hello"}, encode_text("Hello"))
    transcript.add_choice({"text": ""}, encode_text("x" * held))
    resumption, _ = decided(situation(COMPLETION | {"stop": ["ab", "STOPS"]}, [], transcript=transcript))
    assert resumption.kept_ids == kept


def test_answer_of_which_all_is_held_back_may_begin_with_half_a_character() -> None:
    transcript = chunked(("", "\xff"))
    del transcript.ids[1:]
    resumption, _ = decided(situation(COMPLETION | {"stop": ["STOP"]}, [], transcript=transcript))
    assert resumption.kept_ids == 0


@pytest.mark.parametrize("body", [COMPLETION, COMPLETION | {"stop": ["STOP"]}], ids=["", "stop"])
def test_mismatching_text_is_not_detokenized_forever(body: dict[str, Any]) -> None:
    asked: list[Sequence[int]] = []

    def text_of(ids: Sequence[int]) -> str:
        asked.append(ids)
        return decode_tokens(ids, keep_markers=True)

    with pytest.raises(CannotResume, match="do not match"):
        decided(situation(body, [], transcript=chunked(("a" * 200, "b" * 200))), text_of)
    assert len(asked) == 33


def test_tokens_without_shown_text_are_not_detokenized() -> None:
    """If no text can be held back it was a marker, or half of a character."""
    transcript = chunked(("Hello", "Hello"))
    transcript.add_choice({"text": ""}, encode_text("日")[:2])
    resumption, asked = decided(situation(COMPLETION, [], transcript=transcript))
    assert (resumption.kept_ids, asked) == (5, 1)


@pytest.mark.parametrize("name", ["reasoning", "content"])
def test_half_a_character_that_was_shown_is_found_out(name: str) -> None:
    """Some engines write the replacement character for the bytes they have, and then the whole one."""
    transcript = answered(Api.CHAT, HELLO, in_reasoning=name == "reasoning")
    transcript.add_choice({"delta": {name: "\ufffd"}}, encode_text("日")[:1])
    with pytest.raises(CannotResume, match="detokenized"):
        decided(situation(CHAT, [], transcript=transcript, shows_blanks=True), nobody_tells)


@pytest.mark.parametrize("value", [False, True, None])
@pytest.mark.parametrize("already", [False, True])
def test_client_that_wants_one_call_gets_no_second(value: bool | None, already: bool) -> None:
    """Only false is a wish (vLLM `maybe_filter_parallel_tool_calls`)."""
    begin = HELLO + SECTION + encode_text("{")
    second = "}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"
    transcript = answered(Api.CHAT, begin + (encode_text(second) if already else []))
    if value is False:
        transcript.tools = transcript.tools[:1]
    body = CHAT | {"tools": TOOLS, "parallel_tool_calls": value}
    resumption, _ = decided(situation(body, [], transcript=transcript))
    assert resumption.seam is not None
    rest = "}" if already else second + "}"
    choice = {"index": 0, "text": rest, "finish_reason": "stop", "token_ids": encode_text(rest)}
    for chunk, ids in resumption.seam.rewrite_chunk({"choices": [choice]}, recomputed=False):
        transcript.add_choice(chunk["choices"][0], ids)
    calls = [(call.id, call.arguments) for call in transcript.tools]
    assert calls == [("functions.f:0", "{}"), ("functions.g:1", "{}")][: 1 if value is False else 2]


# Stop strings


def joined(text: str, cut: int, stops: Sequence[str], least: int, cuts: Sequence[int], *, shows_stop: bool) -> Found:
    """Return the text that two engines show. The first one dies after `cut` tokens of one character."""
    options = {"stop": stops, "min_tokens": least, "include_stop_str_in_output": shows_stop}
    body = COMPLETION | options | {"return_token_ids": True}
    delivery = Delivery(call_of(body), is_observed=True)
    shown = ""
    for told in engine_chunks(text[:cut], stops, least, cuts, shows_stop=shows_stop, is_whole=False):
        shown += _shown(take(delivery, data({"id": "x", "choices": [told | {"prompt_token_ids": [1]}]}))[0])
    if not delivery.transcript.ids:
        return naive_engine(text, stops, least, shows_stop=shows_stop)
    here = situation(body, [], transcript=delivery.transcript, shows_ids=True)
    resumption, _ = decided(here, lambda ids: "".join(map(chr, ids)))
    assert resumption.seam is not None
    delivery.prepare_to_continue(replace(resumption, prompt_ids=None))
    kept = resumption.kept_ids
    for told in engine_chunks(text[kept:], stops, max(0, least - kept), cuts, shows_stop=shows_stop):
        output = take(delivery, data({"id": "y", "choices": [told]}))[0]
        shown += _shown(output)
        if delivery.is_finished:
            last = [event["choices"][0] for event in events_of(output) if event["choices"]][-1]
            return shown, last["stop_reason"]
    raise AssertionError("the answer has no end")


def events_of(stream: bytes) -> list[Any]:
    return [orjson.loads(event.data or b"") for event in EventSplitter().split_chunk(stream)]


def _shown(stream: bytes) -> str:
    return "".join(event["choices"][0]["text"] for event in events_of(stream) if event["choices"])


@settings(max_examples=500)
@given(
    *(STOP_TEXTS, st.integers(0, 14), STOP_STRINGS, st.integers(0, 16) | st.just(0)),
    *(st.just(range(15)) | st.lists(st.integers(0, 20), max_size=4), st.booleans()),
)
@example("aba", 1, ["ab"], 2, range(15), False)  # complete, but too early
@example("abb", 2, ["ab"], 2, range(15), False)  # the same before the seam
@example("abb", 2, ["ab"], 2, range(15), True)
@example("aab", 3, ["a", "aaa"], 2, range(15), False)  # the same, but it has its minimum length when it breaks off
def test_answer_stops_where_it_would_have_stopped(
    text: str, at: int, stops: list[str], least: int, cuts: Sequence[int], shows_stop: bool
) -> None:
    """Wherever it breaks off, before it has its least length or after."""
    cut = min(at, len(text))
    if least > cut:
        cuts = range(15)  # it is unknown which token of a chunk completes the minimum length
    assume(naive_engine(text[:cut], stops, least, shows_stop=shows_stop)[1] is None)
    expected = naive_engine(text, stops, least, shows_stop=shows_stop)
    assert joined(text, cut, stops, least, cuts, shows_stop=shows_stop) == expected


# Engine to engine, without a gateway


class Lost(Exception):
    """All engines broke off."""


async def resumed(
    session: aiohttp.ClientSession, engines: Sequence[SimulatedEngine], delivery: Delivery, profile: str, name: str
) -> bytes:
    """Answers a call with one engine after the other, as each breaks off; the client's bytes.

    `profile`: v0.18, the last that only completions can go on with, or v0.33. `name`: of the request's ids.
    """
    is_old = profile == "v0.18"
    whole_call = call = VLLM.make_observable_call(delivery.call)
    output = b""
    for segment, engine in enumerate(engines, 1):
        changes = {"kv_transfer_params": dict(call.kv_params)} if call.kv_params else {}
        answer = await ask(
            session,
            engine.url,
            orjson.loads(document.join_body(call.make_body(changes))),
            x_request_id=f"{name}-{segment}",
        )
        assert answer.status == 200, answer.body
        part, ended = take(delivery, answer.body)
        output += part
        if ended is Meaning.DONE:
            return output
        if not delivery.is_answer_changed:
            if delivery.seam is None:
                delivery.restart_answer()
            continue
        situation = Situation(
            engine=VLLM,
            repeats_seeded_answers=True,
            call=whole_call,
            answer_head=delivery.head,
            transcript=delivery.transcript,
            is_answer_shown=delivery.has_output,
            shows_ids=delivery.call.shows_token_details,
            dropped_ids=() if delivery.seam is None else delivery.seam.swallowed_ids,
            decoder_count=segment,
            keeps_length=not is_old,
            chat_token_api=ChatTokenApi.COMPLETIONS_API if is_old else ChatTokenApi.NATIVE_MEMBER,
            shows_blanks=is_old,
            max_model_len=engine.options.max_model_len,
        )
        resumption, _ = decided(situation)
        if resumption.seam is None:
            delivery.restart_answer()
        else:
            delivery.prepare_to_continue(resumption)
        if resumption.call is None:
            return output + delivery.make_missing_end(None)
        call = resumption.call
    raise Lost


def pictured(stream: bytes) -> dict[str, Any]:
    """Everything about a streamed answer but how it is cut into chunks."""
    events = events_of(stream.removesuffix(DONE))
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    calls: dict[int, list[Any]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        arguments = part["function"].get("arguments") or ""
        if part.get("id"):
            calls.setdefault(part["index"], []).extend((part["id"], part["function"]["name"], ""))
        calls[part["index"]][-1] += arguments
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {
        "streams": len({event["id"] for event in events}),
        "roles": sum("role" in delta for delta in deltas),
        "reasoning": "".join(delta.get("reasoning") or "" for delta in deltas),
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "calls": calls,
        "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "logprobs": {name: [entry for each in logprobs for entry in each[name]] for name in (logprobs or [{}])[0]},
        "finish": [
            (choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]
        ],
        "usage": [[event["usage"][name] for name in counts] for event in events if not event["choices"]],
    }


def differences(got: dict[str, Any], expected: dict[str, Any], delivery: Delivery) -> dict[str, Any]:
    """Return the differences of an answer from the expected one.

    Where the gateway found a stop string across the seam, the engine had generated a few tokens more by then, as many
    as it has characters: it keeps their text back itself.
    """
    different = {part: (got[part], expected[part]) for part in expected if got[part] != expected[part]}
    if delivery.is_stopped and set(different) == {"usage"}:
        more = got["usage"][0][1] - expected["usage"][0][1]
        return {} if 0 <= more < max(map(len, delivery.call.stop_strings)) else different
    return different


ANSWERS: dict[str, dict[str, Any]] = {
    "completion": request(Api.COMPLETIONS, "naïve café 日本 🙂", max_tokens=40),
    "completion with stop strings": request(Api.COMPLETIONS, "Hi", max_tokens=60, stop=["garden", "r s", "w"]),
    "completion of a least length": request(
        Api.COMPLETIONS, "Hi", max_tokens=60, min_tokens=20, stop=["garden", "r s", "w"]
    ),
    "completion with ids and logprobs": request(
        Api.COMPLETIONS, "日本 🙂", max_tokens=30, logprobs=1, return_token_ids=True
    ),
    "chat without a limit": request(Api.CHAT, "naïve café 日本 🙂", max_tokens=None),
    "chat with stop strings": request(Api.CHAT, "Hi", max_tokens=60, stop=["mega t", "ow"]),
    "reasoning": request(Api.CHAT, max_tokens=80, **THINKING),
    "reasoning with ids and logprobs": request(
        Api.CHAT, max_tokens=70, logprobs=True, top_logprobs=2, return_token_ids=True, **THINKING
    ),
    "tools cut off": request(Api.CHAT, max_tokens=60, tools=TOOLS),
    "reasoning and tools": request(Api.CHAT, max_tokens=300, tools=TOOLS, **THINKING),
}

Case = tuple[str, list[SimulatedEngine]]


async def look_at(body: dict[str, Any], profile: str, cases_of: Callable[[Engines, int], list[Case]]) -> None:
    """Answer a request in every case, by these engines, and compare with how an engine answers it alone."""
    if profile == "v0.18" and body is ANSWERS["tools cut off"]:
        pytest.skip("older parsers make up what closes the arguments")
    options = ENGINE | {"profile_name": profile, "default_max_tokens": 100, "prompt_tokens_details": False}
    body = {**body, "stream": True, **WITH_USAGE}
    async with (
        aiohttp.ClientSession() as session,
        SimulatedEngine(**options) as well,
        SimulatedEngine(**options) as dying,
        SimulatedEngine(**options) as recomputing,
    ):
        expected = pictured((await ask(session, well.url, body)).body)
        length = expected["usage"][0][1]

        async def wrong(name: str, engines: list[SimulatedEngine]) -> list[str]:
            delivery = Delivery(call_of(body), is_observed=True)
            try:
                got = pictured(await resumed(session, engines, delivery, profile, name))
            except (CannotResume, AnswerMismatch, Lost) as error:
                return [f"{name}: {error!r}"]
            return [f"{name}: {different}"] if (different := differences(got, expected, delivery)) else []

        cases = cases_of(Engines(well, dying, recomputing), length)
        found = [what for each in await asyncio.gather(*[wrong(*case) for case in cases]) for what in each]
    assert not found, f"{len(found)} of {len(cases)} are wrong:\n" + "\n".join(found[:5])


class Engines(NamedTuple):
    well: SimulatedEngine
    dying: SimulatedEngine
    recomputing: SimulatedEngine


@pytest.mark.covering("profile what", product(("v0.33", "v0.18"), ANSWERS), values)
async def test_answer_is_the_same_wherever_its_decoder_was_lost(profile: str, what: str) -> None:
    """At every token, now in this way and now in that."""

    def cases(engines: Engines, length: int) -> list[Case]:
        made: list[Case] = []
        for cut in range(length):
            name, merged = f"{cut}x", 3 * (cut % 2)
            if cut % 3:
                engine, fault = engines.recomputing, ("recompute", {"merged": min(cut, merged)})
            else:
                engine, fault = engines.dying, ("reset_after_tokens", {})
            engine.faults.add(fault[0], tokens=cut, request_id=name + "-", **fault[1])
            made.append((name, [engine, engines.well]))
        return made

    await look_at(ANSWERS[what], profile, cases)


@pytest.mark.covering("profile what", product(("v0.33", "v0.18"), ANSWERS), values)
async def test_answer_is_the_same_when_one_decoder_after_the_other_is_lost(profile: str, what: str) -> None:
    """After every few tokens, now in this way and now in that."""

    def cases(engines: Engines, length: int) -> list[Case]:
        made: list[Case] = []
        well, dying, recomputing = engines
        for step in (1, 2, 3, 7):
            dying.faults.add("reset_after_tokens", tokens=step, request_id=f"{step}x")
            recomputing.faults.add("recompute", tokens=step, request_id=f"{step}x")
            for how in ([recomputing, dying] * 4, [recomputing] * 8, [dying] * 8):
                name = "".join("r" if engine is recomputing else "d" for engine in how)
                made.append((f"{step}x{name}", [*how, well]))
        return made

    await look_at(ANSWERS[what], profile, cases)
