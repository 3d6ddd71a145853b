"""Simulates SGLang's protocol: the prefill leg and the decode leg of a request meet in a room, and wait for each other.

Decoders ask the prefiller's bootstrap server, here a second port of the engine, for their room: `POST /_mock/room`
stands for the whole exchange and is answered when the KV has arrived. The prefiller computes when the decoder is there,
and answers when the decoder has the KV. A leg without its partner waits, by default 300 s
(SGLANG_DISAGGREGATION_WAITING_TIMEOUT), and then fails with 500. A leg does not notice that its partner has left. A
decoder asks an unknown bootstrap server every second, 15 times, before the leg fails (`_max_ensure_retries` in SGLang's
disaggregation/decode.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from aiohttp import web

from proxy.sim.kv.protocol import ChildRequest, KvLoadResult, KvProtocol, Leg, Peers, format_address
from proxy.sim.model.request import EngineError
from proxy.sim.model.writer import digest_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.sim.options import Options
    from proxy.sim.state import EngineState

DEFAULT_PORT = 8998
_HANDSHAKE_INTERVAL_SECONDS = 1.0


class BootstrapRoom:
    """One bootstrap room at the prefiller. If two prefill legs or two decode legs enter it, all its legs fail."""

    def __init__(self) -> None:
        self.prefills = 0
        self.decoders: list[asyncio.Future[int]] = []
        self.is_broken = False
        """Whether two legs of the same kind have entered. The room then fails every leg."""

    @property
    def is_empty(self) -> bool:
        return not self.prefills and not self.decoders

    def note_leg_entered(self) -> None:
        """Count a leg that has entered the room."""
        self.is_broken = self.is_broken or self.prefills > 1 or len(self.decoders) > 1


class BootstrapProtocol(KvProtocol):
    """Simulates both the prefiller's and the decoder's side of SGLang's protocol.

    It owns the rooms of this engine's prefill legs, by room number and data-parallel rank.
    """

    has_bootstrap_port = True
    meets = True

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        self._options = options
        self._state = state
        self._rooms: dict[tuple[int, int], BootstrapRoom] = {}
        self._in_rooms: dict[str, tuple[int, int]] = {}
        self._ranks: Counter[int] = Counter()
        self._peers = Peers()
        self._reached: set[str] = set()
        """The bootstrap servers that this decoder has already reached."""

    def leg(self, params: Mapping[str, Any]) -> Leg:
        """Return the kind of a request by the engine's role. Without a role or a partner there is no disaggregation."""
        if not params:
            return Leg.ALONE
        return {"prefill": Leg.PREFILL, "decode": Leg.DECODE}.get(self._options.role, Leg.ALONE)

    async def meet(self, child: ChildRequest) -> None:
        number = child.params["rooms"][child.prompt_index]["bootstrap_room"]
        key = number, self._rank_of_room(child, number)
        self._ranks[key[1]] += 1
        if child.samples > 1:
            await self._wait_in_vain(number)
        room = self._enter_room(key, child.request_id)
        with self._state.waiting_room():
            await self._wait_for_room(lambda: room.decoders or room.is_broken, number)
        if room.is_broken:
            raise _make_collision_error(number)

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        """Hand the KV to the decoder that is in the room, or wait for a decoder to enter."""
        key = self._in_rooms[child.request_id]
        room = self._rooms[key]
        with self._state.waiting_room():
            await self._wait_for_room(lambda: room.decoders or room.is_broken, key[0])
        if room.is_broken:
            raise _make_collision_error(key[0])
        decoder = room.decoders[0]
        if not decoder.done():
            decoder.set_result(digest_token_ids(child.prompt))
        return None

    def leave(self, child: ChildRequest) -> None:
        key = self._in_rooms.pop(child.request_id, None)
        if key is not None:
            self._rooms[key].prefills -= 1
            self._remove_empty_room(key)

    async def load(self, child: ChildRequest) -> KvLoadResult:
        place = child.params["rooms"][child.prompt_index]
        number = place["bootstrap_room"]
        self._ranks[self._rank_of_room(child, number)] += 1
        if child.samples > 1:
            await self._wait_in_vain(number)
        with self._state.waiting_room():
            try:
                server = self._bootstrap_server_url(place)
                await self._shake_hands(server, child, number)
                async with asyncio.timeout(self._options.waiting_seconds):
                    answer = await self._peers.post(f"{server}/_mock/room", self._handshake_body(child, number))
            except TimeoutError:
                _raise_timeout(number, self._options.waiting_seconds)
        if answer is None:
            self._reached.discard(server)
            self._state.pull_failures += 1
            raise _make_failure_error(f"Decode transfer failed for request rank=0 bootstrap_room={number}")
        self._state.pulls += 1
        return KvLoadResult.YES if answer["prompt_digest"] == digest_token_ids(child.prompt) else KvLoadResult.FOREIGN

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/_mock/room", self._answer_registration), web.get("/_mock/bootstrap", self._answer_prefiller)]

    def describe(self) -> dict[str, Any]:
        """Return the state for tests. `dp_ranks`: the number of legs of each rank."""
        return {
            "rooms": len(self._rooms),
            "dp_ranks": {str(rank): count for rank, count in sorted(self._ranks.items())},
        }

    async def stop(self) -> None:
        await self._peers.close()

    async def _answer_registration(self, request: web.Request) -> web.Response:
        """Let a decode leg enter a room until the decoder has the KV or leaves."""
        body = await request.json(loads=orjson.loads)
        number = body["room"]
        rank = number % self._options.dp_size if body["dp_rank"] is None else body["dp_rank"]
        key = number, rank
        room = self._rooms.setdefault(key, BootstrapRoom())
        decoder = asyncio.get_running_loop().create_future()
        room.decoders.append(decoder)
        room.note_leg_entered()
        self._fail_if_broken(room)
        try:
            return web.json_response({"prompt_digest": await decoder})
        except EngineError:
            return web.json_response({"error": "room collision"}, status=409)
        finally:
            room.decoders.remove(decoder)
            self._remove_empty_room(key)

    def _enter_room(self, key: tuple[int, int], name: str) -> BootstrapRoom:
        room = self._rooms.setdefault(key, BootstrapRoom())
        room.prefills += 1
        self._in_rooms[name] = key
        room.note_leg_entered()
        self._fail_if_broken(room)
        return room

    def _fail_if_broken(self, room: BootstrapRoom) -> None:
        if room.is_broken:
            for decoder in room.decoders:
                if not decoder.done():
                    decoder.set_exception(_make_collision_error(0))
        self._state.notify_waiters()

    def _remove_empty_room(self, key: tuple[int, int]) -> None:
        if self._rooms[key].is_empty:
            del self._rooms[key]
        self._state.notify_waiters()

    def _rank_of_room(self, child: ChildRequest, number: int) -> int:
        """Return the rank that the request names, or otherwise the rank of its room (`follow_bootstrap_room`)."""
        named = child.params["routed_dp_rank"]
        return number % self._options.dp_size if named is None else int(named)

    def _bootstrap_server_url(self, place: Mapping[str, Any]) -> str:
        return format_address(
            place["bootstrap_host"], place["bootstrap_port"] or self._options.bootstrap_port or DEFAULT_PORT
        )

    async def _shake_hands(self, server: str, child: ChildRequest, number: int) -> None:
        """Connect to a bootstrap server for the first time. Raises EngineError if no server answers."""
        try:
            async with asyncio.timeout(self._options.handshake_seconds):
                while server not in self._reached:
                    if await self._peers.get(f"{server}/_mock/bootstrap") is not None:
                        self._reached.add(server)
                    else:
                        await asyncio.sleep(_HANDSHAKE_INTERVAL_SECONDS)
        except TimeoutError:
            raise _make_failure_error(
                f"Decode handshake failed for request rank=0 decode_req.req.rid={child.request_id!r} "
                f"decode_req.req.bootstrap_room={number} with exception "
                f"KVTransferError(bootstrap_room={number}): Aborted by AbortReq."
            ) from None

    async def _answer_prefiller(self, request: web.Request) -> web.Response:
        """Answer a decoder that asks whether this is a bootstrap server."""
        return web.json_response({})

    def _handshake_body(self, child: ChildRequest, number: int) -> dict[str, Any]:
        return {"room": number, "dp_rank": child.params["disagg_prefill_dp_rank"]}

    async def _wait_for_room(self, condition: Callable[[], object], number: int) -> None:
        try:
            await self._state.wait_until(lambda _: bool(condition()), self._options.waiting_seconds)
        except TimeoutError:
            _raise_timeout(number, self._options.waiting_seconds)

    async def _wait_in_vain(self, number: int) -> NoReturn:
        """Wait until the time limit. The samples of one prompt share a room, so none of them finds its partner."""
        with self._state.waiting_room():
            await asyncio.sleep(self._options.waiting_seconds)
        _raise_timeout(number, self._options.waiting_seconds)


def _raise_timeout(number: int, seconds: float) -> NoReturn:
    message = f"KVTransferError(bootstrap_room={number}): timed out after {seconds:.1f}s"
    raise _make_failure_error(message) from None


def _make_collision_error(number: int) -> EngineError:
    return _make_failure_error(f"KVTransferError(bootstrap_room={number}): the room is taken")


def _make_failure_error(message: str) -> EngineError:
    return EngineError(500, message, "500")
