"""KV events of engines, and arbitrary bytes on their ports."""

from __future__ import annotations

from typing import Final

import msgspec

from proxy.fleet.kv_events.messages import InstanceReport, SubscribeTo
from proxy.wire.kv_events import decode_batch
from tests.fuzz.cutting import spelled, words

WORDS: Final = words(
    r"""
    \x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00 \x91 \x92 \x93 \x95 \xabBlockStored \xacBlockRemoved
    \xb0AllBlocksCleared \xc0 \x81 \x82 \xa6events \xa4type \xacblock_hashes \xaablock_size \x91\x01
    \xcf\xff\xff\xff\xff\xff\xff\xff\xff \xc4\x01a \xa3GPU \xff \x91*300 \xdf\xff\xff\xff\xff \xdd\xff\xff\xff\xff
    {"instance":"a" "sources":[ "endpoint":"tcp://a:1" "count": [1,2,true,3] "events":{ "words":{ "lost":1 } ] , {
    """
)


def check_kv_events(data: bytes) -> None:
    """Check that a batch gives events or ValueError, and a subscriber's line a message or ValueError."""
    raw = spelled(data, WORDS)
    try:
        assert isinstance(decode_batch(raw), list)
    except ValueError as error:
        assert str(error)  # noqa: PT017 both results are right
    for kind in (InstanceReport, SubscribeTo):
        try:
            message = msgspec.json.decode(raw, type=kind)
        except (ValueError, RecursionError):
            continue
        assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message
