"""Whatever an engine sends ends in a valid answer, or in one error of the client's API, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import orjson
import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings

from proxy.observe.observers import RequestListener
from proxy.observe.record import RequestRecord
from proxy.wire.python_json import dumps
from tests.asking import Answer, read, until
from tests.canned import CannedEngine, Received, data, event_stream, http, json_answer
from tests.connectors import pushing
from tests.connectors.registering import BootstrapServer
from tests.deployment import Deployment, deployed
from tests.dialects import odd_answers
from tests.dialects.odd_answers import CALLBACK, Told
from tests.dialects.validators import check, named_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES, GENERATE = "/v1/messages", "/v1/responses", "/generate"
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
    MESSAGES: (MESSAGES, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
    RESPONSES: (RESPONSES, {"input": "Hi", "max_output_tokens": 50}),
    COMPLETIONS: (COMPLETIONS, {"prompt": "Hi", "max_tokens": 50}),
    "completion with ids": (
        COMPLETIONS,
        {"prompt": "Hi", "max_tokens": 50, "return_token_ids": True, "logprobs": 1},
    ),
    "several completions": (COMPLETIONS, {"prompt": ["Hi", "Ho"], "max_tokens": 50}),
}
NATIVE_QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    GENERATE: (GENERATE, {"text": "Hi", "sampling_params": {"max_new_tokens": 50}}),
    "log probabilities": (
        GENERATE,
        {
            "text": "Hi",
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
            "sampling_params": {"max_new_tokens": 50},
        },
    ),
    "about the prompt": (
        GENERATE,
        {"text": "Hi", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
    ),
    "several answers": (GENERATE, {"text": ["Hi", "Ho"], "sampling_params": {"max_new_tokens": 50}}),
}
# There is no other engine to wait for, and every answer of this one may be odd.
IMPATIENT = {"max_attempts": 1, "deadline_seconds": 0.01, "pressure_seconds": 0.0}
WATCHED = {"resume": {**IMPATIENT, "repeat_up_to_tokens": 0}}
WHOLE = {"resume": {**IMPATIENT, "repeat_up_to_tokens": 1000}}
SLOW: dict[str, dict[str, Any]] = {"resume": {"mode": "off"}, "listen": {"fast_path": False}}
COMMON: dict[str, dict[str, Any]] = {
    "health": {"eject_after": 10**6, "interval_seconds": 3600.0, "changing_interval_seconds": 3600.0},
    "retry": {"max_attempts": 2, "base_delay_seconds": 0.0, "max_delay_seconds": 0.0, "budget_share": 1.0},
    # A callback that is refused is the last one.
    "layerwise": {"host": "127.0.0.1", "callback_seconds": 0.05},
}
WORLDS: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "watched": WATCHED,
    "slow path": SLOW,
    **{
        f"{connector} {name}": {"connector": connector, **sections}
        for connector in ("vllm_pull", "vllm_store", "mooncake_bootstrap", "ascend_layerwise", "sglang_bootstrap")
        for name, sections in (("watched", WATCHED), ("slow path", SLOW))
    },
}
SGLANG_PAGES = {
    "/v1/models": json_answer({"data": [{"id": "sim", "owned_by": "sglang", "max_model_len": 100_000}]}),
    "/server_info": json_answer({"version": "0.5.23", "disaggregation_mode": "decode", "internal_states": []}),
}
"""What makes completions and native answers of SGLang watched."""


@dataclass
class MetPrefiller(CannedEngine):
    """Has a bootstrap server beside it."""

    bootstrap_port: int = 0

    async def __aenter__(self) -> Self:
        self._bootstrap = await BootstrapServer().__aenter__()
        self.bootstrap_port = self._bootstrap.port
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self._bootstrap.__aexit__(*error)


class Ended(RequestListener):
    """Counts the log lines of requests."""

    def __init__(self) -> None:
        self.count = 0

    def request_ended(self, record: RequestRecord) -> None:
        self.count += 1


class Bench:
    """A gateway in front of engines that send each example, on an event loop that stands still in between."""

    def __init__(self, sections: dict[str, Any]) -> None:
        self._sections: dict[str, Any] = {"connector": "plain", **COMMON, **sections}
        connector = self._sections["connector"]
        self._is_sglang = connector == "sglang_bootstrap"
        self.questions = QUESTIONS | NATIVE_QUESTIONS if self._is_sglang else QUESTIONS
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._gateway: asyncio.Future[Deployment] = self._loop.create_future()
        self._told: dict[str, Told] = {}
        self._callback: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._ended = Ended()
        pages = SGLANG_PAGES if self._is_sglang else {}
        self._decoder = CannedEngine("both", self._decoded, pages=pages)
        kind = MetPrefiller if self._is_sglang or connector == "mooncake_bootstrap" else CannedEngine
        self._prefillers = [] if connector == "plain" else [kind("prefill", self._prefilled, pages=pages)]
        self._serving = self._loop.create_task(self._serve())
        self._runner.run(self._ready())

    def close(self) -> None:
        """End the gateway, which must have left nothing."""
        self._runner.run(self._end())
        self._runner.close()

    def answers(self, stream: list[bytes], whole: list[bytes]) -> dict[tuple[str, bool], Answer]:
        """Return the answers to clients of the chat APIs by path and streaming, if an engine sends this."""
        told = {CHAT: Told(stream, whole, [], [])}
        return self.all_answers(told, {}, (CHAT, MESSAGES, RESPONSES))

    def all_answers(
        self, told: dict[str, Told], callback: dict[str, Any], names: Iterable[str] = ()
    ) -> dict[tuple[str, bool], Answer]:
        """Return the answers to clients by question and streaming, if engines send this on their routes."""
        self._told, self._callback = told, callback
        return self._runner.run(self._ask_all(names or self.questions))

    @property
    def asked_of_engine(self) -> int:
        """How many requests the decoder has received."""
        return len(self._decoder.received)

    async def _ready(self) -> None:
        await self._gateway

    async def _end(self) -> None:
        self._stop.set()
        await self._serving

    async def _serve(self) -> None:
        async with deployed([*self._prefillers], [self._decoder], **self._sections) as gateway:
            decoders = gateway.worker.pools.decode
            if self._is_sglang:
                await until(
                    lambda: all(decoders.health.health_of(backend).engine_facts for backend in decoders.all_backends()),
                    "what the engines say they are",
                )
            gateway.worker.request_observers.add_listener(self._ended)
            self._gateway.set_result(gateway)
            await self._stop.wait()

    def _decoded(self, received: Received) -> Iterable[bytes]:
        if received.path not in self._told:
            return [http(b"{}")]  # it is to release KV, or to abort a request
        told, body = self._told[received.path], orjson.loads(received.body)
        if self._sections["connector"] == "ascend_layerwise":
            url, engine_id = body["kv_transfer_params"]["metaserver"], pushing.engine_id(received)
            call = self._loop.create_task(self._call_back(url, {**self._callback, "request_id": engine_id}))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return told.stream if body.get("stream") else told.whole

    def _prefilled(self, received: Received) -> Iterable[bytes]:
        if received.path not in self._told:
            return [http(b"{}")]
        told = self._told[received.path]
        return told.prefill_of_sglang if self._is_sglang else told.prefill

    async def _call_back(self, url: str, payload: dict[str, Any]) -> None:
        gateway = await self._gateway
        async with gateway.session.post(url, data=dumps(payload)) as response:
            await response.read()

    async def _ask_all(self, names: Iterable[str]) -> dict[tuple[str, bool], Answer]:
        gateway = await self._gateway
        answers = {}
        self._ended.count = 0
        for name in names:
            path, body = self.questions[name]
            for is_stream in (True, False):
                # Another body each time: the gateway remembers requests that broke engines.
                told = {**body, "stream": is_stream, "user": f"user {len(self._decoder.received)}"}
                raw = orjson.dumps({"model": "sim", **told})
                async with gateway.session.post(gateway.url + path, data=raw) as response:
                    answers[name, is_stream] = await read(response)
        await asyncio.gather(*self._calls)
        await until(lambda: not gateway.leaks(), "the end of all requests")
        problems, gateway.problems[:] = list(gateway.problems), []
        assert not problems, problems
        gateway.worker.request_observers.flush_batch()
        assert self._ended.count == len(answers), "each request has one line in the log"
        return answers


@pytest.fixture(scope="module", params=WORLDS)
def any_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(WORLDS[request.param])
    yield bench
    bench.close()


@pytest.fixture(scope="module", params=["whole", "watched", "slow path"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(WORLDS[request.param])
    yield bench
    bench.close()


@pytest.mark.timeout(900)  # the full suite has 400 examples
def test_any_answer_of_engines_is_valid_or_an_error(any_bench: Bench, pytestconfig: pytest.Config) -> None:
    is_full = pytestconfig.getoption("--full")
    bench = any_bench

    @settings(
        max_examples=400 if is_full else 15,
        derandomize=not is_full,
        # To shrink an example takes hundreds of conversations, which is longer than a test may last.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(chats=odd_answers.CHATS, completions=odd_answers.COMPLETIONS, native=odd_answers.NATIVE, callback=CALLBACK)
    def hold(chats: Told, completions: Told, native: Told, callback: dict[str, Any]) -> None:
        told = {CHAT: chats, COMPLETIONS: completions, GENERATE: native}
        for (name, is_stream), answer in bench.all_answers(told, callback).items():
            check(bench.questions[name][0], answer, streams=is_stream, refusals=odd_answers.REFUSALS)

    hold()


def delta(**members: Any) -> bytes:
    return data(
        {
            "id": "chatcmpl-1",
            "model": "sim",
            "created": 1,
            "choices": [{"index": 0, "delta": members, "finish_reason": None}],
        }
    )


def call(index: int | None, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    told = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return {name: value for name, value in told.items() if value is not None}


ENDING = [
    data({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}),
    data({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}),
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        pytest.param(
            [
                call(0, "a", "f", ""),
                call(1, "b", "g", ""),
                call(0, None, None, "{"),
                call(1, None, None, "{}"),
                call(0, None, None, "}"),
            ],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="in turns",
        ),
        pytest.param([call(2, "a", "f", "{}")], [("a", "f", "{}")], id="first index 2"),
        pytest.param([call(0, None, "f", '{"a":'), call(0, None, "f", "1}")], [(None, "f", '{"a":1}')], id="no id"),
        pytest.param(
            [call(None, "a", "f", "{}"), call(None, "b", "f", "{}")],
            [("a", "f", "{}"), ("b", "f", "{}")],
            id="no index",
        ),
    ],
)
def test_streamed_calls_reach_every_client_whole(
    bench: Bench, fragments: list[dict[str, Any]], expected: list[tuple[str | None, str, str]]
) -> None:
    stream = event_stream([*(delta(tool_calls=[fragment]) for fragment in fragments), *ENDING])
    answers = bench.answers(stream, [http(b"{}")])
    message = answers["/v1/messages", True]
    check("/v1/messages", message, streams=True)
    blocks: list[list[str]] = []
    for name, event in named_events(message):
        if name == "content_block_start":
            blocks.append([event["content_block"]["id"], event["content_block"]["name"], ""])
        elif name == "content_block_delta":
            blocks[-1][2] += event["delta"]["partial_json"]
    response = answers["/v1/responses", True]
    check("/v1/responses", response, streams=True)
    items = [
        [item["call_id"], item["name"], item["arguments"]]
        for item in named_events(response)[-1][1]["response"]["output"]
    ]
    for told in (blocks, items):
        assert [(name, arguments) for _, name, arguments in told] == [(name, told) for _, name, told in expected]
        assert all(
            given == wanted if wanted else given for (given, *_), (wanted, *_) in zip(told, expected, strict=True)
        )


@pytest.mark.parametrize("arguments", ['{"a":"x\ny"}', '{"x":NaN}', '{"a" "b"', "[1]", '{"a":"\\ud83d"}'])
def test_arguments_that_are_not_json_are_a_tool_use_and_are_kept(bench: Bench, arguments: str) -> None:
    stream = event_stream([delta(tool_calls=[call(0, "a", "f", arguments)]), *ENDING])
    told = {"tool_calls": [call(None, "a", "f", arguments)]}
    whole = [http(dumps({"choices": [{"index": 0, "message": told, "finish_reason": "tool_calls"}]}))]
    answers = bench.answers(stream, whole)
    for is_stream in (True, False):
        check("/v1/messages", answers["/v1/messages", is_stream], streams=is_stream)
    events = named_events(answers["/v1/messages", True])
    written = "".join(event["delta"]["partial_json"] for name, event in events if name == "content_block_delta")
    assert written == arguments.replace("\n", "\\n")
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"id": "a", "function": None}]},
        {"content": 7},
        {"reasoning": {"a": 1}},
        {"tool_calls": "f"},
        "x",
    ],
)
def test_unreadable_answers_are_repeated_once_and_are_no_crash(bench: Bench, message: Any) -> None:
    whole = [http(dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))]
    stream = event_stream([delta(**message) if isinstance(message, dict) else b"data: {\n\n", *ENDING])
    before = bench.asked_of_engine
    answers = bench.answers(stream, whole)
    for path in ("/v1/messages", "/v1/responses"):
        for is_stream in (True, False):
            answer = answers[path, is_stream]
            check(path, answer, streams=is_stream)
            assert answer.status == 502
            assert b"decode instance" in answer.body
    assert bench.asked_of_engine - before <= 2 * len(answers)


def test_nameless_call_after_the_finish_reason_is_an_error_of_the_engine(bench: Bench) -> None:
    finish = data({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    stream = event_stream(
        [delta(content="Hi"), finish, delta(tool_calls=[call(0, "a", None, "{}")]), b"data: [DONE]\n\n"]
    )
    answers = bench.answers(stream, [http(b"{}")])
    for path in ("/v1/messages", "/v1/responses"):
        check(path, answers[path, True], streams=True)
        assert b"a tool call has no name" in answers[path, True].body
