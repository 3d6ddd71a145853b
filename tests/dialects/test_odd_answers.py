"""Whatever an engine sends ends in a valid answer, or in one error of the client's API, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings

from tests.asking import Answer, read, until
from tests.canned import CannedEngine, Received
from tests.deployment import deployed
from tests.dialects.odd_answers import streams, wholes
from tests.dialects.validators import check

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
        self._asked = 0
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

    async def _ready(self) -> None:
        await self._gateway

    async def _end(self) -> None:
        self._stop.set()
        await self._serving

    async def _serve(self) -> None:
        engine = CannedEngine("both", self._answer)
        async with deployed([], [engine], connector="plain", **COMMON, **self._sections) as gateway:
            self._gateway.set_result(gateway)
            await self._stop.wait()

    def _answer(self, received: Received) -> list[bytes]:
        return self._stream if orjson.loads(received.body).get("stream") else self._whole

    async def _ask_all(self) -> dict[tuple[str, bool], Answer]:
        gateway = await self._gateway
        answers = {}
        for path, body in QUESTIONS.items():
            for is_stream in (True, False):
                # Another text each time: the gateway remembers requests that broke engines.
                raw = orjson.dumps(
                    {"model": "sim", **body, "stream": is_stream, "user": str(len(gateway.engines[0].received))}
                )
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
        max_examples=400 if is_full else 40,
        derandomize=not is_full,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(stream=streams(), whole=wholes())
    def hold(stream: list[bytes], whole: list[bytes]) -> None:
        for (path, is_stream), answer in bench.answers(stream, whole).items():
            check(path, answer, streams=is_stream)

    hold()
