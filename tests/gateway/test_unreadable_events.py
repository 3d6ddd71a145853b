"""Events that orjson rejects: they are read as Python reads them, or the answer is incomplete and not resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from proxy.dialects.segment import Meaning
from proxy.dialects.sglang_events import GenerateAnswerAssembler, WatchedGenerateEvents
from proxy.wire.openai import DONE_EVENT as DONE
from proxy.wire.sse import Event
from tests.asking import Answer, read
from tests.canned import CannedEngine, Received, event_stream, json_answer
from tests.conftest import Deploy
from tests.deployment import Deployment
from tests.dialects import messages, responses

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", messages.PATH, responses.PATH
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200},
    COMPLETIONS: {"model": "sim", "prompt": "x", "max_tokens": 200},
    MESSAGES: messages.question(max_tokens=200),
    RESPONSES: responses.question(max_output_tokens=200),
}
HALVES = (b"not \\ud83d", b"\\ude00 to", b"\\udc00")
"""Two events that make an emoji, and one with half of a pair that has no other half."""
SAID = "Do not \U0001f600 to\udc00 end."
EVENT = b'data: {"id":"x","object":"o","created":1,"model":"sim","choices":[{"index":0,%b,"finish_reason":%b%b}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}\n\n'
UNREADABLE = {
    "cut off": b'data: {"id":"x","choices":[{"index":0,"text":" not",\n\n',
    "not UTF-8": b'data: {"id":"x","choices":[{"index":0,"text":" not \xff"}]}\n\n',
    "words": b"data: not\n\n",
    "a list": b'data: [{"text": " not"}]\n\n',
    "no choices": b'data: {"id":"x","choices":{"text":" not"}}\n\n',
    "nested": b'data: {"id":"x","choices":[{"index":0,"text":" not","x":%b}]}\n\n' % (b"[" * 5000 + b"]" * 5000),
}


def event(path: str, text: bytes, ids: str = "", finish: bytes = b"null") -> bytes:
    """Return an event with this text in JSON."""
    told = b'"text":"%b"' % text if path == COMPLETIONS else b'"delta":{"content":"%b"}' % text
    return EVENT % (told, finish, f',"token_ids":{ids}'.encode() if ids else b"")


def stream(path: str, *middle: bytes) -> list[bytes]:
    """Return an answer with these events in its middle."""
    last = [event(path, b" end.", "[9]"), event(path, b"", "[]", b'"stop"'), USAGE, DONE]
    return [event(path, b"Do ", "[7]").replace(b'"index"', b'"prompt_token_ids":[1,2,3],"index"'), *middle, *last]


def engine_path(path: str) -> str:
    """Return the path at the decoder for a request of this route."""
    return path if path == COMPLETIONS else CHAT


async def ask(gateway: Deployment, path: str, body: dict[str, Any]) -> Answer:
    async with gateway.session.post(gateway.url + path, data=orjson.dumps(body)) as response:
        return await read(response)


def text_of(answer: Answer) -> str:
    """Return the text of an answer in any dialect. The body must be JSON in UTF-8."""
    assert (answer.status, answer.is_whole) == (200, True), answer.body
    lines = answer.body.decode().split("\n") if answer.is_stream else [f"data: {answer.body.decode()}"]
    payloads = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    text = "".join(piece for payload in payloads for piece in pieces(payload))
    return joined(text)


def joined(text: str) -> str:
    """Join halves of surrogate pairs, as a client does whose language has them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def pieces(payload: dict[str, Any]) -> Iterable[str]:
    """Yield the pieces of text in one event or a whole answer."""
    for choice in payload.get("choices", ()):
        yield choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
    if payload.get("type") == "content_block_delta":
        yield payload["delta"].get("text", "")
    if payload.get("type") == "response.output_text.delta":
        yield payload["delta"]
    for item in payload.get("output", [payload]):
        for part in item.get("content", ()):
            yield part["text"]


def is_complete(answer: Answer) -> bool:
    """Whether a client takes it for a whole answer."""
    if not answer.is_stream:
        return answer.status == 200
    return answer.is_whole and any(mark in answer.body for mark in (b"[DONE]", b"message_stop", b"response.completed"))


@pytest.mark.fault(120)
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("connector", ["plain", "vllm_pull"])
async def test_half_a_surrogate_pair_is_part_of_the_answer(
    deploy: Deploy, path: str, is_streamed: bool, connector: str
) -> None:
    asked = engine_path(path)
    middle = [event(asked, text, f"[{token}]") for token, text in enumerate(HALVES, 100)]
    decoder = CannedEngine("both" if connector == "plain" else "decode", event_stream(stream(asked, *middle)))
    gateway = await deploy([prefiller(asked)], [decoder], connector=connector)
    answer = await ask(gateway, path, {**BODIES[path], "stream": is_streamed})
    assert text_of(answer) == SAID
    assert is_complete(answer)
    assert not gateway.metrics("pdproxy_sse_bad_events_total")


@pytest.mark.fault(120)
@pytest.mark.parametrize("path", [path for path in BODIES if path != COMPLETIONS])
@pytest.mark.parametrize("mode", ["exact", "off"])
async def test_body_of_the_engine_with_half_a_pair_arrives(deploy: Deploy, path: str, mode: str) -> None:
    """Also an answer of a few tokens, which is asked for whole."""
    body = {**BODIES[path], **({"max_tokens": 4} if path != RESPONSES else {"max_output_tokens": 4})}
    whole = b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},"finish_reason":"stop"}]}'
    said = whole % b"".join((b"Do ", *HALVES, b" end."))
    engine = CannedEngine("both", [json_answer(orjson.Fragment(said))])
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": mode})
    assert text_of(await ask(gateway, path, body)) == SAID


@pytest.mark.fault(120)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_resumed_prompt_has_the_tokens_of_half_characters(deploy: Deploy, path: str, is_streamed: bool) -> None:
    """Text of a chat that does not agree with its tokens ends in an error, and never in another answer."""
    asked, prompts = engine_path(path), list[Any]()
    ids = [*range(100, 170), 7]

    def answer(received: Received) -> list[bytes]:
        prompt = orjson.loads(received.body).get("prompt")
        if received.path.endswith("tokenize"):
            return [json_answer({})]
        if not isinstance(prompt, list):
            middle = [event(asked, HALVES[token % 3], f"[{token}]") for token in ids]
            return [*event_stream(stream(asked, *middle)[: 1 + len(ids)], is_whole=False), b"not a chunk"]
        prompts.append(prompt)
        told = event(COMPLETIONS, b" end.", "[9]").replace(b'"index"', b'"prompt_token_ids":%b,"index"')
        rest = [told % orjson.dumps(prompt), event(COMPLETIONS, b"", "[]", b'"stop"'), USAGE, DONE]
        return event_stream(rest)

    engines = [CannedEngine("both", answer), CannedEngine("both", answer)]
    gateway = await deploy(decoders=engines, connector="plain", resume={"chats": "completions"})
    given = await ask(gateway, path, {**BODIES[path], "stream": is_streamed})
    assert prompts == [[1, 2, 3, 7, *ids]] * len(prompts)
    assert is_complete(given) == bool(prompts)
    if path == COMPLETIONS:
        text = b"".join(HALVES[token % 3] for token in ids).decode("unicode-escape")
        assert text_of(given) == joined(f"Do {text} end.")


@pytest.mark.fault(121)
@pytest.mark.parametrize("odd", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", BODIES)
async def test_answer_that_cannot_be_read_is_not_complete(
    deploy: Deploy, path: str, odd: bytes, is_streamed: bool
) -> None:
    """Except where the client gets the engine's own bytes, and can judge."""
    asked = engine_path(path)
    written = stream(asked, odd, event(asked, b"no", "[8]"))
    engine = CannedEngine("both", event_stream(written))
    gateway = await deploy(decoders=[engine], connector="plain")
    answer = await ask(gateway, path, {**BODIES[path], "stream": is_streamed})
    assert len(engine.received) <= 2
    if is_streamed and path == asked:
        assert odd in answer.body
        assert answer.is_done
    else:
        assert not is_complete(answer)
        assert answer.is_stream or answer.status == 502
    assert gateway.metrics("pdproxy_sse_bad_events_total")[()] >= 1


@pytest.mark.fault(121)
@pytest.mark.parametrize("odd", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_with_an_unreadable_event_is_not_resumed(deploy: Deploy, path: str, odd: bytes) -> None:
    pieces = [*event_stream(stream(path, odd, event(path, b"no", "[8]"))[:3], is_whole=False), b"not a chunk"]
    engines = [CannedEngine("both", pieces), CannedEngine("both", pieces)]
    gateway = await deploy(decoders=engines, connector="plain")
    answer = await ask(gateway, path, {**BODIES[path], "stream": True})
    assert odd in answer.body
    assert not is_complete(answer)
    assert sum(len(engine.received) for engine in engines) == 1
    assert gateway.metrics("pdproxy_resumes_total") == {}


@pytest.mark.fault(121)
@pytest.mark.parametrize("odd", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{"n": 2}, {"model": "other"}, {"include_reasoning": False}], ids=str)
async def test_translated_stream_ends_at_an_unreadable_event(
    deploy: Deploy, path: str, odd: bytes, fields: dict[str, Any]
) -> None:
    engine = CannedEngine("both", event_stream(stream(path, odd)))
    # A stream that is merged is split among hand-overs; plain engines take several samples at once.
    gateway = await deploy([prefiller(path)], [engine], connector="vllm_pull", models={"aliases": ["other=sim"]})
    answer = await ask(gateway, path, {**BODIES[path], **fields, "stream": True})
    if fields.get("include_reasoning") is None or path == CHAT:
        assert not is_complete(answer)
        assert odd not in answer.body
        assert answer.error["code"] == "decode_bad_answer"


@pytest.mark.fault(121)
@pytest.mark.parametrize("odd", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unreadable_event_after_a_resume_is_an_error(deploy: Deploy, path: str, odd: bytes) -> None:
    """Its token ids belong to another prompt, and its id to another answer."""

    def answer(received: Received) -> list[bytes]:
        prompt = orjson.loads(received.body).get("prompt")
        if not isinstance(prompt, list):
            return [*event_stream(stream(path)[:1], is_whole=False), b"not a chunk"]
        told = event(COMPLETIONS, b" more", "[8]").replace(b'"index"', b'"prompt_token_ids":%b,"index"')
        return event_stream([told % orjson.dumps(prompt), odd, *stream(COMPLETIONS)[1:]])

    gateway = await deploy(
        decoders=[CannedEngine("both", answer), CannedEngine("both", answer)],
        connector="plain",
        resume={"chats": "completions"},
    )
    given = await ask(gateway, path, {**BODIES[path], "stream": True})
    assert odd not in given.body
    assert not is_complete(given)
    assert given.error["code"] == "decode_bad_answer"


@pytest.mark.fault(121)
@pytest.mark.parametrize("data", [b"data:\n\n", b"data: \n\n", b"data: null\n\n"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_empty_event_is_not_part_of_the_answer(deploy: Deploy, data: bytes, is_streamed: bool) -> None:
    written = stream(CHAT, data)
    gateway = await deploy(decoders=[CannedEngine("both", event_stream(written))], connector="plain")
    answer = await ask(gateway, CHAT, {**BODIES[CHAT], "stream": is_streamed})
    assert is_complete(answer)


def prefiller(path: str) -> CannedEngine:
    """One that hands over; its only token is half of a surrogate pair, too."""
    params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1]}
    text = b'"text":"\\ud83d"' if path == COMPLETIONS else b'"message":{"role":"assistant","content":"\\ud83d"}'
    choice = orjson.Fragment(b'{"index":0,%b,"finish_reason":"length"}' % text)
    return CannedEngine("prefill", [json_answer({"choices": [choice], "kv_transfer_params": params})])


NATIVE = b'data: {"text":"%b","output_ids":[%b],"meta_info":{"id":"x","prompt_tokens":1,"completion_tokens":%d,%b}}\n\n'


def native(*middle: bytes, last: bytes = b"Do not \\ud83d\\ude00") -> list[bytes]:
    """Events of SGLang's own API, each with the answer so far."""
    first = NATIVE % (b"Do ", b"7", 1, b'"finish_reason":null')
    ended = NATIVE % (last, b"7,8,9", 3, b'"finish_reason":{"type":"stop","matched":null}')
    return [first, *middle, ended, DONE]


@pytest.mark.fault(120)
async def test_half_a_surrogate_pair_passes_in_a_native_stream(deploy: Deploy) -> None:
    half = NATIVE % (b"Do not \\ud83d", b"7,8", 2, b'"finish_reason":null')
    events = native(half)
    prefiller, decoder = CannedEngine("prefill", event_stream(native())), CannedEngine("decode", event_stream(events))
    gateway = await deploy([prefiller], [decoder], connector="sglang_bootstrap")
    answer = await ask(gateway, "/generate", {"text": "x", "stream": True})
    assert answer.body == b"".join(events)


@pytest.mark.fault(120)
def test_native_answer_that_is_watched_has_half_a_surrogate_pair() -> None:
    segment, so_far = WatchedGenerateEvents(), GenerateAnswerAssembler()
    for told in native(NATIVE % (b"Do not \\ud83d", b"7,8", 2, b'"finish_reason":null'))[:-1]:
        assert segment.read_event(Event(told[6:-2])) is Meaning.CONTENT
        so_far.add_chunk(segment.payload)
    values = so_far.values()
    assert (joined(values["text"]), values["output_ids"]) == ("Do not \U0001f600", [7, 8, 9])


@pytest.mark.fault(121)
@pytest.mark.parametrize(
    "data",
    [
        *(b"{no", b'{"text":"Do not","output_ids":[7,8]}', b"[1]", b'{"output_ids":[]}'),
        *(b'{"meta_info":{}}', b'{"text":7,"output_ids":[],"meta_info":{}}', b'{"text":"a","meta_info":{}}'),
    ],
)
def test_native_event_that_cannot_be_read_is_malformed(data: bytes) -> None:
    assert WatchedGenerateEvents().read_event(Event(data, data)) is Meaning.MALFORMED


@pytest.mark.fault(121)
def test_native_event_with_less_text_than_before_is_malformed() -> None:
    segment, (first, *_) = WatchedGenerateEvents(), native()
    assert segment.read_event(Event(first[6:-2])) is Meaning.CONTENT
    less = b'{"text":"D","output_ids":[7],"meta_info":{}}'
    assert segment.read_event(Event(less, less)) is Meaning.MALFORMED


@pytest.mark.fault(121)
def test_native_answer_that_is_aborted_keeps_what_was_read() -> None:
    segment, so_far, (first, *_) = WatchedGenerateEvents(), GenerateAnswerAssembler(), native()
    aborted = b'{"text":null,"meta_info":{"finish_reason":{"type":"abort"}}}'
    assert segment.read_event(Event(first[6:-2])) is Meaning.CONTENT
    so_far.add_chunk(segment.payload)
    assert segment.read_event(Event(aborted, aborted)) is Meaning.ABORTED
    assert segment.is_empty_event
    so_far.add_chunk(segment.payload)
    assert (so_far.values()["text"], so_far.values()["output_ids"]) == ("Do ", [7])


@pytest.mark.fault(121)
async def test_tool_call_without_a_name_is_an_error_even_in_a_cut_stream(deploy: Deploy) -> None:
    """The answer has its finish reason, so that it is closed without another decoder."""
    call = b'{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","function":{"arguments":"{}"}}]},"finish_reason":%b}'
    told = b'data: {"id":"x","choices":[%b]}\n\n' % (call % b'"tool_calls"')
    pieces = [*event_stream([told], is_whole=False), b"not a chunk"]
    gateway = await deploy(decoders=[CannedEngine("both", pieces)], connector="plain")
    answer = await ask(gateway, CHAT, BODIES[CHAT])
    assert (answer.status, answer.error["code"]) == (502, "decode_bad_answer")
    assert "a tool call has no name" in answer.error["message"]
