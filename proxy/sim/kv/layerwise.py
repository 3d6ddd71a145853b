"""Simulates vLLM-Ascend's layerwise protocol: the decoder calls back, then the prefiller sends the KV layer by layer.

From vllm-ascend `mooncake_layerwise_connector.py`. A decoder posts the data for the prefiller to the request's
`metaserver`, up to three times if the connection fails, and ignores the answer. It then waits without a limit for the
prefiller's message that all KV is sent, here `POST /_mock/done`. The message names the request by an ID that must be
the same at both engines. The prefiller keeps nothing and does not know whether a decoder waits.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.sim.kv.protocol import ChildRequest, KvLoadResult, KvProtocol, Leg, Peers, format_address
from proxy.sim.model.writer import digest_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.options import Options
    from proxy.sim.state import EngineState

_MAX_CALLBACKS = 3


class LayerwiseProtocol(KvProtocol):
    """Simulates both the prefiller's and the decoder's side of the layerwise protocol.

    It owns the decode legs that wait for KV, by the IDs of their requests.
    """

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        self.engine_id = str(uuid.uuid4())
        self._options = options
        self._state = state
        self._address = address
        self._expected: dict[str, asyncio.Future[int]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._calls_failed = 0
        self._unexpected_pushes = 0
        self._peers = Peers()

    def leg(self, params: Mapping[str, Any]) -> Leg:
        if params.get("do_remote_prefill"):
            return Leg.DECODE
        return Leg.PREFILL if params.get("do_remote_decode") else Leg.ALONE

    def is_deadly(self, params: Mapping[str, Any]) -> bool:
        """Return whether the request crashes the engine, whose scheduler reads this member without a check."""
        return bool(params.get("do_remote_decode")) and "remote_cached_tokens" not in params

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        """Tell the decoder that all KV is sent."""
        url = format_address(child.params["remote_host"], child.params["remote_port"]) + "/_mock/done"
        named = {"request_id": child.request_id, "engine_id": child.params["remote_engine_id"]}
        await self._peers.post(url, named | {"prompt_digest": digest_token_ids(child.prompt)})
        return None

    async def load(self, child: ChildRequest) -> KvLoadResult:
        if child.params.get("do_virtual"):
            return KvLoadResult.YES
        with self._state.waiting_room():
            await asyncio.sleep(self._options.metaserver_delay_seconds)
            done = self._expected[child.request_id] = asyncio.get_running_loop().create_future()
            try:
                self._call_back(child)
                prompt_digest = await done
            finally:
                if self._expected.get(child.request_id) is done:
                    del self._expected[child.request_id]
        self._state.pulls += 1
        return KvLoadResult.YES if prompt_digest == digest_token_ids(child.prompt) else KvLoadResult.FOREIGN

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/_mock/done", self._answer_push)]

    def describe(self) -> dict[str, Any]:
        """Return the state for tests. `strays`: the number of messages about requests that do not wait."""
        return {"engine_id": self.engine_id, "calls_failed": self._calls_failed, "strays": self._unexpected_pushes}

    async def stop(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._peers.close()

    def _call_back(self, child: ChildRequest) -> None:
        """Send the callback in a thread that continues after the end of the request."""
        call = asyncio.create_task(self._post_message(str(child.params.get("metaserver")), self._make_callback(child)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _post_message(self, url: str, message: dict[str, Any]) -> None:
        for _ in range(_MAX_CALLBACKS):
            if await self._peers.delivers(url, message):
                return
        self._calls_failed += 1
        self._state.notify_waiters()

    def _make_callback(self, child: ChildRequest) -> dict[str, Any]:
        host, port = self._address()
        block_size = self._options.block_size
        return {
            "token_ids": [],
            "request_id": child.request_id,
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [list(range(1, -(-len(child.prompt) // block_size) + 1))],
            "remote_block_size": [block_size],
            "remote_engine_id": self.engine_id,
            "remote_host": host,
            "remote_port": port,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }

    async def _answer_push(self, request: web.Request) -> web.Response:
        body = await request.json(loads=orjson.loads)
        expected = self._expected.get(body["request_id"]) if body["engine_id"] == self.engine_id else None
        if expected is None or expected.done():
            self._unexpected_pushes += 1
            self._state.notify_waiters()
            return web.json_response({"error": "nobody waits for this"}, status=404)
        expected.set_result(body["prompt_digest"])
        return web.json_response({})
