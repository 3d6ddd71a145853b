"""Test KV events in all formats of engines, and invalid ones."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from proxy.wire.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventPublisher,
    UnreadableEvent,
    decode_batch,
    parse_configured_publishers,
    parse_publishers,
)

pack = msgspec.msgpack.encode

HASH = b"\x01" * 32
IDS = list(range(8))
BOTH = BlocksStored([HASH, 2], None, 4, None, None, has_full_attention=True)
ON_GPU = BOTH._replace(medium="GPU")

STORED = {
    "vLLM 0.10": (["BlockStored", [HASH, 2], None, IDS, 4, None], BOTH),
    "vLLM 0.10.2": (["BlockStored", [HASH, 2], None, IDS, 4, None, "GPU"], ON_GPU),
    "vLLM 0.23": (
        ["BlockStored", [HASH, 2], None, IDS, 4, 1, "GPU", "adapter", [None, ["salt"]], 0, "full_attention"],
        ON_GPU._replace(group=0),
    ),
    "vLLM 0.23, a sliding window": (
        ["BlockStored", [HASH, 2], 7, IDS, 4, None, "GPU", None, None, 1, "sliding_window", 512],
        BlocksStored([HASH, 2], 7, 4, "GPU", 1, has_full_attention=False),
    ),
    "vLLM 0.24": (
        {
            "type": "BlockStored",
            "block_hashes": [HASH, 2],
            "parent_block_hash": None,
            "token_ids": IDS,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "what_comes_next": {"a": [1]},
        },
        ON_GPU._replace(group=0),
    ),
    "SGLang 0.5": (["BlockStored", [-5, 2], -9, IDS, 4, None, "GPU"], BlocksStored([-5, 2], -9, 4, "GPU", None, True)),
    "SGLang 0.5.18, with a salt": (["BlockStored", [HASH, 2], None, IDS, 4, None, "GPU", {"cache_salt": "a"}], ON_GPU),
    "SGLang 0.5.23": (
        {
            "type": "BlockStored",
            "block_hashes": [-5, 2],
            "parent_block_hash": -9,
            "token_ids": IDS,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
        },
        BlocksStored([-5, 2], -9, 4, "GPU", None, True),
    ),
    "an offloading connector": (
        ["BlockStored", [HASH, 2], None, [], 0, None, "CPU"],
        BOTH._replace(block_tokens=0, medium="CPU"),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_blocks_are_decoded_in_every_format(name: str) -> None:
    event, expected = STORED[name]
    for batch in ([1.5, [event]], [1.5, [event], 0], {"ts": 1.5, "events": [event], "data_parallel_rank": 0}):
        assert decode_batch(pack(batch)) == [expected]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["BlockRemoved", [HASH]], BlocksRemoved([HASH], None, None)),
        (["BlockRemoved", [3], "GPU", 1], BlocksRemoved([3], "GPU", 1)),
        ({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}, BlocksRemoved([3], "GPU", None)),
        (["AllBlocksCleared"], AllBlocksCleared()),
        ({"type": "AllBlocksCleared"}, AllBlocksCleared()),
    ],
)
def test_removed_blocks_are_decoded_in_every_format(event: Any, expected: Any) -> None:
    assert decode_batch(pack([1.5, [event], 0])) == [expected]


def test_unreadable_kv_event_does_not_affect_others() -> None:
    odd: tuple[Any, ...] = (
        ["BlockMigrated", 1],
        {"type": "BlockStored"},
        5,
        ["BlockRemoved", "all"],
        {"block_hashes": []},
        [],
    )
    found = decode_batch(pack([1.5, [*odd, ["AllBlocksCleared"]], 0]))
    assert all(isinstance(event, UnreadableEvent) for event in found[:-1])
    assert len(found) == len(odd) + 1
    assert found[-1] == AllBlocksCleared()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        pack(5),
        pack([1.5]),
        pack({"ts": 1}),
        pack([1.5, {}]),
        b"\x92\x01" + b"\x91" * 5000,
    ],
)
def test_invalid_batch_raises_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_batch(payload)


def test_any_bytes_are_decoded_or_rejected() -> None:
    whole = pack([1.5, [event for event, _ in STORED.values()], 0])
    for cut in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            decode_batch(whole[:cut])
    for _ in range(2000):
        try:
            decode_batch(os.urandom(40))
        except ValueError:
            continue


# As vLLM 0.32 has answered.
RANK = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:28557",
    "replay_endpoint": "tcp://*:28657",
    "buffer_steps": 10000,
    "hwm": 100000,
    "max_queue_size": 100000,
    "topic": "",
}
OTHER_RANK = {"publisher": "zmq", "endpoint": "tcp://10.0.0.1:28558", "replay_endpoint": None, "topic": "kv"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"0": RANK}, [EventPublisher(28557, 28657, "")]),
        ({"0": RANK, "1": OTHER_RANK}, [EventPublisher(28557, 28657, ""), EventPublisher(28558, None, "kv")]),
        ({"0": {"endpoint": "tcp://[::]:7", "replay_endpoint": ""}}, [EventPublisher(7, None, "")]),
        ({}, []),
        ({"detail": "Not Found"}, None),
        ([RANK], None),
        (None, None),
    ],
)
def test_sources_are_read_from_the_answer_of_the_engine(answer: Any, expected: Any) -> None:
    assert parse_publishers(answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        *(
            {"0": {"endpoint": endpoint}}
            for endpoint in ("ipc:///tmp/events", "tcp://*:0", "tcp://*:65536", "tcp://*: 7")
        ),
        {"0": {"endpoint": 5557}},
        {"0": "tcp://*:5557"},
        {str(rank): RANK for rank in range(1025)},
    ],
)
def test_impossible_publisher_is_rejected(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_publishers(answer)


def sglang(config: str, ranks: int = 1) -> dict[str, Any]:
    return {"kv_events_config": config, "dp_size": ranks}


# The last ports that there are.
TOP = '{"publisher":"zmq","endpoint":"tcp://*:65534"}'
TOP_REPLAY = '{"publisher":"zmq","endpoint":"tcp://*:1","replay_endpoint":"tcp://*:65535"}'


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"kv_events_config": '{"publisher":"zmq","topic":"kv"}'}, [EventPublisher(5557, None, "kv")]),
        (
            sglang('{"publisher":"zmq","endpoint":"tcp://*:7","replay_endpoint":"tcp://*:9"}', 2),
            [EventPublisher(7, 9, ""), EventPublisher(8, 10, "")],
        ),
        (
            {
                "vllm_config": {
                    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:7"},
                    "parallel_config": {"data_parallel_size": 2},
                }
            },
            [EventPublisher(7, None, ""), EventPublisher(8, None, "")],
        ),
        ({"kv_events_config": '{"publisher":"zmq","replay_endpoint":""}'}, [EventPublisher(5557, None, "")]),
        (sglang(TOP, 2), [EventPublisher(65534, None, ""), EventPublisher(65535, None, "")]),
        ({"kv_events_config": "{}"}, None),
        ({"kv_events_config": None}, None),
        ({"vllm_config": {"kv_events_config": None}}, None),
        ({"vllm_config": "a text"}, None),
        (None, None),
    ],
)
def test_sources_follow_from_how_an_engine_was_started(info: Any, expected: Any) -> None:
    assert parse_configured_publishers(info) == expected


@pytest.mark.parametrize(
    "info", [sglang(TOP, 3), sglang(TOP_REPLAY, 2), sglang('{"publisher":"zmq"}', 1025), sglang("zmq")]
)
def test_engine_cannot_have_been_started_with_more_ranks_than_ports(info: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_configured_publishers(info)
