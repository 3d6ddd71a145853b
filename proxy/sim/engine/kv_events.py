"""Publishes the KV events of a simulated engine in the form of real engines. proxy/wire/kv_events.py reads them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from proxy.sim.hardware.work import Watcher

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from proxy.sim.options import Options

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_GPU_MEDIUM = "GPU"


class KvEventPublisher(Watcher):
    """Publishes KV events between `start` and `stop`. Meanwhile `endpoint` and `replay_endpoint` are its addresses."""

    def __init__(self, options: Options, bound: KvEventPublisher | None = None) -> None:
        """Create a publisher.

        `bound`: the publisher before a restart, whose ports this one uses; None: there was none.
        """
        config = msgspec.json.decode(options.kv_events_config or "{}", type=dict[str, Any])
        self.endpoint: str = config.get("endpoint", "tcp://*:5557") if bound is None else bound.endpoint
        self.replay_endpoint: str | None = config.get("replay_endpoint") if bound is None else bound.replay_endpoint
        self.topic: str = config.get("topic", "")
        self.lost = 0
        """The number of next batches that are not sent, which simulates a slow subscriber."""
        self._shape = options.profile.kv_events
        self._is_sglang = options.profile.is_sglang
        self._block_size = options.block_size
        self._most_ids = 2 * options.kv_blocks
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.get("buffer_steps", 10_000))
        self._ids: dict[Hashable, Sequence[int]] = {}
        self._events: list[Any] = []
        self._next_sequence_number = 0
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.endpoint = _bound_endpoint(self._pub, self.endpoint)
        if self.replay_endpoint is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self.replay_endpoint = _bound_endpoint(self._router, self.replay_endpoint)
            self._replaying = asyncio.create_task(self._answer_replays(self._router))

    async def stop(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)

    def sources(self) -> dict[str, dict[str, Any]]:
        """Return vLLM's answer at /kv_event_sources, by rank."""
        endpoints = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        return {"0": {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints, "topic": self.topic}}

    @property
    def config(self) -> str:
        """Return the publisher's configuration with the ports that it uses."""
        endpoints = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        return msgspec.json.encode({"publisher": "zmq", **endpoints, "topic": self.topic}).decode()

    def expect(self, names: Sequence[Hashable], ids: Sequence[int]) -> None:
        """Remember the tokens of blocks that may be stored later. `names`: the names of the blocks."""
        if len(self._ids) > self._most_ids:
            self._ids.clear()
        size = self._block_size
        self._ids.update({name: ids[place * size : (place + 1) * size] for place, name in enumerate(names)})

    def stored(self, parent: Hashable | None, names: Sequence[Hashable]) -> None:
        ids = [number for name in names for number in self._ids.get(name, ())]
        before = None if parent is None else self._block_hash(parent)
        fields = {
            "block_hashes": [self._block_hash(name) for name in names],
            "parent_block_hash": before,
            "token_ids": ids,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": _GPU_MEDIUM,
        }
        later = {"lora_name": None, "extra_keys": [None] * len(names), "group_idx": 0}
        self._add_event("BlockStored", fields, later | {"kv_cache_spec_kind": "full_attention"})

    def removed(self, name: Hashable) -> None:
        self._add_event(
            "BlockRemoved", {"block_hashes": [self._block_hash(name)], "medium": _GPU_MEDIUM}, {"group_idx": 0}
        )

    def cleared(self) -> None:
        self._add_event("AllBlocksCleared", {}, {})

    def publish(self, payload: bytes) -> None:
        """Publish a payload unchanged as a batch, even if it is malformed."""
        number, self._next_sequence_number = self._next_sequence_number, self._next_sequence_number + 1
        self._buffer.append((number, payload))
        if self.lost:
            self.lost -= 1
        else:
            self._pub.send_multipart((self.topic.encode(), number.to_bytes(8, "big"), payload))

    def _block_hash(self, name: Hashable) -> int | bytes:
        number = hash(name) & (2**63 - 1)
        return number if self._is_sglang else number.to_bytes(32, "big")

    def _add_event(self, tag: str, fields: dict[str, Any], later: dict[str, Any]) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._publish_events)
        if self._shape == "map":
            self._events.append({"type": tag, **fields, **({} if self._is_sglang else later)})
        else:
            self._events.append([tag, *fields.values(), *(later.values() if self._shape == "grouped array" else ())])

    def _publish_events(self) -> None:
        events, self._events = self._events, []
        if not self._pub.closed:
            self.publish(msgspec.msgpack.encode([time.time(), events, 0]))

    async def _answer_replays(self, router: zmq.asyncio.Socket) -> None:
        topic, none = ([], []) if self._shape == "array" else ([self.topic.encode()], [b""])
        while True:
            client, _, first = await router.recv_multipart()
            for number, payload in list(self._buffer):
                if number >= int.from_bytes(first, "big"):
                    await router.send_multipart((client, b"", *topic, number.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", *none, _END_OF_REPLAY, b""))


def _bound_endpoint(socket: Any, endpoint: str) -> str:
    """Bind a socket and return its endpoint. Port 0 means any port."""
    socket.bind(endpoint)
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
