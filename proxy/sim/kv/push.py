"""Simulates vLLM's NixlPushConnector: the decoder registers with the prefiller, which then writes the KV cache.

`POST /_mock/register` stands for the NIXL message of the decoder, and is answered when the KV has been written. It may
arrive before or after the end of the prefill. Engines match the two by the request's id without its random suffix, and
by the id of the prefiller's engine, of which each data-parallel rank has its own. A registration outlives its request:
the prefiller then writes for a decoder that no longer waits (vLLM 0.32 `nixl/push_worker.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.sim.kv.protocol import ChildRequest, KvLoadResult, Leg, format_address
from proxy.sim.kv.pull import RankedPullProtocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.kv.cache import Pin
    from proxy.sim.options import Options
    from proxy.sim.state import EngineState

# Without one of these members the engine ends with a KeyError (vllm-project/vllm#56585).
_REQUIRED_PARAMS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")


class PushProtocol(RankedPullProtocol):
    """Simulates both the prefiller's and the decoder's side. Pins have the prefiller's id of the request."""

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        super().__init__(options, state, address)
        self._finished: dict[tuple[str, str], str] = {}
        """Prompts that wait for a decoder: the id of the pin, by engine and by the request's id without suffix."""
        self._registered: dict[tuple[str, str], asyncio.Future[Pin]] = {}
        """Decoders that wait for a prompt, by the same key."""

    def leg(self, params: Mapping[str, Any]) -> Leg:
        if params.get("do_remote_prefill"):
            return Leg.DECODE
        return Leg.PREFILL if params.get("do_remote_decode") else Leg.ALONE

    def is_deadly(self, params: Mapping[str, Any]) -> bool:
        """Return whether the parameters lack a member that the engine reads without a check."""
        return self.leg(params) is Leg.DECODE and any(params.get(name) is None for name in _REQUIRED_PARAMS)

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        params = await super().keep(child)
        assert params is not None
        engine = self._engine_id_of_rank(self._rank_of_child(child))
        key = engine, child.request_id
        self._finished = {each: name for each, name in self._finished.items() if name in self.table.pins}
        self._finished[key] = params["remote_request_id"]
        if key in self._registered:
            self._write_kv(key)
        return params | {"remote_engine_id": engine, "transfer_mode": "push"}

    def _write_kv(self, key: tuple[str, str]) -> None:
        """Send the KV of a prompt to the decoder that has registered for it."""
        pin = self._take_pin(self._finished.pop(key), "pull")
        waiting = self._registered[key]
        if pin is not None and not waiting.done():
            waiting.set_result(pin)
        if pin is not None:
            del self._registered[key]

    async def load(self, child: ChildRequest) -> KvLoadResult:
        params = child.params
        if params["remote_port"] in self._options.unreachable_ports:
            return self._load_result(None, child)
        url = format_address(params["remote_host"], params["remote_port"]) + "/_mock/register"
        body = {"request_id": child.request_id, "remote_engine_id": params["remote_engine_id"]}
        with self._state.waiting_room():
            return self._load_result(await self._peers.post(url, body), child)

    async def release(self, params: Mapping[str, Any]) -> None:
        """Do nothing: a decoder that gives a request up sends the prefiller no message."""

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.post("/_mock/register", self._answer_registration)]

    def describe(self) -> dict[str, Any]:
        """Return the state for tests. `registered`: the number of decoders that wait for a prompt."""
        return super().describe() | {"registered": len(self._registered)}

    async def _answer_registration(self, request: web.Request) -> web.Response:
        """Answer a decoder when the KV of its prompt has been written into its memory."""
        body = await request.json(loads=orjson.loads)
        engine = body["remote_engine_id"]
        if engine not in map(self._engine_id_of_rank, range(self._options.dp_size)):
            return web.json_response({"error": "Remote NIXL agent engine ID mismatch"}, status=404)
        key = engine, body["request_id"]
        waiting = self._registered[key] = asyncio.get_running_loop().create_future()
        self._state.notify_waiters()
        if key in self._finished:
            self._write_kv(key)
        try:
            async with asyncio.timeout(self._options.waiting_seconds):
                pin = await asyncio.shield(waiting)
        except TimeoutError:
            return web.json_response({"error": "registration timed out"}, status=404)
        return web.json_response({"prompt_digest": pin.prompt_digest, "prompt_tokens": pin.prompt_tokens})
