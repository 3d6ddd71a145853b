"""What each event of a decoder's stream means, and when the answer is complete."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.flow.transcript import Meaning, Transcript
from proxy.wire.sse import Event

DONE = b"[DONE]"


def event(data: bytes | None) -> Event:
    return Event(b": ping\n\n" if data is None else b"data: " + data + b"\n\n", data)


def chunk(*choices: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": list(choices), **more})


def delta(finish: str | None = None, index: int = 0, stop: Any = None, **content: Any) -> dict[str, Any]:
    return {"index": index, "delta": content, "logprobs": None, "finish_reason": finish, "stop_reason": stop}


def text(text: str, finish: str | None = None, index: int = 0, stop: Any = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}


ROLE = chunk(delta(role="assistant", content=""))
USAGE = chunk(usage={"prompt_tokens": 10, "total_tokens": 17, "completion_tokens": 7})


def read(*stream: bytes | None) -> tuple[Transcript, list[Meaning]]:
    transcript = Transcript()
    return transcript, [transcript.read(event(data)) for data in stream]


def test_a_chat_stream() -> None:
    transcript, meanings = read(
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
    assert transcript.is_complete
    assert transcript.finish_reasons == {0: "stop"}
    assert transcript.usage == {"prompt_tokens": 10, "total_tokens": 17, "completion_tokens": 7}


def test_a_completions_stream() -> None:
    transcript, meanings = read(chunk(text("Hi")), chunk(text("", "length")), DONE)
    assert meanings == [Meaning.CONTENT, Meaning.CONTENT, Meaning.DONE]
    assert transcript.is_complete


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
def test_a_role_alone_is_the_opening(choice: dict[str, Any]) -> None:
    _transcript, meanings = read(chunk(choice, prompt_token_ids=[1, 2, 3]))
    assert meanings == [Meaning.OPENING]


def test_a_role_that_comes_with_the_finish_is_content() -> None:
    assert read(chunk(delta("stop", role="assistant", content="")))[1] == [Meaning.CONTENT]


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "length", None])
@pytest.mark.parametrize("content", [{}, {"content": "held back"}, {"tool_calls": [{"function": {"arguments": "}"}}]}])
def test_recomputed_is_told_by_its_stop_reason_alone(finish: str | None, content: dict[str, Any]) -> None:
    transcript, meanings = read(ROLE, chunk(delta(content="Hi")), chunk(delta(finish, stop="recomputed", **content)))
    assert meanings[-1] is Meaning.RECOMPUTED
    assert not transcript.finish_reasons
    assert transcript.read(event(DONE)) is Meaning.DONE
    assert not transcript.is_complete


def test_recomputed_in_a_completions_stream() -> None:
    assert read(chunk(text("", "stop", stop="recomputed")))[1] == [Meaning.RECOMPUTED]


def test_recomputed_in_one_of_several_choices() -> None:
    assert read(chunk(delta(content="a"), delta("stop", index=1, stop="recomputed")))[1] == [Meaning.RECOMPUTED]


@pytest.mark.parametrize("stop", ["</s>", 151643, None])
def test_other_stop_reasons_finish_the_answer(stop: Any) -> None:
    transcript, meanings = read(chunk(delta("stop", stop=stop)), DONE)
    assert meanings[0] is Meaning.CONTENT
    assert transcript.is_complete


@pytest.mark.parametrize(
    "stream",
    [
        (ROLE, DONE),
        (ROLE, chunk(usage={"prompt_tokens": 10, "completion_tokens": 0}), DONE),
        (DONE,),
        (chunk(usage={"prompt_tokens": 10, "completion_tokens": 0}), DONE),
    ],
)
def test_an_end_without_a_finish_is_not_complete(stream: tuple[bytes, ...]) -> None:
    transcript, _ = read(*stream)
    assert transcript.done
    assert not transcript.is_complete


def test_an_answer_cut_off_in_the_middle_is_not_complete() -> None:
    assert not read(ROLE, chunk(delta(content="Hi")), DONE)[0].is_complete
    assert not read(ROLE, chunk(delta(content="Hi")), chunk(delta("stop")))[0].is_complete


def test_every_choice_must_finish() -> None:
    both = chunk(delta(content="a"), delta(index=1, content="b"))
    transcript, _ = read(both, chunk(delta("stop")), DONE)
    assert not transcript.is_complete
    transcript, _ = read(both, chunk(delta("stop")), chunk(delta("length", index=1)), DONE)
    assert transcript.is_complete
    assert transcript.finish_reasons == {0: "stop", 1: "length"}


def test_a_choice_that_only_opened_must_finish_too() -> None:
    opening = chunk(delta(role="assistant", content=""), delta(index=1, role="assistant", content=""))
    assert not read(opening, chunk(delta("stop", content="a")), DONE)[0].is_complete


def test_a_chunk_after_the_finish_does_not_open_the_choice_again() -> None:
    transcript, meanings = read(chunk(delta("stop", content="a")), chunk(delta(hidden_states=[0.5])), DONE)
    assert meanings == [Meaning.CONTENT, Meaning.CONTENT, Meaning.DONE]
    assert transcript.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": {"message": "KV load failed", "code": 500}}',
        b'{"error": "out of memory"}',
        b'{"error": {"message": "no"}, "choices": []}',
        b'{"object": "error", "error": {"message": "no"}, "usage": null}',
    ],
)
def test_an_error_event(data: bytes) -> None:
    transcript, meanings = read(ROLE, data, DONE)
    assert meanings == [Meaning.OPENING, Meaning.ERROR, Meaning.DONE]
    assert not transcript.is_complete


def test_an_error_that_is_null_is_none() -> None:
    assert read(b'{"error": null, "choices": [], "usage": {"prompt_tokens": 1}}')[1] == [Meaning.USAGE]


def test_usage_in_every_chunk_is_remembered_and_the_last_one_counts() -> None:
    transcript, meanings = read(
        chunk(delta(content="a"), usage={"completion_tokens": 1}), chunk(delta("stop"), usage={"completion_tokens": 2})
    )
    assert meanings == [Meaning.CONTENT, Meaning.CONTENT]
    assert transcript.usage == {"completion_tokens": 2}
    transcript.read(event(chunk(usage=None)))
    assert transcript.usage == {"completion_tokens": 2}


@pytest.mark.parametrize("usage", [None, {}, 5, "much", [1]])
def test_a_usage_that_is_none_is_nothing_we_know(usage: Any) -> None:
    transcript, meanings = read(chunk(usage=usage))
    assert meanings == [Meaning.OTHER]
    assert transcript.usage is None


@pytest.mark.parametrize("data", [None, b"{}", b'{"object": "ping"}', b'{"choices": null}', b"[]", b"7", b'"hello"'])
def test_comments_and_unknown_objects_pass(data: bytes | None) -> None:
    transcript, meanings = read(data)
    assert meanings == [Meaning.OTHER]
    assert not transcript.is_complete


@pytest.mark.parametrize(
    "data", [b"", b"{", b"done", b'{"choices": [NaN]}', b'{"choices": 7}', b'{"choices": "x"}', b'{"choices": [null]}']
)
def test_what_cannot_be_read_is_malformed(data: bytes) -> None:
    assert read(data)[1] == [Meaning.MALFORMED]


@pytest.mark.parametrize(
    "choice",
    [{"index": [0], "finish_reason": "stop"}, {"index": {}, "delta": {}}, {"index": 0, "delta": "role"}],
)
def test_a_choice_of_the_wrong_shape_is_malformed(choice: dict[str, Any]) -> None:
    assert read(chunk(choice))[1] == [Meaning.MALFORMED]


def test_the_payload_is_that_of_the_last_event() -> None:
    transcript, _ = read(ROLE)
    assert transcript.payload["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for data in (DONE, None, b"{"):
        transcript.read(event(data))
        assert transcript.payload is None
