"""The clients: `python -m lab.soak.traffic PORT,… SEED CLIENTS FILE`. What they get must be what an engine alone says.

Reads lines from standard input, the seconds to ask for; asks, lets everything end, and prints a line. Notes an Answer
for every request in the file.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import uvloop

from lab.soak.answers import DONE, Unreadable, content, difference, payloads
from lab.soak.cluster import ENGINE_OPTIONS
from lab.soak.evidence import Answer, Outcome
from lab.soak.workload import Request, user_name, workload
from proxy.sim.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

_PATIENCE_SECONDS = 60.0
_CLEAN_EVERY_SECONDS = 0.1


class Traffic:
    """All clients of one run. Owns the file of answers."""

    def __init__(self, ports: Sequence[int], seed: int, clients: int, answers: BinaryIO) -> None:
        self._urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._clients = clients
        self._answers = answers
        self._draw = random.Random(seed)
        *self._requests, self._clean = workload(seed)
        self._expected: dict[int, dict[str, Any]] = {}
        self._serials = count()

    async def learn(self) -> None:
        """Ask an engine without a gateway what the answers are."""
        async with SimulatedEngine(**ENGINE_OPTIONS) as engine, aiohttp.ClientSession() as session:
            for request in (request for request in (*self._requests, self._clean) if request.status == 200):
                async with session.post(engine.url + request.api.path, data=request.body("")) as response:
                    expected = content(await response.read(), stream=request.stream)
                if "stop" in request.fields:
                    # If an answer breaks off inside a stop string, some tokens behind it count, too.
                    expected["usage"] = None
                self._expected[request.number] = expected

    async def ask(self, seconds: float) -> None:
        """So long, and until the last answer has ended."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client(session, until))
            while loop.time() < until:
                # Not one after the other: a gateway that makes one wait would be asked less.
                group.create_task(self._one(session, self._clean, is_clean=True))
                await asyncio.sleep(_CLEAN_EVERY_SECONDS)

    async def _client(self, session: aiohttp.ClientSession, until: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            await self._one(session, self._draw.choice(self._requests))
            await asyncio.sleep(self._draw.uniform(0.0, 0.1))

    async def _one(self, session: aiohttp.ClientSession, request: Request, *, is_clean: bool = False) -> None:
        serial = next(self._serials)
        user = user_name(serial, request)
        received = _Received()
        url = self._urls[serial % len(self._urls)] + request.api.path
        began = time.time()
        outcome, problem = Outcome.CUT, ""
        leaves_after = request.leaves_after_seconds
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS if leaves_after is None else leaves_after):
                # Some clients come anew each time, and so to any of several workers.
                headers = {"X-Request-Id": user, **({"Connection": "close"} if serial % 3 == 0 else {})}
                await received.read(session, url, request.body(user), headers)
        except TimeoutError:
            outcome = Outcome.SILENT if leaves_after is None else Outcome.LEFT
        except aiohttp.ClientError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            outcome, problem = self._judged(request, received)
        answer = Answer(
            id=user,
            began=began,
            ended=time.time(),
            api=request.api.value,
            stream=request.stream,
            units=request.units,
            asks_usage=request.asks_usage,
            is_clean=is_clean,
            status=received.status,
            outcome=outcome,
            problem=problem,
            is_done=received.body.rstrip().endswith(DONE),
            has_usage=request.stream and received.has_usage,
        )
        self._answers.write(orjson.dumps(answer) + b"\n")

    def _judged(self, request: Request, received: _Received) -> tuple[Outcome, str]:
        """What became of a request whose answer ended as HTTP answers do."""
        if received.status != request.status:
            return Outcome.ERROR, f"status {received.status}: {_error(received.body)}"
        if request.status != 200:
            return Outcome.REFUSED, ""
        try:
            if error := received.error:
                return Outcome.ERROR, f"event: {error}"
            problem = difference(content(received.body, stream=request.stream), self._expected[request.number])
        except Unreadable as unreadable:
            problem = str(unreadable)
        if request.stream and not received.body.rstrip().endswith(DONE):
            problem = problem or "the stream ends without [DONE]"
        return (Outcome.WRONG, problem) if problem else (Outcome.COMPLETE, "")


class _Received:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""

    async def read(self, session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> None:
        async with session.post(url, data=body, headers=headers) as response:
            self.status = response.status
            parts: list[bytes] = []
            try:
                async for part in response.content.iter_any():
                    parts.append(part)  # noqa: PERF401 what came before a cut counts
            finally:
                self.body = b"".join(parts)

    @property
    def has_usage(self) -> bool:
        with suppress(Unreadable):
            return any(payload.get("usage") for payload in payloads(self.body))
        return False

    @property
    def error(self) -> str:
        """The error event of a stream; empty if there is none."""
        return _error(self.body.rpartition(b"data: ")[2]) if b'"error":' in self.body else ""


def _error(body: bytes) -> str:
    """Code and message of an error body, in one line."""
    try:
        error = orjson.loads(body)["error"]
        return f"{error.get('code')}: {error.get('message')}"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return str(body[:100])


async def main(ports: Sequence[int], seed: int, clients: int, path: Path) -> None:
    """Serve the commands on standard input until it ends."""
    loop = asyncio.get_running_loop()
    with path.open("wb") as answers:
        traffic = Traffic(ports, seed, clients, answers)
        await traffic.learn()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await traffic.ask(float(line))
            answers.flush()
            print("rest", flush=True)


if __name__ == "__main__":
    uvloop.run(
        main([int(port) for port in sys.argv[1].split(",")], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    )
