"""One run over sockets: engines and clients here, the program beside them in a process of its own."""

from __future__ import annotations

import asyncio
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lab.common.gateways import become_aware, figure
from lab.common.proc import cpu_seconds
from lab.common.processes import HOST, free_ports, running, wait_until_ready
from lab.common.store import store
from lab.replay.fleet import Course
from lab.replay.sockets import wire
from lab.replay.sockets.engines import Engines
from proxy.backend import Backend, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.replay.engines import Engine
    from lab.replay.fleet import Fleet
    from lab.replay.sockets.programs import Program
    from lab.replay.trace import Request

_WORD: Final = f'"text":"{wire.WORD}'.encode()
# Of an answer after its request; what takes longer is not served.
_PATIENCE_SECONDS: Final = 120.0
_LEAD_SECONDS: Final = 0.5


class SocketReplay:
    """One run. Make it on the loop it runs on."""

    def __init__(self, fleet: Fleet, program: Program, requests: Sequence[Request], on_end: Callable[[], None]) -> None:
        self.courses = [Course(request) for request in requests]
        self.engines: dict[Backend, Engine] = {}
        self.late_seconds: list[float] = []
        """By how much each request was sent too late: this process had no time."""
        self.cpu_seconds = 0.0
        """Of the program, with all its copies."""
        self.news_bytes = 0.0
        """That its copies have told each other."""
        self._program = program
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(len(requests))
        number = fleet.prefillers + fleet.decoders
        ports = free_ports(number + program.copies + 1)
        self._gateway_ports, self._store_port = ports[number:-1], ports[-1]
        self._ports = {Role.PREFILL: ports[: fleet.prefillers], Role.DECODE: ports[fleet.prefillers : number]}
        slot = 0
        for role, of_role in self._ports.items():
            for port, engine in zip(of_role, fleet.engines(role), strict=True):
                self.engines[Backend(role, HOST, port, slot)] = engine
                slot += 1

    async def run(self) -> None:
        """All requests, each at its time, to their ends. Exits if the program does not start."""
        async with Engines(self.engines, self.courses):
            with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
                # Starting and stopping wait for processes, which ask the engines meanwhile.
                try:
                    pids = await asyncio.to_thread(self._start, stack, Path(directory))
                    before = sum(map(cpu_seconds, pids))
                    await self._ask_all()
                    self.cpu_seconds = sum(map(cpu_seconds, pids)) - before
                    if self._program.shares == "news":
                        self.news_bytes = await asyncio.to_thread(self._told)
                finally:
                    await asyncio.to_thread(stack.close)

    def _start(self, stack: ExitStack, directory: Path) -> list[int]:
        """The processes of the program."""
        program, pids, settings = self._program, list[int](), dict[str, str]()
        if program.shares != "nothing":
            settings["PROXY_REPLICAS__URL"] = stack.enter_context(store(self._store_port, directory))
        if program.shares == "exchanges":
            settings["PROXY_REPLICAS__NEWS_SECONDS"] = "null"
        for port in self._gateway_ports:
            command = program.peer.command(port, self._ports[Role.PREFILL], self._ports[Role.DECODE])
            pids.append(stack.enter_context(running(program.name, command, port, directory / f"{port}.log", settings)))
            wait_until_ready(program.name, port, program.peer.ready_path)
        if settings:
            become_aware(self._gateway_ports, program.copies - 1)
        return pids

    def _told(self) -> float:
        # What one tells is heard by all others.
        told_and_heard = sum(figure(port, "replicas_news_bytes_total") for port in self._gateway_ports)
        return told_and_heard / self._program.copies

    async def _ask_all(self) -> None:
        began = self._loop.time() + _LEAD_SECONDS
        async with asyncio.TaskGroup() as group:
            for number, course in enumerate(self.courses):
                await asyncio.sleep(began + course.request.at - self._loop.time())
                self.late_seconds.append(max(0.0, self._loop.time() - began - course.request.at))
                group.create_task(self._ask(number, course, began))

    async def _ask(self, number: int, course: Course, began: float) -> None:
        port = self._rng.choice(self._gateway_ports)
        asked = wire.request_bytes(course.request, number, port)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                first_at, ended_at = await self._answer(port, asked)
        except (OSError, TimeoutError):
            pass  # its course says that it was not served
        else:
            course.first_token_at, course.ended_at = first_at - began, ended_at - began
        self._on_end()

    async def _answer(self, port: int, asked: bytes) -> tuple[float, float]:
        """When the first token came, and the last. Raises OSError, also for an answer that is not whole."""
        reader, writer = await asyncio.open_connection(HOST, port)
        first_at, tail = None, b""
        try:
            writer.write(asked)
            while data := await reader.read(65_536):
                seen = tail + data
                if first_at is None and _WORD in seen.replace(b": ", b":"):
                    first_at = self._loop.time()
                if b"data: [DONE]" in seen:
                    ended_at = self._loop.time()
                tail = seen[-4096:]
        finally:
            writer.close()
        if first_at is None or b"data: [DONE]" not in tail:
            raise ConnectionError("the answer is not whole")
        return first_at, ended_at


def over_sockets(
    fleet: Fleet, program: Program, requests: Sequence[Request], on_end: Callable[[], None]
) -> SocketReplay:
    """One run that has ended."""
    made: list[SocketReplay] = []

    async def course() -> None:
        made.append(SocketReplay(fleet, program, requests, on_end))
        await made[0].run()

    asyncio.run(course())  # uvloop's clock has milliseconds only, which are long where engines are fast
    return made[0]
