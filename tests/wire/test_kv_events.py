"""KV events in all shapes in which engines have published them, and what is none."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from proxy.wire.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Source,
    Unreadable,
    configured_sources,
    decode,
    parse_sources,
)

pack = msgspec.msgpack.encode

HASH = b"\x01" * 32
IDS = list(range(8))
BOTH = BlocksStored([HASH, 2], None, 4, None, None, is_whole=True)
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
        BlocksStored([HASH, 2], 7, 4, "GPU", 1, is_whole=False),
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
    "an offloading connector": (
        ["BlockStored", [HASH, 2], None, [], 0, None, "CPU"],
        BOTH._replace(block_tokens=0, medium="CPU"),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_blocks_are_read_in_every_shape(name: str) -> None:
    event, expected = STORED[name]
    for batch in ([1.5, [event]], [1.5, [event], 0], {"ts": 1.5, "events": [event], "data_parallel_rank": 0}):
        assert decode(pack(batch)) == [expected]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["BlockRemoved", [HASH]], BlocksRemoved([HASH], None, None)),
        (["BlockRemoved", [3], "GPU", 1], BlocksRemoved([3], "GPU", 1)),
        ({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}, BlocksRemoved([3], "GPU", None)),
        (["AllBlocksCleared"], AllCleared()),
        ({"type": "AllBlocksCleared"}, AllCleared()),
    ],
)
def test_what_is_removed_is_read_in_every_shape(event: Any, expected: Any) -> None:
    assert decode(pack([1.5, [event], 0])) == [expected]


def test_an_event_that_cannot_be_read_costs_no_other() -> None:
    odd: tuple[Any, ...] = (
        ["BlockMigrated", 1],
        {"type": "BlockStored"},
        5,
        ["BlockRemoved", "all"],
        {"block_hashes": []},
        [],
    )
    found = decode(pack([1.5, [*odd, ["AllBlocksCleared"]], 0]))
    assert all(isinstance(event, Unreadable) for event in found[:-1])
    assert len(found) == len(odd) + 1
    assert found[-1] == AllCleared()


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
def test_what_is_no_batch_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(payload)


def test_any_bytes_are_read_or_refused() -> None:
    whole = pack([1.5, [event for event, _ in STORED.values()], 0])
    for cut in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            decode(whole[:cut])
    for _ in range(2000):
        try:
            decode(os.urandom(40))
        except ValueError:
            continue


SOURCE = {"data_parallel_rank": 1, "endpoint": "tcp://10.0.0.1:5558", "replay_endpoint": None, "topic": "kv"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([SOURCE], [Source(1, 5558, None, "kv")]),
        ({"sources": [SOURCE]}, [Source(1, 5558, None, "kv")]),
        ([{"endpoint": "tcp://[::]:7", "replay_endpoint": "tcp://*:8"}], [Source(0, 7, 8, "")]),
        ([], []),
        ({"detail": "Not Found"}, None),
        ([{"endpoint": "ipc:///tmp/events"}], None),
        ([{"endpoint": "tcp://*:0"}], None),
        (None, None),
    ],
)
def test_sources_are_what_an_engine_tells(answer: Any, expected: Any) -> None:
    assert parse_sources(answer) == expected


# The last ports that there are.
SGLANG = '{"publisher":"zmq","endpoint":"tcp://*:65534"}'
SGLANG_REPLAY = '{"publisher":"zmq","endpoint":"tcp://*:1","replay_endpoint":"tcp://*:65535"}'
TOP = Source(0, 65534, None, ""), Source(1, 65535, None, "")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"kv_events_config": '{"publisher":"zmq","topic":"kv"}', "dp_size": 2}, [Source(0, 5557, None, "kv")]),
        (
            {
                "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:7","replay_endpoint":"tcp://*:9"}',
                "dp_size": 2,
                "enable_dp_attention": True,
            },
            [Source(0, 7, 9, ""), Source(1, 8, 10, "")],
        ),
        (
            {
                "vllm_config": {
                    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:7"},
                    "parallel_config": {"data_parallel_size": 2},
                }
            },
            [Source(0, 7, None, ""), Source(1, 8, None, "")],
        ),
        ({"kv_events_config": '{"publisher":"zmq","replay_endpoint":""}'}, [Source(0, 5557, None, "")]),
        ({"kv_events_config": SGLANG, "dp_size": 2, "enable_dp_attention": True}, [*TOP]),
        ({"kv_events_config": SGLANG, "dp_size": 3, "enable_dp_attention": True}, None),
        ({"kv_events_config": SGLANG_REPLAY, "dp_size": 2, "enable_dp_attention": True}, None),
        ({"kv_events_config": "{}"}, None),
        ({"kv_events_config": "zmq"}, None),
        ({"kv_events_config": None}, None),
        ({"vllm_config": {"kv_events_config": None}}, None),
        ({"vllm_config": "a text"}, None),
        (None, None),
    ],
)
def test_sources_follow_from_how_an_engine_was_started(info: Any, expected: Any) -> None:
    assert configured_sources(info) == expected
