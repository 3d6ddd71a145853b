"""Decodes the events that engines publish about their KV blocks, in both formats.

vLLM (vllm/distributed/kv_events.py) and SGLang (python/sglang/srt/disaggregation/kv_events.py) send batches of events,
in msgpack: `[ts, events, data_parallel_rank]`, or a map with these names in some versions of vLLM. An event was an
array that begins with its tag. Since vLLM 0.24 (PR #42892) and PR #37271 of SGLang it is a map with the tag as `type`.
New fields were always added at the end, so unknown fields are skipped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

BlockHash = int | bytes
"""Hash of a block: 64 bits, unsigned in vLLM and signed in SGLang. vLLM sends bytes with
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.
"""


class BlocksStored(NamedTuple):
    """The event that consecutive full blocks of one sequence are now in the cache."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """Hash of the block before the first one; None: the first one begins the sequence."""
    block_tokens: int
    """The number of tokens in each block. It may be 0 for tiers below the device."""
    medium: str | None
    """Tier of the cache: `GPU`, or one below it. None means `GPU`."""
    group: int | None
    """Group of layers, in models with several kinds of attention; None: there are no groups."""
    has_full_attention: bool
    """Whether blocks are kept for whole sequences. False for parts only, as with sliding windows and Mamba."""


class BlocksRemoved(NamedTuple):
    """The event that KV blocks are no longer in a tier of the cache."""

    hashes: Sequence[BlockHash]
    medium: str | None
    group: int | None


class AllBlocksCleared(NamedTuple):
    """The event that the cache is now empty."""


class UnreadableEvent(NamedTuple):
    """An event that cannot be decoded, or whose type is unknown."""

    reason: str


Event = BlocksStored | BlocksRemoved | AllBlocksCleared | UnreadableEvent


# Fields that are not needed have no type check. Token IDs, which are most of the bytes, are not unpacked.
class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Raw
    block_size: int
    lora_id: Raw = Raw(b"")
    medium: str | None = None
    lora_name: Raw = Raw(b"")  # metadata in SGLang
    extra_keys: Raw = Raw(b"")
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[BlockHash]
    block_size: int
    parent_block_hash: BlockHash | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _BatchArray(msgspec.Struct, array_like=True):
    ts: Raw
    events: list[Raw]


class _BatchMap(msgspec.Struct):
    events: list[Raw]


_decode_array: Final = Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_decode_map: Final = Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_batch: Final = Decoder(_BatchArray).decode
_decode_batch_map: Final = Decoder(_BatchMap).decode

# Kinds of attention in vLLM that keep blocks for part of a sequence only (v1/kv_cache_interface.py).
_PARTIAL_KINDS: Final = ("sliding", "chunked", "mamba", "linear")

# Each rank takes a socket. No engine has this many ranks.
_MAX_RANKS: Final = 1024
_is_tcp_endpoint: Final = re.compile(r"tcp://.+:([0-9]{1,5})", re.ASCII).fullmatch


def decode_batch(payload: bytes) -> list[Event]:
    """Return the KV events of a published batch, in order. Raises ValueError if it is not a batch."""
    try:
        batch = _decode_batch_map(payload) if _is_packed_map(payload) else _decode_batch(payload)
    except RecursionError:
        raise ValueError("the batch is nested too deeply") from None
    return list(map(_decode_event, batch.events))


def _decode_event(raw: Raw) -> Event:
    try:
        found = _decode_map(raw) if _is_packed_map(bytes(memoryview(raw)[:1])) else _decode_array(raw)
    except (ValueError, RecursionError) as error:
        return UnreadableEvent(str(error))
    if isinstance(found, _StoredArray | _StoredMap):
        kind = found.kv_cache_spec_kind or ""
        is_whole = found.kv_cache_spec_sliding_window is None and not any(part in kind for part in _PARTIAL_KINDS)
        hashes, parent = found.block_hashes, found.parent_block_hash
        return BlocksStored(hashes, parent, found.block_size, found.medium, found.group_idx, is_whole)
    if isinstance(found, _RemovedArray | _RemovedMap):
        return BlocksRemoved(found.block_hashes, found.medium, found.group_idx)
    return AllBlocksCleared()


def _is_packed_map(packed: bytes) -> bool:
    """Return whether the first byte of a msgpack value is that of a fixmap, map 16 or map 32."""
    return bool(packed) and (packed[0] & 0xF0 == 0x80 or packed[0] in (0xDE, 0xDF))


class EventPublisher(NamedTuple):
    """The ports and the topic at which one rank of an engine publishes events. The host is the engine's host."""

    port: int
    replay_port: int | None
    """Port for requests to resend events; None: lost events cannot be requested."""
    topic: str


def parse_publishers(answer: object) -> list[EventPublisher] | None:
    """Read the answer to `GET /kv_event_sources` (vLLM 0.32, PR #55844): the publisher of each rank, with its ports.

    Returns None for another kind of answer. Raises ValueError if a publisher cannot exist as described.
    """
    if not isinstance(answer, dict) or not all(isinstance(rank, str) and rank.isdecimal() for rank in answer):
        return None
    _check_ranks(len(answer))
    configs = msgspec.convert(answer, dict[str, _EventsConfig]).values()
    return [
        EventPublisher(_port_of_endpoint(config.endpoint), _read_replay_port(config), config.topic)
        for config in configs
    ]


def parse_configured_publishers(info: object) -> list[EventPublisher] | None:
    """Derive the publishers from the configuration in the answer to `/server_info`.

    SGLang has this route, and vLLM with VLLM_SERVER_DEV_MODE=1. Returns None if the engine does not report the
    configuration, or publishes nothing. Raises ValueError if a publisher cannot exist as described.
    """
    try:
        server = msgspec.convert(info, _ServerInfo)
    except ValueError:
        return None
    if server.vllm_config is not None:
        config, ranks = server.vllm_config.kv_events_config, server.vllm_config.parallel_config.data_parallel_size
    elif server.kv_events_config is not None:
        config, ranks = msgspec.json.decode(server.kv_events_config, type=_EventsConfig), server.dp_size
    else:
        return None
    if config is None or config.publisher != "zmq":
        return None
    return publishers_of_ranks(ranks, _port_of_endpoint(config.endpoint), _read_replay_port(config), config.topic)


def publishers_of_ranks(ranks: int, port: int, replay_port: int | None, topic: str) -> list[EventPublisher]:
    """Return one publisher for each rank. Each rank uses the next port, as both engines assign them.

    See ZmqEventPublisher.offset_endpoint_port. Raises ValueError if there are too few ports.
    """
    _check_ranks(ranks)
    if max(port, replay_port or 0) + ranks > 65536:
        raise ValueError(f"{ranks} ranks have no ports from {max(port, replay_port or 0)} on")
    return [EventPublisher(port + rank, replay_port and replay_port + rank, topic) for rank in range(ranks)]


def _check_ranks(ranks: int) -> None:
    if ranks > _MAX_RANKS:
        raise ValueError(f"{ranks} ranks are more than {_MAX_RANKS}")


class _EventsConfig(msgspec.Struct):
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


class _ParallelConfig(msgspec.Struct):
    data_parallel_size: int = 1


class _VllmConfig(msgspec.Struct):
    kv_events_config: _EventsConfig | None = None
    parallel_config: _ParallelConfig = msgspec.field(default_factory=_ParallelConfig)


class _ServerInfo(msgspec.Struct):
    kv_events_config: str | None = None
    dp_size: int = 1
    """Number of publishers, with and without data-parallel attention (select_kv_publisher_dp_rank)."""
    vllm_config: _VllmConfig | None = None


def _read_replay_port(config: _EventsConfig) -> int | None:
    return _port_of_endpoint(config.replay_endpoint) if config.replay_endpoint else None


def _port_of_endpoint(endpoint: str) -> int:
    """Return the port of `tcp://host:port`. Raises ValueError."""
    found = _is_tcp_endpoint(endpoint)
    if not found or not 0 < int(found[1]) < 65536:
        raise ValueError(f"{endpoint[:200]} is not a TCP endpoint")
    return int(found[1])
