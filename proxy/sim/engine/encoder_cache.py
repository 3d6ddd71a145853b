"""The encoder cache of a simulated engine, and the transfer of encoded media between engines.

With ECCPUConnector an encoder keeps the encoded media, and the request of another engine names their places. With
ECMooncakeConnector a request tells the encoder which engine to send them to, and that engine waits for the transfers
that its own request names. It encodes nothing itself (`ensure_cache_available` in vLLM 0.32
`ec_connector/mooncake/scheduler.py`). `POST /_mock/encoded` stands for such a transfer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.sim.kv.protocol import Peers
from proxy.sim.model.request import EngineError, GenerationRequest

if TYPE_CHECKING:
    from proxy.sim.options import Options
    from proxy.sim.state import EngineState


class EncoderCache:
    """The encoded media of one engine, by their hashes."""

    def __init__(self, options: Options, state: EngineState) -> None:
        self._options = options
        self._state = state
        self._peers = Peers()
        self._names: set[str] = set()
        self._arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Whether a transfer has arrived, by its id. An entry lasts until the request that waits for it has ended."""

    async def encode(self, ask: GenerationRequest) -> None:
        """Encode the media of a request, or get them from an encoder. Raises EngineError if they do not arrive."""
        if self._options.ec_role and self._options.ec_connector == "ECMooncakeConnector":
            await (self._receive(ask) if self._options.ec_role == "consumer" else self._send(ask))
            return
        for name in ask.media:
            place = ask.ec_params.get(name)
            is_remote = self._options.ec_role == "consumer" and isinstance(place, dict) and "peer_host" in place
            self._add(name, is_fetched=is_remote)

    async def _send(self, ask: GenerationRequest) -> None:
        receiver = str(ask.ec_params.get("consumer_zmq", "")).replace("tcp://", "http://")
        for index, name in enumerate(ask.media):
            self._add(name, is_fetched=False)
            transfer = _transfer_of(ask, index)
            if receiver and transfer is not None:
                await self._peers.delivers(f"{receiver}/_mock/encoded", {"transfer_id": transfer})

    async def _receive(self, ask: GenerationRequest) -> None:
        for index, name in enumerate(ask.media):
            if self._options.role == "decode" or name in self._names:
                continue  # a decoder gets the KV cache of the media
            transfer = _transfer_of(ask, index) or "none"
            try:
                async with asyncio.timeout(self._options.waiting_seconds):
                    await self._arrived[transfer].wait()
            except TimeoutError:
                raise EngineError(500, "EC push never arrived", "InternalServerError") from None
            finally:
                self._arrived.pop(transfer, None)
            self._add(name, is_fetched=True)

    def _add(self, name: str, *, is_fetched: bool) -> None:
        if name not in self._names:
            self._names.add(name)
            self._state.encodings += not is_fetched
            self._state.encodings_fetched += is_fetched

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/_mock/encoded", self._take)]

    async def stop(self, _: web.Application) -> None:
        await self._peers.close()

    async def _take(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json(loads=orjson.loads)
        self._arrived[body["transfer_id"]].set()
        return web.Response()


def _transfer_of(ask: GenerationRequest, index: int) -> str | None:
    """Return the id of the transfer of one item (`_request_transfer_id` in vLLM)."""
    items = ask.ec_params.get("ec_items") or []
    return str(items[index]["transfer_id"]) if index < len(items) else None
