"""What engines publish of their KV blocks, in both shapes in which they do.

vLLM (vllm/distributed/kv_events.py) and SGLang (python/sglang/srt/disaggregation/kv_events.py) send batches of events,
in msgpack: `[ts, events, data_parallel_rank]`, for a while in vLLM a map with these names. An event was an array with
its tag first, and is a map with the tag as `type` since vLLM 0.24 (PR #42892) and SGLang's PR #37271. Fields were only
ever added behind the others, so what is not known is passed over.
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
"""Both engines' are 64 bits, vLLM's without a sign and SGLang's with one; vLLM's are bytes with
VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.
"""


class BlocksStored(NamedTuple):
    """Full blocks of one sequence, one behind the other, are cached from now on."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """The block before the first of them; None: they begin the sequence."""
    block_tokens: int
    """Of tiers below the device it may be 0."""
    medium: str | None
    """Where they are: `GPU`, or a tier below it; None is the same as `GPU`."""
    group: int | None
    """Of models with several kinds of attention, whose blocks they are."""
    is_whole: bool
    """False: of blocks that are kept for part of a sequence only, as by sliding windows and Mamba."""


class BlocksRemoved(NamedTuple):
    """Blocks are not in this medium any more."""

    hashes: Sequence[BlockHash]
    medium: str | None
    group: int | None


class AllCleared(NamedTuple):
    """Nothing is cached any more."""


class Unreadable(NamedTuple):
    """An event of a kind that is not known, or that is none."""

    why: str


Event = BlocksStored | BlocksRemoved | AllCleared | Unreadable


# Of what is not needed not even the type is looked at, and token ids, most of all bytes, are not unpacked.
class _Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Raw
    block_size: int
    lora_id: Raw = Raw(b"")
    medium: str | None = None
    lora_name: Raw = Raw(b"")  # of SGLang: metadata
    extra_keys: Raw = Raw(b"")
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
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


class _Batch(msgspec.Struct, array_like=True):
    ts: Raw
    events: list[Raw]


class _BatchMap(msgspec.Struct):
    events: list[Raw]


_decode_array: Final = Decoder(_Stored | _Removed | _Cleared).decode
_decode_map: Final = Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_batch: Final = Decoder(_Batch).decode
_decode_batch_map: Final = Decoder(_BatchMap).decode

# What vLLM calls groups whose blocks are kept as long as there is room for them (v1/kv_cache_interface.py).
_PARTIAL_KINDS: Final = ("sliding", "chunked", "mamba", "linear")

# Each is a socket. No engine has as many.
_MOST_RANKS: Final = 1024
_is_tcp: Final = re.compile(r"tcp://.+:([0-9]{1,5})", re.ASCII).fullmatch


def decode(payload: bytes) -> list[Event]:
    """The events of a batch, in their order. Raises ValueError for what is none."""
    try:
        batch = _decode_batch_map(payload) if _is_map(payload) else _decode_batch(payload)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return list(map(_event, batch.events))


def _event(raw: Raw) -> Event:
    try:
        found = _decode_map(raw) if _is_map(bytes(memoryview(raw)[:1])) else _decode_array(raw)
    except (ValueError, RecursionError) as error:
        return Unreadable(str(error))
    if isinstance(found, _Stored | _StoredMap):
        kind = found.kv_cache_spec_kind or ""
        is_whole = found.kv_cache_spec_sliding_window is None and not any(part in kind for part in _PARTIAL_KINDS)
        hashes, parent = found.block_hashes, found.parent_block_hash
        return BlocksStored(hashes, parent, found.block_size, found.medium, found.group_idx, is_whole)
    if isinstance(found, _Removed | _RemovedMap):
        return BlocksRemoved(found.block_hashes, found.medium, found.group_idx)
    return AllCleared()


def _is_map(packed: bytes) -> bool:
    """By msgpack's first byte: fixmap, map 16 and map 32."""
    return bool(packed) and (packed[0] & 0xF0 == 0x80 or packed[0] in (0xDE, 0xDF))


class EventPublisher(NamedTuple):
    """Where one rank of an engine publishes, on the engine's own host."""

    port: int
    replay_port: int | None
    """None: lost events cannot be asked for."""
    topic: str


def parse_sources(answer: object) -> list[EventPublisher] | None:
    """What an engine tells at `GET /kv_event_sources` (vLLM 0.32, PR #55844): the configuration of each rank's
    publisher by the rank, with its own ports. None: it is not that. Raises ValueError where nobody can publish.
    """
    if not isinstance(answer, dict) or not all(isinstance(rank, str) and rank.isdecimal() for rank in answer):
        return None
    _check_ranks(len(answer))
    configs = msgspec.convert(answer, dict[str, _EventsConfig]).values()
    return [EventPublisher(_port(config.endpoint), _replay_port(config), config.topic) for config in configs]


def configured_sources(info: object) -> list[EventPublisher] | None:
    """What follows from how an engine was started, by `/server_info`: of SGLang, and of vLLM with
    VLLM_SERVER_DEV_MODE=1. None: it does not tell, or publishes nothing. Raises ValueError where nobody can publish.
    """
    try:
        told = msgspec.convert(info, _ServerInfo)
    except ValueError:
        return None
    if told.vllm_config is not None:
        config, ranks = told.vllm_config.kv_events_config, told.vllm_config.parallel_config.data_parallel_size
    elif told.kv_events_config is not None:
        config, ranks = msgspec.json.decode(told.kv_events_config, type=_EventsConfig), told.dp_size
    else:
        return None
    if config is None or config.publisher != "zmq":
        return None
    return of_ranks(ranks, _port(config.endpoint), _replay_port(config), config.topic)


def of_ranks(ranks: int, port: int, replay_port: int | None, topic: str) -> list[EventPublisher]:
    """Each at the next port, as both engines have it (ZmqEventPublisher.offset_endpoint_port). Raises ValueError if
    there are not so many.
    """
    _check_ranks(ranks)
    if max(port, replay_port or 0) + ranks > 65536:
        raise ValueError(f"{ranks} ranks have no ports from {max(port, replay_port or 0)} on")
    return [EventPublisher(port + rank, replay_port and replay_port + rank, topic) for rank in range(ranks)]


def _check_ranks(ranks: int) -> None:
    if ranks > _MOST_RANKS:
        raise ValueError(f"{ranks} ranks are more than {_MOST_RANKS}")


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
    """So many publishers there are, with and without attention in data parallel (select_kv_publisher_dp_rank)."""
    vllm_config: _VllmConfig | None = None


def _replay_port(config: _EventsConfig) -> int | None:
    return _port(config.replay_endpoint) if config.replay_endpoint else None


def _port(endpoint: str) -> int:
    """Of tcp://host:port. Raises ValueError."""
    found = _is_tcp(endpoint)
    if not found or not 0 < int(found[1]) < 65536:
        raise ValueError(f"{endpoint[:200]} is no TCP endpoint")
    return int(found[1])
