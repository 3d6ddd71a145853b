"""Simulates vLLM's MooncakeConnector: both legs run at the same time, and find each other by their `transfer_id`.

A bootstrap server runs beside each prefiller, here on a second port of the engine. Its answer at `/query` lists the
engines, one for each data-parallel rank, with an id that changes at every start, and the addresses of its workers. The
decoder asks there for an unknown engine, and then asks that engine for the transfer, perhaps before the prefill is
done. The prefiller's answer has no parameters for the decoder. KV that no decoder fetches is kept as in the pull
protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.sim.kv.cache import count_blocks
from proxy.sim.kv.protocol import ChildRequest, KvLoadResult, Leg, format_address
from proxy.sim.kv.pull import RankedPullProtocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.options import Options
    from proxy.sim.state import EngineState

_REQUIRED_PARAMS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
_MAX_UNWANTED_TRANSFERS = 1000


class TransferProtocol(RankedPullProtocol):
    """Simulates both the prefiller's and the decoder's side. The transfer ID is the key of the pinned KV."""

    has_bootstrap_port = True

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        super().__init__(options, state, address)
        self._engines: dict[str, str] = {}
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        self._workers: dict[str, str] = {}
        """The addresses of all engines that were ever reported to this decoder, by engine ID (vLLM's `_remote_agents`).
        """

    def leg(self, params: Mapping[str, Any]) -> Leg:
        if params.get("do_remote_prefill") and all(params.get(name) for name in _REQUIRED_PARAMS):
            return Leg.DECODE
        return Leg.PREFILL if params.get("do_remote_decode") and params.get("transfer_id") else Leg.ALONE

    def is_deadly(self, params: Mapping[str, Any]) -> bool:
        """Return whether the request crashes the engine.

        The engine's scheduler asserts its role (`mooncake_connector.py`).
        """
        wrong = {"prefill": Leg.DECODE, "decode": Leg.PREFILL}.get(self._options.role)
        return wrong is not None and self.leg(params) is wrong

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        name = str(child.params["transfer_id"])
        if child.prompt_index or child.samples > 1:
            name = f"{name} {child.request_id}"
        self._engines[name] = self._engine_id_of_rank(self._rank_of_child(child))
        self._pin_kv(name, child.prompt).announced = True
        if name in self._unwanted:
            del self._unwanted[name]
            self._take_pin(name, "release")
        return None

    async def load(self, child: ChildRequest) -> KvLoadResult:
        blocks = count_blocks(len(child.prompt), self._options.block_size)
        with self._state.waiting_room():
            return self._load_result(await self._ask_prefiller(child.params, "pull", blocks), child)

    async def release(self, params: Mapping[str, Any]) -> None:
        """Tell the prefiller to drop the KV. The transfer would otherwise continue after the end of its request."""
        if self.leg(params) is Leg.DECODE and await self._ask_prefiller(params, "release") is not None:
            self._state.releases += 1
            self._state.notify_waiters()

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/query", self._answer_bootstrap_query)]

    async def _answer_bootstrap_query(self, request: web.Request) -> web.Response:
        worker = format_address(*self._address())
        return web.json_response(
            {
                str(rank): {"engine_id": self._engine_id_of_rank(rank), "worker_addr": {"0": {"0": worker}}}
                for rank in range(self._options.dp_size)
            }
        )

    async def _ask_prefiller(self, params: Mapping[str, Any], verb: str, blocks: int = 0) -> Any:
        engine_id = params["remote_engine_id"]
        if engine_id not in self._workers:
            told = await self._peers.get(f"{params['remote_bootstrap_addr']}/query")
            for entry in told.values() if isinstance(told, dict) else ():
                self._workers[entry["engine_id"]] = entry["worker_addr"]["0"]["0"]
        if (worker := self._workers.get(engine_id)) is None:
            return None
        body = {"transfer_id": params["transfer_id"], "engine_id": engine_id, "verb": verb, "blocks": blocks}
        return await self._peers.post(f"{worker}/_mock/pull", body)

    async def _answer_pull(self, request: web.Request) -> web.Response:
        """Answer a decoder that asks for a transfer, as soon as its KV is computed.

        A decoder that wants more blocks than there are gets none, and the blocks are kept (vLLM: "P num blocks less
        than D").
        """
        body = await request.json(loads=orjson.loads)
        name, engine_id, verb = body["transfer_id"], body["engine_id"], body["verb"]
        if verb == "release" and name not in self.table.pins:
            self._unwanted[name] = None
            while len(self._unwanted) > _MAX_UNWANTED_TRANSFERS:
                self._unwanted.popitem(last=False)
            return web.json_response({})
        try:
            await self._state.wait_until(
                lambda _: name in self.table.pins and self._engines[name] == engine_id, self._options.waiting_seconds
            )
        except TimeoutError:
            return web.json_response({"error": "no such transfer"}, status=404)
        if name in self.table.pins and len(self.table.pins[name].blocks) < body["blocks"]:
            return web.json_response({"error": "fewer blocks than asked for"}, status=409)
        pin = self._take_pin(name, verb)
        if pin is None:  # expired in this very moment
            return web.json_response({"error": "no such transfer"}, status=404)
        return web.json_response({"prompt_digest": pin.prompt_digest, "prompt_tokens": pin.prompt_tokens})
