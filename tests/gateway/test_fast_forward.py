"""Tokens that bypass the delivery give the same result as parsed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.dialects import grammars as kimi
from proxy.dialects.segment import Meaning, Segment
from proxy.gateway.assembly import StreamAssembly
from proxy.gateway.delivery import Delivery
from proxy.resume.transcript import Transcript
from proxy.settings import Cost
from proxy.wire.chat_members import UnreadableMember
from proxy.wire.openai import Api
from proxy.wire.sse import Event, EventSplitter, TokenShape
from tests.asking import api_of, request
from tests.canned import data
from tests.gateway.forwarding import Client, Engine, PumpedEngine, framed, tokens_like
from tests.parsing import parse


def chunk(delta: dict[str, Any], ids: Sequence[int] | None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": ids, **more}
    return data({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


def parsed(delivery: Delivery, segment: Segment, event: Event) -> bytes:
    """Return the client's bytes of a parsed event."""
    meaning = segment.read_event(event)
    if meaning is Meaning.CONTENT:
        return delivery.take_content(segment, event)
    if meaning is Meaning.OPENING:
        delivery.take_role_chunk(segment, event)
        return b""
    return delivery.pass_other_event(segment, event)


def delivered(
    events: Sequence[bytes],
    body: dict[str, Any],
    *,
    forwards: bool,
    is_observed: bool = True,
    engine: Engine | PumpedEngine | None = None,
) -> tuple[bytes, list[Any], int]:
    """Return the client's bytes, the transcript, and the number of events that bypassed the delivery."""
    call = parse(api_of(body), orjson.dumps(body), Cost())
    whole = None if body["stream"] or not is_observed else StreamAssembly()
    delivery = Delivery(call, is_observed=is_observed, collector=whole)
    delivery.transcript.prompt_ids = orjson.dumps([kimi.ASSISTANT_ID, kimi.MESSAGE_MIDDLE_ID])
    segment, client, told = delivery.begin_stream(), Client(), 0
    engine = engine or Engine()
    tokens, like = None, None
    for raw in events:
        if forwards and (shape := delivery.token_shape) is not None:
            if tokens is None or shape is not like:
                like = shape
                tokens = tokens_like(
                    shape,
                    None if whole else client,
                    delivery.transcript if is_observed else None,
                    hides_ids=is_observed and not delivery.writer.wants_token_ids,
                )
            if not engine.take(tokens, framed(raw)):
                told += 1
                continue
        try:
            output = b"".join(parsed(delivery, segment, event) for event in EventSplitter().split_chunk(raw))
        except UnreadableMember:  # the Relay ends such an answer
            client.written.append(b"odd")
            break
        if output and whole is None:
            client.written.append(framed(output))
        if delivery.is_transcript_incomplete:  # its transcript is not used any more
            break
    known = delivery.transcript
    state: list[Any] = [
        known.content_text,
        known.reasoning_text,
        known.ids.tolist(),
        known.count_shown_ids,
        known.first_id_of_chunk,
    ]
    state += [
        known.count_reasoning_ids,
        known.count_reasoning_among(len(known.ids)),
        known.count_reasoning_among(1),
        known.tools,
    ]
    state += [
        known.text_offset_after(0),
        delivery.is_finished,
        delivery.has_output,
        delivery.head,
        segment.finish_reasons,
    ]
    return b"".join(client.written), [*state, whole.make_answer_values(delivery) if whole else None], told


TOOL = {"tool_calls": [{"index": 0, "id": "functions.f:0", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
ROLE = chunk({"role": "assistant", "content": ""}, None)
FINISH = chunk({"content": "end"}, [9], finish_reason="stop")

TEXTS = st.sampled_from([" a", "b", "ü", "🙂", "\n", 'say "x"', "\\", "", "日本", '"token_ids":[1]'])
IDS = st.one_of(
    st.integers(1, 300_000).map(lambda token: [token]),
    st.integers(1, 300_000).map(lambda token: [token]),
    *(st.lists(st.integers(1, 9), max_size=3), st.none(), st.just([0])),
)
MARKERS = st.sampled_from([[kimi.THINK_END_ID], [kimi.SECTION_BEGIN_ID]])
LOGPROBS = {"content": [{"token": "b", "logprob": -0.5, "bytes": [98], "top_logprobs": []}]}
TAILS = st.sampled_from(
    [
        *[b',"kv_transfer_params":null}\n\n'] * 3,
        b', "kv_transfer_params": null}\n\n',
        b',"kv_transfer_params":{"remote_host":"h","x":[null]}}\n\n',
        b',"kv_transfer_params":null,"ec_transfer_params":null}\n\n',
        b',"ec_transfer_params":{"h":{"peer_host":"h"}},"kv_transfer_params":null}\n\n',
        b',"kv_transfer_params":null,"more":1}\n\n',
    ]
)
EVENTS = st.one_of(
    st.builds(lambda text, ids: chunk({"content": text}, ids), TEXTS, IDS),
    st.builds(lambda text, ids: chunk({"content": text}, ids), TEXTS, IDS),
    st.builds(lambda text, ids: chunk({"reasoning": text}, ids), TEXTS, st.one_of(IDS, MARKERS)),
    st.builds(lambda text, ids: chunk({"content": None, "reasoning": text}, ids), TEXTS, IDS),
    st.builds(lambda ids: chunk({}, ids), st.one_of(IDS, MARKERS)),
    st.builds(lambda text: data({"id": "c", "choices": [{"index": 1, "text": text, "finish_reason": None}]}), TEXTS),
    st.just(chunk({"content": "b"}, [7], logprobs=LOGPROBS)),
    st.builds(lambda text, ids, tail: chunk({"content": text}, ids)[:-3] + tail, TEXTS, IDS, TAILS),
    st.builds(lambda text, ids, tail: chunk({"content": text}, ids)[:-3] + tail, TEXTS, IDS, TAILS),
    st.just(chunk(TOOL, [8])),
    st.just(ROLE),
    st.just(b": comment\n\n"),
    # Invalid text, which no engine sends. It is passed on unchanged, and the answer is unknown after it.
    st.sampled_from([b"\xff", b"a\n\nb", b"\x00", b"\xed\xa0\x80"]).map(
        lambda text: chunk({"content": "@"}, [77]).replace(b"@", text)
    ),
    st.sampled_from([b"077", b"77.0", b"7e1", b"-77", b" 77", b"[77]"]).map(
        lambda number: chunk({"content": "a"}, [77]).replace(b"77", number)
    ),
)


@given(
    events=st.lists(EVENTS, max_size=30),
    fields=st.sampled_from([{}, {"return_token_ids": True}, {"stream": False}, {"include_reasoning": False}]),
    is_observed=st.sampled_from([True, True, False]),
)
def test_answer_equals_one_with_every_event_parsed(
    events: list[bytes], fields: dict[str, Any], is_observed: bool
) -> None:
    body = {**request(Api.CHAT, stream=True), **fields}
    stream = [ROLE, *events, FINISH]
    assume(is_observed or body["stream"])
    expected = delivered(stream, body, forwards=False, is_observed=is_observed)
    assert delivered(stream, body, forwards=True, is_observed=is_observed)[:2] == expected[:2]


@given(
    events=st.lists(EVENTS, max_size=30),
    fields=st.sampled_from([{}, {"return_token_ids": True}, {"stream": False}, {"include_reasoning": False}]),
    is_observed=st.sampled_from([True, True, False]),
)
def test_pump_passes_on_the_same_tokens_as_python(
    pump: Any, events: list[bytes], fields: dict[str, Any], is_observed: bool
) -> None:
    body = {**request(Api.CHAT, stream=True), **fields}
    stream = [ROLE, *events, FINISH]
    assume(is_observed or body["stream"])
    expected = delivered(stream, body, forwards=True, is_observed=is_observed)
    with closing(PumpedEngine(pump)) as engine:
        assert delivered(stream, body, forwards=True, is_observed=is_observed, engine=engine) == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("field", ["content", "reasoning"])
def test_most_tokens_of_an_ordinary_answer_are_recognised_by_their_bytes(field: str, stream: bool) -> None:
    events = [chunk({field: f" word{number}"}, [number + 100]) for number in range(50)]
    told = delivered([ROLE, *events, FINISH], request(Api.CHAT, stream=stream), forwards=True)[2]
    assert told == 49


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"stream": False}])
def test_tokens_with_null_kv_params_bypass_the_delivery_without_them(
    fields: dict[str, Any],
) -> None:
    """The chunks get shorter, even if the length then has one digit less."""
    tail = b',"kv_transfer_params":null}\n\n'
    texts = [" word" + "d" * length for length in range(80, 160)]
    events = [chunk({"content": text}, [number + 10])[:-3] + tail for number, text in enumerate(texts)]
    body = {**request(Api.CHAT, stream=True), **fields}
    written, known, told = delivered([ROLE, *events, FINISH], body, forwards=True)
    assert told == 79
    assert known[0] == "".join(texts) + "end"
    assert b"kv_transfer" not in written
    assert (written, known) == delivered([ROLE, *events, FINISH], body, forwards=False)[:2]


@pytest.mark.parametrize("words", [*range(12, 32), 600])
def test_only_chunks_of_the_announced_length_are_passed_on(words: int) -> None:
    event = chunk({"content": " wordy"}, [100])
    shape = TokenShape.recognise(event)
    assert shape is not None
    engine, client = Engine(), Client()
    for size in range(6):
        whole = framed(event.replace(b"y", b"yyyyy " * words + b"y" * size))
        assert engine.take(tokens_like(shape, client), whole) == b""
        line, _, rest = whole.partition(b"\r\n")
        for said in (int(line, 16) - 1, int(line, 16) + 1):
            wrong = b"%x\r\n%b" % (said, rest)
            assert engine.take(tokens_like(shape, client), wrong) == wrong
    assert len(client.written) == 6


def test_shape_is_learned_again_when_content_follows_reasoning() -> None:
    thoughts = [chunk({"reasoning": f" r{number}"}, [number + 100]) for number in range(10)]
    words = [chunk({"content": f" c{number}"}, [number + 200]) for number in range(10)]
    told = delivered([ROLE, *thoughts, *words, FINISH], request(Api.CHAT, stream=True), forwards=True)[2]
    assert told == 18


@pytest.mark.interpreted
def test_attempts_to_learn_a_shape_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Shape:
        @staticmethod
        def recognise(raw: bytes) -> None:
            nonlocal looks
            looks += 1

    monkeypatch.setattr("proxy.gateway.delivery.TokenShape", Shape)
    events = [chunk({"content": "two "}, [1, 2])] * 50
    delivered([ROLE, *events, FINISH], request(Api.CHAT, stream=True), forwards=True)
    assert looks == 8


@given(
    texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=6),
    last=st.sampled_from([b"", framed(FINISH), b"5\r\nda", b"\r\n", framed(b": comment\n\n")]),
    hides_ids=st.booleans(),
)
def test_pump_passes_on_the_chunks_of_one_read(pump: Any, texts: list[str], last: bytes, hides_ids: bool) -> None:
    events = [chunk({"content": text}, [100 + number]) for number, text in enumerate(texts)]
    shape = TokenShape.recognise(chunk({"content": "a"}, [100]))
    assert shape is not None
    read, results = b"".join(map(framed, events)) + last, []
    with closing(PumpedEngine(pump)) as pumped:
        for engine in (Engine(), pumped):
            client, transcript = Client(), Transcript()
            tokens = tokens_like(shape, client, transcript, hides_ids=hides_ids)
            left = engine.take(tokens, read)
            results.append((left, b"".join(client.written), tokens.token_notes, tokens.index))
    assert results[0] == results[1]


async def test_pump_gives_a_stream_back_when_its_client_reads_slowly(pump: Any) -> None:
    event = chunk({"content": " word" * 1000}, [100])
    shape = TokenShape.recognise(event)
    assert shape is not None
    tokens = tokens_like(shape, Client(), Transcript())
    with closing(PumpedEngine(pump)) as engine:
        number = engine.add(tokens)
        sent = b""
        while engine.given_back is None:
            engine.run_after(framed(event))
            sent += framed(event)
        unsent, left, arrivals = engine.given_back
        assert (left, arrivals, tokens.index) == (b"", len(sent) // len(framed(event)), arrivals - 1)
        assert engine.received() + unsent == sent
        with pytest.raises(KeyError):
            pump.remove(number)


async def test_pump_gives_a_stream_back_when_its_engine_is_gone(pump: Any) -> None:
    shape = TokenShape.recognise(chunk({"content": "a"}, [100]))
    assert shape is not None
    with closing(PumpedEngine(pump)) as engine:
        engine.add(tokens_like(shape, Client()))
        engine.leave()
        pump.run()
        assert engine.given_back == (b"", b"", 0)
