"""Replays over real sockets: the gateway in front of the engines, and the engines' checks."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from lab.common.peers import Environment
from lab.common.processes import HOST
from lab.replay.fleet import Course, Fleet
from lab.replay.socket_engines import WORD, Engines, request_bytes
from lab.replay.sockets import over_sockets, programs
from lab.replay.trace import Request
from proxy.common.backend import Backend, Role
from tests.lab.replay.conftest import MACHINE

FLEET = Fleet(2, 2, MACHINE, MACHINE, speed=50.0)
AGAIN = [Request(0.05 * number, 1200, 40, (1, 2, 3)) for number in range(3)]


def test_prompts_share_text_as_far_as_blocks() -> None:
    def text(*blocks: int, tokens: int = 1200) -> str:
        body = request_bytes(Request(0.0, tokens, 5, blocks), 7, 80).partition(b"\r\n\r\n")[2]
        told = orjson.loads(body)
        assert (told["seed"], told["max_tokens"], len(told["prompt"])) == (7, 5, 4 * tokens)
        return str(told["prompt"])

    assert text(1, 2, 3)[:4096] == text(1, 2, 4)[:4096]
    assert text(1, 2, 3)[2048:] != text(1, 4, 3)[2048:]
    assert text(1)[:2048] == text(1, 2)[:2048]
    assert text(-1)[:10] != text(-2)[:10]


def test_gateway_serves_a_trace_and_courses_record_it() -> None:
    options = Namespace(
        policies=["least_load"],
        decode_policy="least_load",
        max_running_prefill=None,
        max_running_decode=None,
        reference=None,
        gateways=1,
        share="nothing",
    )
    ours = next(programs(options))
    ended: list[None] = []
    replay = over_sockets(FLEET, ours, AGAIN, lambda: ended.append(None))
    assert len(ended) == len(AGAIN)
    assert [course.ended_at is None for course in replay.courses] == [False] * 3
    assert replay.courses[2].cached_tokens == 1024, "one of the two prefillers had it before"
    assert all(not engine.batch.running + engine.batch.blocks.used for engine in replay.engines.values())
    assert replay.cpu_seconds > 0


class DirectRequests:
    """Direct requests to both engines of a small fleet."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.backends = [Backend(Role.PREFILL, HOST, 0, 0), Backend(Role.DECODE, HOST, 0, 1)]

    async def __call__(self, engines: Engines, place: int, **members: Any) -> tuple[bytes, bytes]:
        """Return head and body of the answer."""
        body = orjson.dumps(
            {"seed": 0, "prompt": "x" * 4 * self.course.request.input_tokens, "stream": True, **members}
        )
        reader, writer = await asyncio.open_connection(HOST, engines.ports[place])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length" in head:
            answer = await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
        else:
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        return head, answer


@pytest.fixture
def run() -> Callable[[Callable[[Engines, DirectRequests], Any]], Any]:
    """Run two engines and a client, and return the client's result."""

    def run(asking: Callable[[Engines, DirectRequests], Any]) -> Any:
        async def course() -> Any:
            requests = DirectRequests(Course(Request(0.0, 100, 40, ())))
            roles = [next(FLEET.engines(backend.role)) for backend in requests.backends]
            async with Engines(dict(zip(requests.backends, roles, strict=True)), [requests.course]) as engines:
                told = await asking(engines, requests)
                assert all(not engine.batch.running + engine.batch.blocks.used for engine in roles)
                return told

        return asyncio.run(course())

    return run


def test_kv_parameters_work_once(run: Callable[..., Any]) -> None:
    async def asking(engines: Engines, ask: DirectRequests) -> None:
        wanted = {"do_remote_decode": True}
        _, answer = await ask(engines, 0, max_tokens=1, stream=False, kv_transfer_params=wanted)
        params = orjson.loads(answer)["kv_transfer_params"]
        head, stream = await ask(engines, 1, max_tokens=40, kv_transfer_params=params)
        assert head.startswith(b"HTTP/1.1 200")
        assert (stream.count(WORD.encode()), b"[DONE]" in stream) == (40, True)
        head, _ = await ask(engines, 1, max_tokens=40, kv_transfer_params=params)
        assert head.startswith(b"HTTP/1.1 400")

    run(asking)


def test_two_legs_meet_in_a_room_in_any_order(run: Callable[..., Any]) -> None:
    async def asking(engines: Engines, ask: DirectRequests) -> None:
        for order in ((0, 1), (1, 0)):
            requests = [asyncio.create_task(ask(engines, place, max_tokens=40, bootstrap_room=5)) for place in order]
            answers = dict(zip(order, await asyncio.gather(*requests), strict=True))
            assert answers[1][1].count(WORD.encode()) == 40

    run(asking)


@pytest.mark.parametrize(
    ("place", "members"),
    [
        (0, {"max_tokens": 40}),
        (0, {"max_tokens": 40, "kv_transfer_params": {"do_remote_decode": True}}),
        (1, {"max_tokens": 40}),
        (1, {"max_tokens": 39, "bootstrap_room": 1}),
        (0, {"max_tokens": 1, "prompt": "another", "bootstrap_room": 1}),
        (0, {"seed": 1}),
    ],
)
def test_invalid_requests_to_engines_are_rejected(place: int, members: dict[str, Any], run: Callable[..., Any]) -> None:
    async def asking(engines: Engines, ask: DirectRequests) -> None:
        head, _ = await ask(engines, place, **members)
        assert head.startswith(b"HTTP/1.1 400")

    run(asking)


def test_gateway_runs_with_each_named_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "provide", lambda self, packages: False)
    options = Namespace(
        policies=["least_load", "random"],
        decode_policy="least_load",
        max_running_prefill=1,
        max_running_decode=None,
        reference=None,
        gateways=1,
        share="nothing",
    )
    found = list(programs(options))
    assert [program.name for program in found] == ["pdproxy, least_load", "pdproxy, random"]
    assert "PROXY_BALANCE__PREFILL_POLICY=random" in found[1].peer.command(1, [2], [3])
    assert "PROXY_ADMISSION__MAX_RUNNING_PREFILL=1" in found[1].peer.command(1, [2], [3])
