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

from aiohttp import web

from lab.common.processes import HOST, free_ports
from lab.differential.protocols import ENGINE_ID, AgainstTheRules, Answer, Heard, Hearings
from lab.differential.requests import CHAT, COMPLETIONS, GENERATE, MODEL

_LARGEST_BODY = 64 << 20
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
        runners = asyncio.run_coroutine_threadsafe(_serve(engines, hearings), loop).result()
        yield engines
        asyncio.run_coroutine_threadsafe(_end(runners), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(engines: Engines, hearings: Hearings) -> list[web.AppRunner]:
    runners = []
    ports = {engines.prefill_port: "prefill", engines.decode_port: "decode", engines.bootstrap_port: "bootstrap"}
    for port, role in ports.items():
        application = web.Application(client_max_size=_LARGEST_BODY)
        application.router.add_route("*", "/{path:.*}", partial(_handle, engines, hearings, role))
        runners.append(web.AppRunner(application, access_log=None, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], HOST, port).start()
    return runners


async def _handle(engines: Engines, hearings: Hearings, role: str, request: web.Request) -> web.StreamResponse:
    headers = {name.lower(): value for name, value in request.headers.items()}
    heard = Heard(role, request.method, request.path, headers, await request.read())
    answer = await engines.answer(hearings, heard)
    if answer.events is None:
        return web.json_response(answer.payload, status=answer.status)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in answer.events:
        await response.write(f"data: {event}\n\n".encode())
    return response


async def _end(runners: list[web.AppRunner]) -> None:
    for runner in runners:
        await runner.cleanup()
