"""The decoder's stream on its way to the client, for all kinds of packets and clients."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from yarl import URL

from proxy.gateway.relay import TokenClock
from proxy.observe.metrics import Metrics, render_exposition
from proxy.observe.record import RequestRecord
from proxy.wire.openai import OPENAI_APIS, Api
from proxy.wire.sse import EventSplitter
from tests.asking import Answer, answer_alone, read, request, until
from tests.canned import CannedEngine, Received, data, event_stream, json_answer
from tests.clock import Clock
from tests.conftest import Deploy
from tests.deployment import Deployment


def chunk(text: str, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **fields}


async def streamed(
    deploy: Deploy, *pieces: bytes, is_whole: bool = True, fields: dict[str, Any] | None = None, **sections: Any
) -> Answer:
    """Return the client's answer for these pieces of an engine. `fields`: members of the request."""
    engine = CannedEngine("both", event_stream(pieces, is_whole=is_whole), closes=not is_whole)
    gateway = await deploy(decoders=[engine], connector="plain", retry={"max_attempts": 1}, **sections)
    return await gateway.ask(request(Api.COMPLETIONS, stream=True, **(fields or {})))


async def note_handoff(deploy: Deploy, stream: bytes) -> Deployment:
    """Return a gateway whose decoder writes this stream for each sample."""
    params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1]}
    prefilled = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "kv_transfer_params": params}
    prefiller = CannedEngine("prefill", [json_answer(prefilled)])
    return await deploy([prefiller], [CannedEngine("decode", event_stream([stream]))])


DONE = b"data: [DONE]\n\n"
ENDING = data(chunk("d", "stop")) + DONE

# The clock


def test_first_token_and_one_of_eight_gaps_are_timed(clock: Clock) -> None:
    metrics, record = Metrics(), RequestRecord("completions", "r", clock=clock)
    tokens = TokenClock(record, metrics)
    for seconds in (8, 1, *[4] * 7, 2, *[4] * 6):
        clock.now += seconds
        tokens.record_token()
    assert record.first_token_seconds == 8
    told = render_exposition(metrics.collect(), "")[0].decode()
    assert "pdproxy_inter_token_seconds_count 2.0" in told
    assert "pdproxy_inter_token_seconds_sum 3.0" in told


# The network

ON_THE_WIRE = [
    {"split_bytes": {"size": 1}},
    {"split_bytes": {"size": 7}},
    {"coalesce": {"size": 3}},
    {"coalesce": {"size": 1000}},
    {"crlf": {}},
    {"crlf": {}, "split_bytes": {"size": 1}},
    {"comments": {}},
    {"comments": {}, "crlf": {}, "coalesce": {"size": 2}},
]


pytestmark = pytest.mark.usefixtures("tokens_passed_on_by")


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("api", OPENAI_APIS)
@pytest.mark.parametrize("faults", ON_THE_WIRE, ids=lambda faults: "-".join(faults))
async def test_answer_does_not_depend_on_packet_boundaries(
    gateway: Deployment, faults: dict[str, dict[str, int]], api: Api, samples: int
) -> None:
    for name, fields in faults.items():
        gateway.decoders[0].faults.add(name, **fields)
    body = request(api, "über 日本 🙂", max_tokens=24, n=samples, stream=True)
    answer = await gateway.ask(body)
    text = await answer_alone({name: value for name, value in body.items() if name != "n"})
    assert answer.is_done
    assert answer.texts == dict.fromkeys(range(samples), text)


async def test_stream_split_at_any_byte_arrives_byte_for_byte(deploy: Deploy) -> None:
    stream = data(chunk("a\u00fc\U0001f642")) + b": note\r\n\r\n" + data(chunk("b")).replace(b"\n", b"\r\n") + ENDING
    whole = event_stream([stream])
    engine = CannedEngine("both")
    gateway = await deploy(decoders=[engine], connector="plain")
    for cut in range(1, len(stream)):
        engine.answer = [whole[0], *event_stream([stream[:cut], stream[cut:]])[1:]]
        answer = await gateway.ask(request(Api.COMPLETIONS, stream=True))
        assert answer.body == stream


@pytest.mark.parametrize("tells_ids", [True, False])
@pytest.mark.parametrize("per_read", [1, 3, 1000])
async def test_answers_on_reused_connections_are_not_mixed_up(deploy: Deploy, per_read: int, tells_ids: bool) -> None:
    """Neither with the one before on the same connection, nor with those beside it, however fast they come."""

    def answer(received: Received) -> Iterator[bytes]:
        prompt = orjson.loads(received.body)["prompt"]
        texts = [f"{prompt}-{number} " for number in range(20)]
        ids = [[1000 + number] if tells_ids else None for number in range(20)]
        tokens = [data(chunk(text, token_ids=told)) for text, told in zip(texts, ids, strict=True)]
        head, *chunks, end = event_stream([*tokens, data(chunk("", "stop")), DONE])
        chunks.append(end)
        yield head
        for at in range(0, len(chunks), per_read):
            yield b"".join(chunks[at : at + per_read])

    gateway = await deploy(decoders=[CannedEngine("both", answer)], connector="plain")
    for turn in range(3):
        prompts = [f"client {turn}.{number}" for number in range(20)]
        asked = (gateway.ask(request(Api.COMPLETIONS, prompt, stream=True, max_tokens=100)) for prompt in prompts)
        for prompt, given in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert given.is_done
            assert given.text == "".join(f"{prompt}-{number} " for number in range(20))


async def test_unknown_events_pass(deploy: Deploy) -> None:
    unknown = b'event: ping\nid: 1\ndata: {"x": 1}\n\n: comment\n\ndata: [1]\n\ndata: not json\n\nretry: 1\n\n'
    half = b'data: {"prompt_token_ids":[1, 2\n\n'
    stream = data(chunk("a")) + unknown + half + ENDING
    answer = await streamed(deploy, stream)
    assert answer.body == stream


async def test_events_before_the_first_token_are_held_and_then_sent(deploy: Deploy) -> None:
    stream = b": hello\n\n" + data({"object": "unknown"}) + data(chunk("a")) + ENDING
    answer = await streamed(deploy, stream[:20], stream[20:])
    assert answer.body == stream


@pytest.mark.parametrize("asks", [True, False])
async def test_large_first_event_passes(deploy: Deploy, asks: bool) -> None:
    """The event has the prompt's token ids, which some clients request."""

    def first(ids: list[int] | None) -> bytes:
        return data(chunk("a", prompt_token_ids=ids))

    stream = first(list(range(200_000))) + ENDING
    pieces = [stream[at : at + 60_000] for at in range(0, len(stream), 60_000)]
    answer = await streamed(deploy, *pieces, fields={"return_token_ids": True} if asks else {})
    assert answer.body == (stream if asks else first(None) + ENDING)


@pytest.mark.interpreted
@pytest.mark.parametrize("wants_ids", [False, True])
async def test_long_prompt_ids_are_sent_only_on_request(deploy: Deploy, wants_ids: bool) -> None:
    common: dict[str, Any] = {"id": "a", "object": "chunk", "created": 1, "model": "sim"}
    prompt_ids = [*range(50_000)]  # more than one read takes
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    last = {"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": "stop", "token_ids": [7]}
    events = [
        {**common, "choices": [opening], "prompt_token_ids": prompt_ids},
        {**common, "choices": [last]},
        {**common, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}},
    ]
    engine = CannedEngine("both", event_stream([*map(data, events), b"data: [DONE]\n\n"]))
    gateway = await deploy([], [engine], connector="plain")
    answer = await gateway.ask(request(Api.CHAT, stream=True, max_tokens=9, return_token_ids=wants_ids))
    assert answer.is_done
    assert answer.events[0]["prompt_token_ids"] == (prompt_ids if wants_ids else None)


@pytest.mark.interpreted
async def test_event_without_end_is_a_failure(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventSplitter.__init__, "__defaults__", (100_000,))
    answer = await streamed(deploy, data(chunk("a")), b"data: ", *[b"x" * 10_000] * 11)
    assert not answer.is_whole
    assert answer.error["code"] == "decode_bad_answer"


# The end


@pytest.mark.parametrize("mode", ["exact", "restart-only", "off"])
@pytest.mark.parametrize("ending", [b"", DONE, data({"choices": [], "usage": {"x": 1}}) + DONE])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_stream_without_finish_and_done_is_incomplete(
    deploy: Deploy, ending: bytes, is_whole: bool, mode: str
) -> None:
    pieces = data(chunk("a")), ending or b": \n\n"
    answer = await streamed(deploy, *pieces, is_whole=is_whole, resume={"mode": mode})
    assert not answer.is_whole
    assert answer.error["code"] == "decode_broken"
    assert b"[DONE]" not in answer.body


@pytest.mark.parametrize("is_whole", [True, False])
async def test_finish_without_done_completes_a_watched_answer(deploy: Deploy, is_whole: bool) -> None:
    """Nothing is missing but the usage, and that is known here."""
    told = chunk("a", "stop")
    told["choices"][0] |= {"prompt_token_ids": [1, 2], "token_ids": [3]}
    fields = {"stream_options": {"include_usage": True}}
    answer = await streamed(deploy, data(told), is_whole=is_whole, fields=fields)
    assert answer.is_done
    assert [event["choices"][0]["finish_reason"] for event in answer.events[:-2]] == ["stop"]
    assert answer.usage == {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}


@pytest.mark.parametrize("mode", ["restart-only", "off"])
async def test_finish_without_done_does_not_complete_an_unwatched_answer(deploy: Deploy, mode: str) -> None:
    answer = await streamed(deploy, data(chunk("a", "stop")), resume={"mode": mode})
    assert not answer.is_whole
    assert answer.error["code"] == "decode_broken"


def counted(text: str, finish_reason: str | None = None, *, ids: list[int] | None, prompt: list[int] | None) -> bytes:
    """Return a chunk with the given token ids."""
    told = chunk(text, finish_reason)
    told["choices"][0] |= {"prompt_token_ids": prompt, "token_ids": ids}
    return data(told)


TOLD_NO_USAGE = counted("a", ids=[3], prompt=[1, 2]) + counted("b", "stop", ids=[4, 5], prompt=None) + DONE
ASKS_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
COUNTS = {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}


async def test_missing_usage_is_counted_by_token_ids(deploy: Deploy) -> None:
    answer = await streamed(deploy, TOLD_NO_USAGE, fields=ASKS_USAGE)
    assert answer.is_done
    assert answer.texts == {0: "ab"}
    *_, usage, done = answer.events
    assert (usage, done) == ({"id": "cmpl-1", "choices": [], "usage": COUNTS}, "[DONE]")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_client_gets_usage_whenever_it_is_known(deploy: Deploy, n: int, stream: bool) -> None:
    """One answer or several in one, streamed or not, whatever hands the KV cache over."""
    gateway = await note_handoff(deploy, TOLD_NO_USAGE)
    body = request(Api.COMPLETIONS, n=n, stream=stream, max_tokens=100)
    for _ in range(2):  # the second request uses the same connections, which must have no bytes left
        answer = await gateway.ask(body | (ASKS_USAGE if stream else {}))
        assert answer.is_done
        assert answer.texts == dict.fromkeys(range(n), "ab")
        assert answer.usage == {"prompt_tokens": 2, "total_tokens": 2 + 3 * n, "completion_tokens": 3 * n}


async def test_unknown_usage_is_not_sent(deploy: Deploy) -> None:
    """Neither made up nor an empty chunk, which would end the body before `[DONE]`."""
    gateway = await note_handoff(deploy, data(chunk("a")) + ENDING)
    for n in (1, 2):
        answer = await gateway.ask(request(Api.COMPLETIONS, n=n, stream=True, **ASKS_USAGE))
        assert answer.is_done
        assert answer.texts == dict.fromkeys(range(n), "ad")
        assert all(event["choices"] for event in answer.events[:-1])


async def test_usage_sent_before_a_broken_connection_is_not_repeated(deploy: Deploy) -> None:
    usage = data({"id": "cmpl-1", "choices": [], "usage": COUNTS})
    cut_off = TOLD_NO_USAGE.removesuffix(DONE) + usage
    answer = await streamed(deploy, cut_off, is_whole=False, fields=ASKS_USAGE)
    assert answer.is_done
    assert [event["usage"] for event in answer.events[:-1] if not event["choices"]] == [COUNTS]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cut", [0, 1])
async def test_bytes_after_done_are_ignored(deploy: Deploy, n: int, cut: int) -> None:
    """They may arrive with `[DONE]` or later."""
    more = data(chunk("late")) + data({"x": 1}) + b": late\n\n" + DONE
    pieces = [data(chunk("a")) + ENDING, more][: 2 if cut else 1]
    if not cut:
        pieces[0] += more
    answer = await streamed(deploy, *pieces, fields={"n": n})
    assert answer.is_done
    assert answer.body.count(b"[DONE]") == 1
    assert b"late" not in answer.body
    assert b'"x"' not in answer.body


async def test_engine_that_sends_after_done_does_not_delay_the_client(deploy: Deploy) -> None:
    """Silence ends the wait for the end of the body, and so does anything else."""
    engine = CannedEngine(
        "both", lambda _: itertools.chain(event_stream([ENDING])[:-1], itertools.repeat(b"1\r\n\n\r\n"))
    )
    gateway = await deploy(decoders=[engine], connector="plain")
    answer = await gateway.ask(request(Api.COMPLETIONS, stream=True))
    assert answer.body == ENDING


async def test_answer_is_complete_after_done(deploy: Deploy) -> None:
    """Whatever becomes of the connection afterwards."""
    answer = await streamed(deploy, data(chunk("a")) + ENDING, is_whole=False)
    assert answer.is_done


async def test_error_in_a_stream_is_passed_on(deploy: Deploy) -> None:
    event = b'data: {"error": {"message": "out of \\u006demory", "code": 507}}\n\n'
    answer = await streamed(deploy, data(chunk("a")), event + DONE)
    assert answer.body == data(chunk("a")) + event
    assert not answer.is_whole


async def test_engines_error_before_the_first_token_is_an_http_error(deploy: Deploy) -> None:
    event = b'data: {"error": {"message": "too long", "code": 400}}\n\n'
    answer = await streamed(deploy, event + DONE)
    assert (answer.status, answer.body) == (400, event[6:-2])


async def test_recomputation_is_reported_in_metrics_and_log(deploy: Deploy) -> None:
    """Even when its event says `tool_calls`, which may be made up; its text is not."""
    made_up = [{"index": 0, "function": {"arguments": "}"}}]
    recomputed = {
        "index": 0,
        "delta": {"content": "x", "tool_calls": made_up},
        "finish_reason": "tool_calls",
        "stop_reason": "recomputed",
    }
    answer = await streamed(deploy, data(chunk("a")), data({"choices": [recomputed]}) + DONE)
    assert answer.texts == {0: "ax"}
    assert answer.error["code"] == "decode_recomputed"
    assert "the engine does not report token ids" in answer.error["message"]
    assert b'"recomputed"' not in answer.body
    assert b"tool_calls" not in answer.body


async def test_unsent_answer_with_an_unreadable_member_is_repeated_once(deploy: Deploy) -> None:
    """However long it is: the part before the member may be wrong, too."""
    told = [chunk("a", prompt_token_ids=None) for _ in range(100)]
    for number, one in enumerate(told):
        one["choices"][0] |= {"token_ids": [number], "prompt_token_ids": [1, 2]}
    nonsense = data({"id": "cmpl-1", "choices": [{"index": 0, "text": 7}]})
    answers = iter([event_stream([*map(data, told), nonsense]), event_stream([ENDING])])
    engines = [CannedEngine("both", lambda _: next(answers)) for _ in range(2)]
    gateway = await deploy(decoders=engines, connector="plain")
    answer = await gateway.ask(request(Api.COMPLETIONS, max_tokens=1000))
    assert (answer.status, answer.text) == (200, "d")
    (first,), (second,) = (engine.received for engine in engines)
    assert first.body == second.body
    assert gateway.metrics("pdproxy_retries_total") == {("bad_answer", "decode"): 1.0}


async def test_stop_string_completed_by_the_last_chunk_ends_the_answer(deploy: Deploy) -> None:
    """No other decoder is needed."""
    body = request(Api.COMPLETIONS, "Hello", max_tokens=30)
    text = await answer_alone(body)
    assert text[:14].isascii()
    gateway = await deploy(decoders=2, connector="plain")
    for decoder, tokens in zip(gateway.decoders, (12, 2), strict=True):
        decoder.faults.add("recompute", tokens=tokens)
    answer = await gateway.ask({**body, "stop": text[10:14], "stream": True})
    assert answer.is_done
    assert answer.text == text[: text.index(text[10:14])]
    assert sum(gateway.metrics("pdproxy_resumes_total").values()) == 1


# The client


async def test_client_that_reads_late_gets_everything(deploy: Deploy) -> None:
    gateway = await deploy()
    (decoder,) = gateway.decoders
    body = request(Api.CHAT, stream=True, max_tokens=10_000)
    async with gateway.session.post(gateway.url + Api.CHAT.path, json=body) as response:
        await decoder.wait_until(lambda state: state.tokens_generated == 10_000)
        answer = await read(response)
    assert answer.is_done
    assert answer.text == await answer_alone(body)


def endless(engine: CannedEngine) -> None:
    """Let an engine stream for ever."""
    event = data(chunk("x" * 200))
    more = itertools.repeat(b"%x\r\n%b\r\n" % (len(event), event))
    engine.answer = itertools.chain(event_stream([event], is_whole=False), more)


@contextmanager
def asking_but_not_reading(gateway: Deployment) -> Iterator[None]:
    body = orjson.dumps(request(Api.COMPLETIONS, stream=True))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", URL(gateway.url).port)) as client:
        client.sendall(head + body)
        yield


async def held_back(engine: CannedEngine) -> None:
    """Wait until an engine has sent something, and can send nothing more for a while."""
    await until(lambda: engine.sent_bytes, "the first bytes of the engine")
    sent_before = -1
    while engine.sent_bytes != sent_before:
        sent_before = engine.sent_bytes
        await asyncio.sleep(0.03)


async def test_client_that_does_not_read_slows_its_engine_and_is_disconnected(deploy: Deploy) -> None:
    """However much the engine has to say, little of it is taken. That silence is the client's, not the engine's."""
    engine = CannedEngine("both")
    endless(engine)
    gateway = await deploy(
        decoders=[engine], connector="plain", listen={"write_timeout_seconds": 0.4}, timeouts={"idle_seconds": 0.1}
    )
    with asking_but_not_reading(gateway):
        await engine.state.wait_until(lambda state: state.disconnects == 1)
    await until(lambda: gateway.metrics("pdproxy_request_end_total") == {("cD",): 1.0}, "the end of the request")
    assert gateway.metrics("pdproxy_streams_broken_total") == {("write_timeout", "client"): 1.0}
    assert engine.sent_bytes < 16 * 1024 * 1024


async def test_slow_client_that_disconnects_frees_its_engine(deploy: Deploy) -> None:
    engine = CannedEngine("both")
    endless(engine)
    gateway = await deploy(decoders=[engine], connector="plain", listen={"write_timeout_seconds": 3600.0})
    with asking_but_not_reading(gateway):
        await held_back(engine)
    await engine.state.wait_until(lambda state: state.disconnects == 1)
