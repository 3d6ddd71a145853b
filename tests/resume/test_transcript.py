"""The meaning of each event of a decoder's stream, and the end of the answer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects.segment import Meaning, Segment
from proxy.resume.transcript import Transcript
from proxy.sim.model.tokenizer import SECTION_BEGIN, THINK_END, encode_text
from proxy.wire.sse import Event

DONE = b"[DONE]"


def event(data: bytes | None) -> Event:
    return Event(data, b": ping\n\n" if data is None else None)


def chunk(*choices: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": list(choices), **more})


def delta(finish: str | None = None, index: int = 0, stop: Any = None, **content: Any) -> dict[str, Any]:
    return {"index": index, "delta": content, "logprobs": None, "finish_reason": finish, "stop_reason": stop}


def text(text: str, finish: str | None = None, index: int = 0, stop: Any = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}


ROLE = chunk(delta(role="assistant", content=""))
USAGE = chunk(usage={"prompt_tokens": 10, "total_tokens": 17, "completion_tokens": 7})


def read(*stream: bytes | None) -> tuple[Segment, list[Meaning]]:
    segment = Segment()
    return segment, [segment.read_event(event(data)) for data in stream]


def test_chat_stream() -> None:
    segment, meanings = read(
        ROLE, chunk(delta(reasoning="Let")), chunk(delta(content="Hi")), chunk(delta("stop")), USAGE, DONE
    )
    assert meanings == [
        Meaning.OPENING,
        Meaning.CONTENT,
        Meaning.CONTENT,
        Meaning.CONTENT,
        Meaning.USAGE,
        Meaning.DONE,
    ]
    assert segment.is_complete
    assert segment.finish_reasons == {0: "stop"}
    assert segment.usage == {"prompt_tokens": 10, "total_tokens": 17, "completion_tokens": 7}


@pytest.mark.parametrize(
    ("choice", "is_mute"),
    [
        (text(""), True),
        (delta(), True),
        (delta(content=""), True),
        (delta(role="assistant", content=""), True),
        (delta(content=None, reasoning=None, tool_calls=[]), True),
        ({"index": 0, "delta": None}, True),
        (text("a"), False),
        (text("", "stop"), False),
        (delta("length"), False),
        (delta(reasoning="a"), False),
        (delta(role="assistant", content="a"), False),
        (delta(tool_calls=[{"index": 0}]), False),
        ({**text(""), "token_ids": [7]}, False),
        ({**delta(), "token_ids": [7]}, False),
        ({**delta(), "logprobs": {"content": [{}]}}, False),
    ],
)
def test_chunk_without_content_is_recognised(choice: dict[str, Any], is_mute: bool) -> None:
    segment, _ = read(chunk(choice))
    assert segment.is_empty_event is is_mute


def test_completions_stream() -> None:
    segment, meanings = read(chunk(text("Hi")), chunk(text("", "length")), DONE)
    assert meanings == [Meaning.CONTENT, Meaning.CONTENT, Meaning.DONE]
    assert segment.is_complete


@pytest.mark.parametrize(
    "choice",
    [
        delta(role="assistant", content="Hi"),
        delta(role="assistant", content="", tool_calls=[{"index": 0}]),
        delta(role="assistant", reasoning_content="Let"),
        {**delta(role="assistant", content=""), "token_ids": [1]},
        delta(content=""),
        delta(),
        {"index": 0, "finish_reason": None},
        text(""),
    ],
)
def test_whatever_is_more_than_a_role_is_content(choice: dict[str, Any]) -> None:
    assert read(chunk(choice))[1] == [Meaning.CONTENT]


@pytest.mark.parametrize(
    "choice",
    [
        delta(role="assistant", content=""),
        delta(role="assistant"),
        delta(role="assistant", content=None, reasoning=None, tool_calls=[]),
        {**delta(role="assistant", content=""), "token_ids": []},
        {"delta": {"role": "assistant", "content": ""}},
    ],
)
def test_role_alone_is_the_opening(choice: dict[str, Any]) -> None:
    _segment, meanings = read(chunk(choice, prompt_token_ids=[1, 2, 3]))
    assert meanings == [Meaning.OPENING]


def test_role_that_comes_with_the_finish_is_content() -> None:
    assert read(chunk(delta("stop", role="assistant", content="")))[1] == [Meaning.CONTENT]


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "length", None])
@pytest.mark.parametrize("content", [{}, {"content": "held back"}, {"tool_calls": [{"function": {"arguments": "}"}}]}])
def test_recomputation_is_recognised_by_its_stop_reason(finish: str | None, content: dict[str, Any]) -> None:
    segment, meanings = read(ROLE, chunk(delta(content="Hi")), chunk(delta(finish, stop="recomputed", **content)))
    assert meanings[-1] is Meaning.RECOMPUTED
    assert not segment.finish_reasons
    assert segment.read_event(event(DONE)) is Meaning.DONE
    assert not segment.is_complete


def test_recomputed_in_a_completions_stream() -> None:
    assert read(chunk(text("", "stop", stop="recomputed")))[1] == [Meaning.RECOMPUTED]


def test_recomputed_in_one_of_several_choices() -> None:
    assert read(chunk(delta(content="a"), delta("stop", index=1, stop="recomputed")))[1] == [Meaning.RECOMPUTED]


@pytest.mark.parametrize("stop", ["</s>", 151643, None])
def test_other_stop_reasons_finish_the_answer(stop: Any) -> None:
    segment, meanings = read(chunk(delta("stop", stop=stop)), DONE)
    assert meanings[0] is Meaning.CONTENT
    assert segment.is_complete


@pytest.mark.parametrize(
    "stream",
    [
        (ROLE, DONE),
        (ROLE, chunk(usage={"prompt_tokens": 10, "completion_tokens": 0}), DONE),
        (DONE,),
        (chunk(usage={"prompt_tokens": 10, "completion_tokens": 0}), DONE),
    ],
)
def test_end_without_a_finish_is_not_complete(stream: tuple[bytes, ...]) -> None:
    segment, _ = read(*stream)
    assert segment.has_done_event
    assert not segment.is_complete


def test_answer_cut_off_in_the_middle_is_not_complete() -> None:
    assert not read(ROLE, chunk(delta(content="Hi")), DONE)[0].is_complete
    assert not read(ROLE, chunk(delta(content="Hi")), chunk(delta("stop")))[0].is_complete


def test_every_choice_must_finish() -> None:
    both = chunk(delta(content="a"), delta(index=1, content="b"))
    segment, _ = read(both, chunk(delta("stop")), DONE)
    assert not segment.is_complete
    segment, _ = read(both, chunk(delta("stop")), chunk(delta("length", index=1)), DONE)
    assert segment.is_complete
    assert segment.finish_reasons == {0: "stop", 1: "length"}


def test_choice_that_only_opened_must_finish_too() -> None:
    opening = chunk(delta(role="assistant", content=""), delta(index=1, role="assistant", content=""))
    assert not read(opening, chunk(delta("stop", content="a")), DONE)[0].is_complete


def test_chunk_after_the_finish_does_not_open_the_choice_again() -> None:
    segment, meanings = read(chunk(delta("stop", content="a")), chunk(delta(hidden_states=[0.5])), DONE)
    assert meanings == [Meaning.CONTENT, Meaning.CONTENT, Meaning.DONE]
    assert segment.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": {"message": "KV load failed", "code": 500}}',
        b'{"error": "out of memory"}',
        b'{"error": {"message": "no"}, "choices": []}',
        b'{"object": "error", "error": {"message": "no"}, "usage": null}',
    ],
)
def test_error_event(data: bytes) -> None:
    segment, meanings = read(ROLE, data, DONE)
    assert meanings == [Meaning.OPENING, Meaning.ERROR, Meaning.DONE]
    assert not segment.is_complete


def test_null_error_is_ignored() -> None:
    assert read(b'{"error": null, "choices": [], "usage": {"prompt_tokens": 1}}')[1] == [Meaning.USAGE]


def test_usage_in_every_chunk_is_remembered_and_the_last_one_counts() -> None:
    segment, meanings = read(
        chunk(delta(content="a"), usage={"completion_tokens": 1}), chunk(delta("stop"), usage={"completion_tokens": 2})
    )
    assert meanings == [Meaning.CONTENT, Meaning.CONTENT]
    assert segment.usage == {"completion_tokens": 2}
    segment.read_event(event(chunk(usage=None)))
    assert segment.usage == {"completion_tokens": 2}


@pytest.mark.parametrize("usage", [None, {}, 5, "much", [1]])
def test_null_usage_is_ignored(usage: Any) -> None:
    segment, meanings = read(chunk(usage=usage))
    assert meanings == [Meaning.OTHER]
    assert segment.usage is None


@pytest.mark.parametrize("data", [None, b"", b" ", b"{}", b'{"object": "ping"}', b'{"choices": null}', b"[]", b"null"])
def test_comments_and_unknown_objects_pass(data: bytes | None) -> None:
    segment, meanings = read(data)
    assert meanings == [Meaning.OTHER]
    assert not segment.is_complete


@pytest.mark.parametrize(
    "data",
    [
        *(b"{", b"done", b'{"choices": [NaN]}', b'{"choices": 7}', b'{"choices": "x"}', b'{"choices": [null]}'),
        *(
            b"7",
            b'"hello"',
            b"[1]",
            b'{"choices": [{"text": "\xff"}]}',
            b"[" * 100_000,
            b'{"a": %b}' % (b"[" * 2000 + b"]" * 2000),
        ),
    ],
)
def test_unreadable_chunk_makes_the_transcript_malformed(data: bytes) -> None:
    assert read(data)[1] == [Meaning.MALFORMED]


@pytest.mark.parametrize(
    "choice",
    [{"index": [0], "finish_reason": "stop"}, {"index": {}, "delta": {}}, {"index": 0, "delta": "role"}],
)
def test_choice_of_the_wrong_shape_is_malformed(choice: dict[str, Any]) -> None:
    assert read(chunk(choice))[1] == [Meaning.MALFORMED]


def test_payload_is_that_of_the_last_event() -> None:
    segment, _ = read(ROLE)
    assert segment.payload["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for data in (DONE, None, b"{"):
        segment.read_event(event(data))
        assert segment.payload is None


# The prompt's token ids

IDS = list(range(100_000, 300_000))


def with_prompt_ids(ids: Any, choice: dict[str, Any] | None = None) -> bytes:
    return chunk(choice or delta(role="assistant", content=""), prompt_token_ids=ids)


@pytest.mark.parametrize("ids", [[1], [1, 2, 3], IDS], ids=len)
def test_prompts_ids_are_cut_out_unparsed(ids: list[int]) -> None:
    segment, meanings = read(with_prompt_ids(ids))
    assert meanings == [Meaning.OPENING]
    assert segment.prompt_ids == orjson.dumps(ids)
    assert segment.payload["prompt_token_ids"] is None
    assert segment.event_data == with_prompt_ids(None)


def test_prompts_ids_of_a_completion_stand_in_its_choice() -> None:
    segment, meanings = read(chunk({**text("Hi"), "prompt_token_ids": [1, 2], "token_ids": [3]}))
    assert meanings == [Meaning.CONTENT]
    assert segment.prompt_ids == b"[1,2]"
    assert segment.payload["choices"][0] == {**text("Hi"), "prompt_token_ids": None, "token_ids": [3]}


def test_empty_prompt_has_ids_too() -> None:
    assert read(with_prompt_ids([]))[0].prompt_ids == b"[]"


def test_prompts_ids_may_come_late_and_are_kept() -> None:
    segment, _ = read(ROLE, chunk({**text("a"), "prompt_token_ids": [7]}), chunk(text("b")), DONE)
    assert segment.prompt_ids == b"[7]"


def test_only_the_first_ids_are_the_prompts() -> None:
    segment, _ = read(with_prompt_ids([1]), with_prompt_ids([2]))
    assert segment.prompt_ids == b"[1]"
    assert segment.payload["prompt_token_ids"] == [2]


@pytest.mark.parametrize("data", [ROLE, with_prompt_ids(None), chunk(text("Hi"))])
def test_stream_without_ids_passes_unchanged(data: bytes) -> None:
    segment, _ = read(data)
    assert segment.prompt_ids is None
    assert segment.event_data is data


@pytest.mark.parametrize(
    "choice",
    [
        delta(content='{"prompt_token_ids":[1,2]}'),
        delta(content='"prompt_token_ids":['),
        delta(reasoning='\\"prompt_token_ids":[1]'),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"prompt_token_ids":[1]}'}}]),
    ],
)
def test_text_that_looks_like_the_prompts_ids_is_text(choice: dict[str, Any]) -> None:
    data = chunk(choice)
    segment, meanings = read(data)
    assert meanings == [Meaning.CONTENT]
    assert segment.prompt_ids is None
    assert segment.event_data is data
    assert segment.payload["choices"] == [choice]


def test_text_that_looks_like_the_prompts_ids_does_not_hide_them() -> None:
    choice = delta(role="assistant", content='"prompt_token_ids":[9]')
    segment, _ = read(with_prompt_ids([1, 2], choice))
    assert segment.prompt_ids == b"[1,2]"
    assert segment.payload["choices"] == [choice]


@pytest.mark.parametrize(
    "spelling", [b'"prompt_token_ids": [1, 2]', b'"prompt_token_ids" :[1]', b'"prompt_token_ids":\n [1]']
)
def test_ids_that_are_spelled_with_spaces_stay_where_they_are(spelling: bytes) -> None:
    """No engine writes them so. Then there is nothing to go on from, and nothing is lost either."""
    data = b'{"choices": [{"index": 0, "text": "a", "finish_reason": null}], %b}' % spelling
    segment, meanings = read(data)
    assert meanings == [Meaning.CONTENT]
    assert segment.prompt_ids is None
    assert segment.event_data is data


@pytest.mark.parametrize(
    "data", [b'{"choices":[],"prompt_token_ids":[1,2', b'{"prompt_token_ids":[', b'"prompt_token_ids":[']
)
def test_ids_without_an_end_are_malformed(data: bytes) -> None:
    assert read(data)[1] == [Meaning.MALFORMED]


# The answer over all segments


def told(*chunks: tuple[dict[str, Any], list[int] | None]) -> Transcript:
    transcript = Transcript()
    for choice, ids in chunks:
        transcript.add_choice(choice, ids)
    return transcript


def test_answer_is_its_text_and_its_ids() -> None:
    transcript = told((delta(reasoning="Le"), [1]), (delta(reasoning="t."), [2, 3]), (delta(content="Hi"), [5]))
    assert (transcript.reasoning_text, transcript.content_text) == ("Let.", "Hi")
    assert transcript.ids.tolist() == [1, 2, 3, 5]
    assert (transcript.count_shown_ids, transcript.first_id_of_chunk, transcript.count_reasoning_ids) == (4, 3, 3)
    assert transcript.began_in_reasoning


def test_completion_is_its_text_and_its_ids() -> None:
    transcript = told((text("Hi"), [1, 2]), (text(" there"), [3]))
    assert (transcript.content_text, transcript.reasoning_text, transcript.ids.tolist()) == ("Hi there", "", [1, 2, 3])
    assert not transcript.began_in_reasoning


@pytest.mark.parametrize(
    "choice", [delta(), delta(content=""), delta(content=None), delta("stop"), text(""), delta(tool_calls=[])]
)
def test_ids_that_showed_nothing_are_not_settled(choice: dict[str, Any]) -> None:
    transcript = Transcript()
    assert transcript.add_choice(text("a") if "text" in choice else delta(content="a"), [1])
    assert not transcript.add_choice(choice, [2, 3])
    assert transcript.ids.tolist() == [1, 2, 3]
    assert (transcript.count_shown_ids, transcript.first_id_of_chunk) == (1, 0)


def test_ids_that_showed_nothing_are_settled_by_the_next_that_do() -> None:
    """The bytes of one character: only the last of them shows it."""
    transcript = told((text("a"), [1]), (text(""), [2]), (text(""), [3]), (text("日"), [4]))
    assert (transcript.count_shown_ids, transcript.first_id_of_chunk) == (4, 3)


@pytest.mark.parametrize("ids", [None, []])
def test_answer_without_ids_has_its_text(ids: list[int] | None) -> None:
    transcript = told((delta(content="Hi"), ids))
    assert (transcript.content_text, transcript.ids.tolist(), transcript.count_shown_ids) == ("Hi", [], 0)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_called_what_the_engine_calls_it(name: str) -> None:
    first, second = delta(), delta()
    first["delta"], second["delta"] = {name: "Let"}, {name: " me"}
    transcript = told((first, [1]), (second, [2]))
    assert (transcript.reasoning_text, transcript.reasoning_field) == ("Let me", name)


def test_answer_that_began_with_content_did_not_begin_in_reasoning() -> None:
    assert not told((delta(content="Hi"), [1]), (delta(reasoning="Let"), [2])).began_in_reasoning


def test_first_chunk_of_reasoning_and_content_began_in_reasoning() -> None:
    """Chunks of several tokens may be like this."""
    transcript = told((delta(content="Hi", reasoning_content="Let."), [1, 2, 3, 4]))
    assert transcript.began_in_reasoning
    assert transcript.reasoning_field == "reasoning_content"


def test_tool_calls_are_put_together() -> None:
    call = {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
    transcript = told(
        (delta(tool_calls=[call]), [1]),
        (delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]), [2]),
        (
            delta(
                tool_calls=[
                    {"index": 0, "function": {"arguments": ": 1}"}},
                    {"index": 1, "id": "functions.g:1", "function": {"name": "g"}},
                    {"index": 1, "function": {"arguments": "{}"}},
                ]
            ),
            [3],
        ),
    )
    assert [(call.id, call.name, call.arguments) for call in transcript.tools] == [
        ("functions.f:0", "f", '{"a": 1}'),
        ("functions.g:1", "g", "{}"),
    ]
    assert transcript.has_text
    assert transcript.count_shown_ids == 3


@pytest.mark.parametrize(
    ("choice", "has_text"),
    [
        (delta(content="a"), True),
        (delta(reasoning="a"), True),
        (delta(tool_calls=[{"index": 0, "id": "x"}]), True),
        (delta(), False),
        (text(""), False),
    ],
)
def test_visible_parts_count_as_text(choice: dict[str, Any], has_text: bool) -> None:
    assert told((choice, [1])).has_text is has_text


def test_answer_that_is_cut_keeps_its_text() -> None:
    transcript = told((delta(reasoning="Let."), [1, 2, 3]), (delta(content="Hi"), [4]), (delta(), [5, 6]))
    transcript.truncate_to_ids(4)
    assert (transcript.ids.tolist(), transcript.count_shown_ids, transcript.first_id_of_chunk) == ([1, 2, 3, 4], 4, 4)
    assert (transcript.reasoning_text, transcript.content_text, transcript.count_reasoning_ids) == ("Let.", "Hi", 3)
    transcript.truncate_to_ids(2)
    assert transcript.count_reasoning_ids == 2


@pytest.mark.parametrize("next_one", [delta(content="Hi"), delta(tool_calls=[{"index": 0, "id": "x"}])])
def test_white_space_at_the_end_of_reasoning_is_reasoning(next_one: dict[str, Any]) -> None:
    """It showed nothing; the last id before what follows is the marker."""
    transcript = told((delta(reasoning="Let."), [1, 2]), (delta(), [3]), (delta(), [4]), (next_one, [5]))
    assert transcript.count_reasoning_ids == 3


def test_log_probabilities_give_offsets_of_ids() -> None:
    first = {**text("Hi t"), "logprobs": {"text_offset": [0, 2], "tokens": ["Hi", " t"]}}
    second = {**text("here"), "logprobs": {"text_offset": [4], "tokens": ["here"]}}
    transcript = told((first, [1, 2]), (second, [3]))
    assert [transcript.text_offset_after(kept) for kept in range(4)] == [0, 2, 4, 8]
    transcript.truncate_to_ids(2)
    assert transcript.text_offset_after(2) == 4
    transcript.add_choice(text("!"), [4])
    assert transcript.text_offset_after(2) is None


KIMI_PROMPT = orjson.dumps(encode_text("<|im_assistant|>assistant<|im_middle|><think>"))


@pytest.mark.parametrize("marker", [THINK_END, SECTION_BEGIN])
@pytest.mark.parametrize(("prompt", "reasoning"), [(KIMI_PROMPT, 2), (b"[1,2,3]", 4), (None, 4)])
def test_id_is_a_marker_only_where_the_prompt_is_of_that_family(
    marker: int, prompt: bytes | None, reasoning: int
) -> None:
    transcript = Transcript()
    transcript.prompt_ids = prompt
    transcript.add_choice(delta(reasoning="Let it be."), [1, 2, marker, 4])
    assert transcript.count_reasoning_ids == transcript.count_reasoning_among(4) == reasoning


def test_ids_as_large_as_engines_have_are_kept() -> None:
    assert told((text("a"), [0, 163607, 2**32 - 1])).ids.tolist() == [0, 163607, 2**32 - 1]
