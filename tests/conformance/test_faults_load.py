"""Many concurrent clients: their memory, and the separation of their answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from yarl import URL

from proxy.connectors import CONNECTORS
from proxy.wire.openai import OPENAI_APIS, Api
from tests.asking import Answer, answers_alone, ask, request, until
from tests.canned import CannedEngine, data, event_stream
from tests.conftest import Deploy
from tests.gateway.test_relay import ENDING, chunk, held_back
from tests.scenarios.program import Program
from tests.scenarios.program import gateway as gateway_program

STALLED = 120

# Memory of a stream while its client does not read: the transport's buffer (64 KiB), and one read from the engine
# (256 KiB) in up to two bytes objects. The kernel's buffers do not count.
STALLED_STREAM_BYTES = 1024 * 1024


@pytest.mark.fault(17)
async def test_memory_per_client_that_does_not_read_is_bounded() -> None:
    async with serving() as (engine, program, session):
        before = resident_bytes(program.pid)
        with ExitStack() as clients:
            for number in range(STALLED):
                answer_endlessly(engine)
                clients.enter_context(silent_client(program.url))
                await until(lambda expected=number + 2: len(engine.received) == expected, "the request")
            await held_back(engine)
            assert (resident_bytes(program.pid) - before) / STALLED < STALLED_STREAM_BYTES
            await check_that_it_serves(session, program.url, engine)
        await engine.state.wait_until(lambda state: state.disconnects == STALLED)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[CannedEngine, Program, aiohttp.ClientSession]]:
    """Start a gateway process in front of one engine, and serve a request."""
    engine = CannedEngine("both")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        options = ("--connector", "plain", "--decode", engine.url)
        # With resume, the gateway keeps the text of each answer, which is no buffer.
        program = await stack.enter_async_context(gateway_program(*options, PROXY_RESUME__MODE="off"))
        await check_that_it_serves(session, program.url, engine)
        yield engine, program, session


def answer_endlessly(engine: CannedEngine) -> None:
    """Answer in large events, because the kernel buffers megabytes of them."""
    event = data(chunk("x" * 65_536))
    more = itertools.repeat(b"%x\r\n%b\r\n" % (len(event), event))
    engine.answer = itertools.chain(event_stream([event], is_whole=False), more)


async def check_that_it_serves(session: aiohttp.ClientSession, url: str, engine: CannedEngine) -> None:
    engine.answer = event_stream([ENDING])
    assert (await ask(session, url, request(Api.COMPLETIONS, stream=True))).is_done


def silent_client(url: str) -> socket.socket:
    """Request a stream without reading it, with the smallest receive buffer of the system."""
    body = orjson.dumps(request(Api.COMPLETIONS, stream=True))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", URL(url).port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return client


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


IDLE = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
IDLE_CONNECTION_BYTES = 32 * 1024


@pytest.mark.fault(20)
async def test_memory_per_idle_connection_is_small() -> None:
    async with serving() as (engine, program, session):
        before = resident_bytes(program.pid)
        with ExitStack() as clients:
            for _ in range(IDLE):
                client = clients.enter_context(socket.create_connection(("127.0.0.1", URL(program.url).port)))
                client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await asyncio.to_thread(client.recv, 4096)
            assert (resident_bytes(program.pid) - before) / IDLE < IDLE_CONNECTION_BYTES
            await check_that_it_serves(session, program.url, engine)


@pytest.mark.fault(48)
async def test_number_of_metrics_grows_linearly_with_instances(deploy: Deploy) -> None:
    engines = [[CannedEngine(role) for _ in range(16)] for role in ("prefill", "decode")]
    gateway = await deploy(*engines)
    async with gateway.session.get(gateway.url + "/metrics") as response:
        text = await response.text()
    for role in engines:
        counts = {text.count(f'address="127.0.0.1:{engine.port}"') for engine in role}
        assert len(counts) == 1
        assert 0 < counts.pop() < 50


REQUESTS = 240
AT_A_TIME = 100


@pytest.mark.fault(50)
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_clients_never_receive_bytes_of_other_answers(deploy: Deploy, connector: str) -> None:
    """Every prompt and answer is unique. Engines are killed during hundreds of requests."""
    chance = random.Random(7)
    gateway = await deploy(3, 3, connector=connector, engine={"decode_step_ms": 0.3})
    bodies = [a_request(number, chance) for number in range(REQUESTS)]
    texts = await answers_alone(bodies)
    assert len(set(texts)) == REQUESTS
    room = asyncio.Semaphore(AT_A_TIME)
    answers: list[Answer] = []

    async def client(body: dict[str, Any], text: str) -> None:
        async with room:
            answer = await gateway.ask(body)
        answers.append(answer)
        check(answer, text)

    async def killer() -> None:
        """Kill all engines but one of each role, with time for their answers."""
        mortal = [*gateway.prefillers[:-1], *gateway.decoders[:-1]]
        chance.shuffle(mortal)
        for count, engine in enumerate(mortal, 1):
            await until(lambda count=count: len(answers) >= count * AT_A_TIME // 2, "more answers")
            await engine.kill()

    await asyncio.gather(killer(), *map(client, bodies, texts))
    assert sum(answer.is_done and answer.status == 200 for answer in answers) > REQUESTS / 2
    await until(lambda: not gateway.worker.releaser.pending_count, "the last release")
    gateway.expects_pinned = sum(len(engine.pins) for engine in gateway.engines)
    gateway.expects_inexact_pins = True
    gateway.expects_resent = True


def a_request(number: int, chance: random.Random) -> dict[str, Any]:
    api = chance.choice(list(OPENAI_APIS))
    return request(api, f"canary {number:04}", stream=chance.random() < 0.6, max_tokens=24)


def check(answer: Answer, text: str) -> None:
    """Check for the whole answer, or its beginning with an error, or an error."""
    if answer.status == 200 and answer.is_done:
        assert answer.text == text
    else:
        assert answer.error or answer.status != 200  # SGLang's own errors have no member `error`
        assert answer.status != 200 or text.startswith(answer.text)


class Memory:
    """Memory usage that the test sets."""

    used = 0.0

    def used_share(self) -> float:
        return self.used

    def resident_bytes(self) -> int:
        return 0


@pytest.mark.fault(40)
async def test_new_requests_are_rejected_while_memory_is_short(deploy: Deploy) -> None:
    gateway = await deploy()
    worker = gateway.worker
    memory = worker.monitor._memory = Memory()  # type: ignore[assignment]
    body = request(Api.CHAT, stream=True)
    for used, status, connection in ((0.93, 200, "close"), (0.96, 503, "close"), (0.5, 200, None)):
        memory.used = used
        expected = (status == 503, connection == "close")
        await until(
            lambda expected=expected: (
                expected
                == (
                    worker.request_service.admission_queue.is_short_of_memory,
                    worker.client_listener.closes_after_each_answer,
                )
            ),
            "the monitor",
        )
        answer = await gateway.ask(body)
        assert (answer.status, answer.headers.get("connection")) == (status, connection)
        if status == 503:
            assert answer.error["code"] == "memory"
            assert int(answer.headers["retry-after"]) >= 1
    assert gateway.metrics("pdproxy_rejected_total") == {("memory",): 1}
