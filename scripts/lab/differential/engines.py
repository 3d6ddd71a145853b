"""A prefiller and a decoder that write down every request, and answer by the protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lab.common.processes import HOST, free_ports
from lab.differential.protocols import ENGINE_ID, AgainstTheRules, Hearings
from lab.differential.requests import CHAT, COMPLETIONS, GENERATE, MODEL
from lab.differential.wire import Answer, Heard, encoded, read

_GENERATION = (CHAT, COMPLETIONS, GENERATE)
# What programs ask engines about themselves; everything else is answered with an empty object.
_FACTS: Mapping[str, Any] = {
    "/version": {"version": "0.33.0"},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]},
    "/query": {"0": {"engine_id": ENGINE_ID, "worker_addr": {}}},
}


@dataclass(slots=True)
class Engines:
    """Both, as they are reached. `bootstrap_port`: where the prefiller's transfer engine is asked about itself."""

    prefill_port: int
    decode_port: int
    bootstrap_port: int
    _heard: list[Heard] = field(default_factory=list)
    _problems: list[str] = field(default_factory=list)

    def take(self) -> tuple[list[Heard], list[str]]:
        """The requests since the last time, in the order of their arrival, and what was wrong with them."""
        taken = self._heard, self._problems
        self._heard, self._problems = [], []
        return taken

    async def answer(self, hearings: Hearings, heard: Heard) -> Answer:
        """Write it down if it generates something."""
        if heard.method != "POST" or heard.path not in _GENERATION:
            return Answer(payload=_FACTS.get(heard.path, {}))
        self._heard.append(heard)
        try:
            asked = json.loads(heard.body)
            return await (hearings.prefill if heard.role == "prefill" else hearings.decode)(heard, asked)
        except (AgainstTheRules, ValueError) as error:
            self._problems.append(str(error))
            return Answer(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})


@contextmanager
def running(hearings: Hearings) -> Iterator[Engines]:
    """Both on ports of their own, in a thread of their own."""
    prefill_port, decode_port, bootstrap_port = free_ports(3)
    engines = Engines(prefill_port, decode_port, bootstrap_port)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        servers = asyncio.run_coroutine_threadsafe(_serve(engines, hearings), loop).result()
        yield engines
        asyncio.run_coroutine_threadsafe(_end(servers), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(engines: Engines, hearings: Hearings) -> list[asyncio.Server]:
    ports = {engines.prefill_port: "prefill", engines.decode_port: "decode", engines.bootstrap_port: "bootstrap"}
    connected = {port: partial(_connection, engines, hearings, role) for port, role in ports.items()}
    return [await asyncio.start_server(handler, HOST, port) for port, handler in connected.items()]


async def _connection(
    engines: Engines, hearings: Hearings, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while (heard := await read(role, reader)) is not None:
            writer.write(encoded(await engines.answer(hearings, heard)))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # it has ended
    finally:
        writer.close()


async def _end(servers: list[asyncio.Server]) -> None:
    """Listen no more, and end every connection, which is every task but this one."""
    for server in servers:
        server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
