"""Simulates the pull protocol: the prefiller pins its KV, and the decoder fetches it over a socket.

`POST /_mock/pull` on the prefiller stands for the RDMA read and the decoder's DONE message that frees the blocks. So
parameters can be used only once, as with Ascend's connectors. They have the form of the configured connector.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from proxy.sim.kv.cache import Pin, PinTable
from proxy.sim.kv.protocol import ChildRequest, KvLoadResult, KvProtocol, Leg, Peers, format_address
from proxy.sim.model.writer import digest_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.sim.options import Options
    from proxy.sim.state import EngineState

_ANSWER_KV_SECONDS = 480.0
"""`decoder_kv_blocks_ttl`, the time for which a decoder keeps the KV of an answer."""
_REQUIRED_PARAMS = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id")


class PullProtocol(KvProtocol):
    """Simulates both the prefiller's and the decoder's side of the pull protocol.

    It owns the pins of this engine and the timer that expires them.
    """

    serves_each_child = False

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        self.engine_id = str(uuid.uuid4())
        """The ID of this engine, which changes at every start."""
        self.table = PinTable(options.lease_seconds, options.kv_blocks)
        self._options = options
        self._state = state
        self._address = address
        self._timer: asyncio.TimerHandle | None = None
        self._peers = Peers()
        self._stopped = False

    def leg(self, params: Mapping[str, Any]) -> Leg:
        if params.get("do_remote_prefill") and self._is_complete(params):
            return Leg.DECODE
        return Leg.PREFILL if params.get("do_remote_decode") else Leg.ALONE

    @property
    def _has_roles(self) -> bool:
        """Return whether `kv_role` has an effect on this engine. NixlConnector ignores it.

        In vllm-ascend's connectors, a producer has only the thread that sends KV, and a consumer only the one that
        receives it (`register_kv_caches` in mooncake_connector.py).
        """
        return self._options.connector != "nixl"

    def is_deadly(self, params: Mapping[str, Any]) -> bool:
        """Return whether the request crashes the engine.

        A worker without the receiving thread fails an assertion (`start_load_kv`).
        """
        return self._has_roles and self._options.role == "prefill" and self.leg(params) is Leg.DECODE

    async def keep(self, child: ChildRequest) -> dict[str, Any] | None:
        remote_id = child.request_id
        if self._options.request_id_randomization:
            remote_id = f"{remote_id}-{uuid.uuid4().hex[:8]}"
        return self._decode_params(self._pin_kv(remote_id, child.prompt), child.prompt)

    def _pin_kv(self, remote_id: str, prompt: Sequence[int]) -> Pin:
        now = asyncio.get_running_loop().time()
        pin = self.table.pin(remote_id, len(prompt), digest_token_ids(prompt), self._options.block_size, now)
        self._update_pin_state()
        return pin

    def keep_answer(self, child: ChildRequest, ids: Sequence[int]) -> dict[str, Any] | None:
        """See KvProtocol, and `request_finished` in vLLM 0.32 `nixl/pull_scheduler.py`."""
        if not self._options.bidirectional_kv_xfer:
            return None
        pin = self._pin_kv(f"{child.request_id}-{uuid.uuid4().hex[:8]}", ids)
        pin.expires_at = asyncio.get_running_loop().time() + _ANSWER_KV_SECONDS
        pin.announced = True
        return self._decode_params(pin, ids) | {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_num_tokens": len(ids),
            "remote_blocks_expiry_time": pin.expires_at,
        }

    def reads_back(self, params: Mapping[str, Any]) -> bool:
        return bool(params.get("do_remote_decode") and params.get("remote_block_ids"))

    async def read_back(self, child: ChildRequest) -> KvLoadResult:
        """Fetch the KV of an earlier answer.

        Without the option, the request waits for KV that nothing fetches (`pull_scheduler.py`).
        """
        if not self._options.bidirectional_kv_xfer:
            await asyncio.Event().wait()
        answer = await self._ask_prefiller(child.params, "pull")
        self._state.read_backs += answer is not None
        same = answer is not None and answer["prompt_digest"] == digest_token_ids(
            child.prompt[: answer["prompt_tokens"]]
        )
        return KvLoadResult.FAILED if answer is None else KvLoadResult.YES if same else KvLoadResult.FOREIGN

    def announce(self, params: Mapping[str, Any]) -> None:
        if pin := self.table.pins.get(params["remote_request_id"]):
            pin.announced = True

    def _is_complete(self, params: Mapping[str, Any]) -> bool:
        """Return whether the parameters have blocks and the whole address, as decoders check them.

        See vllm-ascend `mooncake_connector.py`.
        """
        return bool(params.get("remote_block_ids")) and all(params.get(name) is not None for name in _REQUIRED_PARAMS)

    async def load(self, child: ChildRequest) -> KvLoadResult:
        return self._load_result(await self._ask_prefiller(child.params, "pull"), child)

    def _load_result(self, answer: Any, child: ChildRequest) -> KvLoadResult:
        if answer is None:
            self._state.pull_failures += 1
            self._state.notify_waiters()
            return KvLoadResult.FAILED
        self._state.pulls += 1
        self._state.notify_waiters()
        return KvLoadResult.YES if answer["prompt_digest"] == digest_token_ids(child.prompt) else KvLoadResult.FOREIGN

    async def release(self, params: Mapping[str, Any]) -> None:
        if self._is_complete(params) and await self._ask_prefiller(params, "release") is not None:
            self._state.releases += 1
            self._state.notify_waiters()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/_mock/pull", self._answer_pull), web.get("/_mock/pins", self._show_pins)]

    @property
    def pins(self) -> dict[str, Pin]:
        return self.table.pins

    def blocks_held(self) -> int:
        return self.table.blocks_held

    def describe(self) -> dict[str, Any]:
        table = self.table
        return {
            "engine_id": self.engine_id,
            "pinned_now": len(table.pins),
            "pinned_blocks": table.blocks_held,
            "pinned_total": table.pinned,
            "pulled": table.pulled,
            "released": table.released,
            "expired": table.expired,
            "leaked": table.leaked,
        }

    async def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await self._peers.close()

    async def _ask_prefiller(self, params: Mapping[str, Any], verb: str) -> Any:
        """Send the prefiller a message and return its answer; None if it has no such KV or cannot be reached."""
        if params["remote_port"] in self._options.unreachable_ports:
            return None
        url = format_address(params["remote_host"], params["remote_port"]) + "/_mock/pull"
        body = {name: params[name] for name in ("remote_request_id", "remote_engine_id")} | {"verb": verb}
        return await self._peers.post(url, body)

    async def _answer_pull(self, request: web.Request) -> web.Response:
        """Answer a decoder that fetches a pin. Each pin can be fetched once."""
        body = await request.json(loads=orjson.loads)
        sends = self._options.role != "decode" or not self._has_roles
        is_ours = body.get("remote_engine_id") == self.engine_id and sends
        pin = self._take_pin(body["remote_request_id"], body.get("verb")) if is_ours else None
        if pin is None:
            return web.json_response({"error": "no such KV here"}, status=404)
        return web.json_response({"prompt_digest": pin.prompt_digest, "prompt_tokens": pin.prompt_tokens})

    def _take_pin(self, remote_id: str, verb: str | None) -> Pin | None:
        take = self.table.release if verb == "release" else self.table.pull
        pin = take(remote_id, asyncio.get_running_loop().time())
        self._update_pin_state()
        return pin

    async def _show_pins(self, request: web.Request) -> web.Response:
        pins = [
            {"remote_request_id": pin.request_id, "blocks": len(pin.blocks), "announced": pin.announced}
            for pin in self.table.pins.values()
        ]
        return web.json_response(self.describe() | {"pins": pins})

    def _update_pin_state(self) -> None:
        self._state.pinned = len(self.table.pins)
        self._state.notify_waiters()
        if self._timer is None and not self._stopped and (expires_at := self.table.next_expiry()) is not None:
            self._timer = asyncio.get_running_loop().call_at(expires_at, self._expire_pins)

    def _expire_pins(self) -> None:
        self._timer = None
        self.table.expire(asyncio.get_running_loop().time())
        self._update_pin_state()

    def _decode_params(self, pin: Pin, prompt: Sequence[int]) -> dict[str, Any]:
        """Return parameters in the form of the connector's `request_finished`.

        See vllm-ascend `mooncake_connector.py` and vLLM `nixl/`.
        """
        host, port = self._address()
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [pin.blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": pin.request_id,
            "remote_host": host,
            "remote_port": port,
        }
        connector = self._options.connector
        if connector == "nixl":
            return params | _nixl_extras(self._options.profile.name, pin.prompt_tokens)
        if connector == "mooncake-pull":
            return params | {"remote_num_prompt_tokens": pin.prompt_tokens, "last_token_id": prompt[-1]}
        params |= {
            "remote_ptp_size": 1,
            "last_token_id": prompt[-1],
            "remote_multi_nodes_meta_mapping": {"0": {"host": host, "engine_id": self.engine_id}},
            "num_prompt_blocks": len(pin.blocks),
        }
        if connector == "mooncake":
            params |= {"remote_pcp_size": 1, "remote_dcp_size": 1}
            if self._options.profile.has_block_size:
                params["remote_block_size"] = self._options.block_size
        return params


def _nixl_extras(profile_name: str, prompt_tokens: int) -> dict[str, Any]:
    extras: dict[str, Any] = {"tp_size": 1}
    if profile_name >= "v0.27":
        extras |= {"remote_num_tokens": prompt_tokens, "remote_blocks_expiry_time": None}
    if profile_name >= "v0.33":
        extras |= {"dcp_size": 1, "pp_size": 1, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0}
    return extras


class RankedPullProtocol(PullProtocol):
    """A pull protocol whose prefiller has an engine ID for each data-parallel rank."""

    def __init__(self, options: Options, state: EngineState, address: Callable[[], tuple[str, int]]) -> None:
        super().__init__(options, state, address)
        self._ranks: Counter[int] = Counter()
        self._served = 0

    def describe(self) -> dict[str, Any]:
        """Return the state for tests. `dp_ranks`: the number of prefill legs of each rank."""
        ranks = {str(rank): count for rank, count in sorted(self._ranks.items())}
        return super().describe() | {"dp_ranks": ranks}

    def _rank_of_child(self, child: ChildRequest) -> int:
        """Return the rank that the request names. Without one, ranks take turns."""
        self._served += 1
        rank = (self._served - 1) % self._options.dp_size if child.dp_rank is None else child.dp_rank
        self._ranks[rank] += 1
        return rank

    def _engine_id_of_rank(self, rank: int) -> str:
        return self.engine_id if self._options.dp_size == 1 else f"{self.engine_id}_dp{rank}"
