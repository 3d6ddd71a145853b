"""Whatever an engine sends ends in a valid answer, or in one error of the client's API, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings

from proxy.wire.python_json import dumps
from tests.asking import Answer, read, until
from tests.canned import CannedEngine, Received, data, event_stream, http
from tests.deployment import deployed
from tests.dialects.odd_answers import streams, wholes
from tests.dialects.validators import check, named_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deployment import Deployment

QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 50},
}
# There is no other engine to wait for, and every answer of this one may be odd.
IMPATIENT = {"max_attempts": 1, "deadline_seconds": 0.01, "pressure_seconds": 0.0}
COMMON: dict[str, dict[str, Any]] = {
    "health": {"eject_after": 10**6, "interval_seconds": 3600.0, "changing_interval_seconds": 3600.0},
    "retry": {"max_attempts": 2, "base_delay_seconds": 0.0, "max_delay_seconds": 0.0, "budget_share": 1.0},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"resume": {**IMPATIENT, "repeat_up_to_tokens": 1000}},
    "watched": {"resume": {**IMPATIENT, "repeat_up_to_tokens": 0}},
    "slow path": {"resume": {"mode": "off"}, "listen": {"fast_path": False}},
}


class Bench:
    """A gateway in front of one engine, which sends each example, on an event loop that stands still in between."""

    def __init__(self, sections: dict[str, Any]) -> None:
        self._sections = sections
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._gateway: asyncio.Future[Deployment] = self._loop.create_future()
        self._stream: list[bytes] = []
        self._whole: list[bytes] = []
        self._engine = CannedEngine("both", self._answer)
        self._serving = self._loop.create_task(self._serve())
        self._runner.run(self._ready())

    def close(self) -> None:
        """End the gateway, which must have left nothing."""
        self._runner.run(self._end())
        self._runner.close()

    def answers(self, stream: list[bytes], whole: list[bytes]) -> dict[tuple[str, bool], Answer]:
        """What clients of all APIs get of an engine that sends this, by path and whether they stream."""
        self._stream, self._whole = stream, whole
        return self._runner.run(self._ask_all())

    @property
    def asked_of_engine(self) -> int:
        """How many requests the engine has received."""
        return len(self._engine.received)

    async def _ready(self) -> None:
        await self._gateway

    async def _end(self) -> None:
        self._stop.set()
        await self._serving

    async def _serve(self) -> None:
        sections: dict[str, Any] = {"connector": "plain", **COMMON, **self._sections}
        async with deployed([], [self._engine], **sections) as gateway:
            self._gateway.set_result(gateway)
            await self._stop.wait()

    def _answer(self, received: Received) -> list[bytes]:
        return self._stream if orjson.loads(received.body).get("stream") else self._whole

    async def _ask_all(self) -> dict[tuple[str, bool], Answer]:
        gateway = await self._gateway
        answers = {}
        for path, body in QUESTIONS.items():
            for is_stream in (True, False):
                # Another body each time: the gateway remembers requests that broke engines.
                told = {**body, "stream": is_stream, "user": f"user {len(self._engine.received)}"}
                raw = orjson.dumps({"model": "sim", **told})
                async with gateway.session.post(gateway.url + path, data=raw) as response:
                    answers[path, is_stream] = await read(response)
        await until(lambda: not gateway.leaks(), "the end of all requests")
        problems, gateway.problems[:] = list(gateway.problems), []
        assert not problems, problems
        return answers


@pytest.fixture(scope="module", params=SETTINGS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(SETTINGS[request.param])
    yield bench
    bench.close()


def test_any_answer_of_an_engine_is_valid_or_an_error(bench: Bench, pytestconfig: pytest.Config) -> None:
    is_full = pytestconfig.getoption("--full")

    @settings(
        max_examples=400 if is_full else 25,
        derandomize=not is_full,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(stream=streams(), whole=wholes())
    def hold(stream: list[bytes], whole: list[bytes]) -> None:
        for (path, is_stream), answer in bench.answers(stream, whole).items():
            check(path, answer, streams=is_stream)

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
