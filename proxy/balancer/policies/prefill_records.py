"""What workers tell each other of prompts that they have sent to prefillers, as records of the journal.

Other gateways are told the same, see `fleet.replicas`: their records have another slot and another clock, and may be
anything.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from functools import lru_cache
from math import isfinite
from struct import Struct, error
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RecordKind(IntEnum):
    """Of a record."""

    SENT = 0
    """A prompt with these keys goes there. Numbers: when, the predicted seconds, and the tokens that are not expected
    to be cached. The pieces that the keys name have these ends."""
    ENDED = 1
    """A prompt has ended, and these keys are not cached. Numbers: the time, how far the odometer has to be moved, the
    trust by now, the greatest age of a prefix that was found, the least age of one that was evicted (NO_AGE: none), and
    whether it was computed."""
    COUNTED = 2
    """The engine has told of its cache. Numbers: those of a CacheCount. Not for other gateways, which ask it, too."""
    SAMPLED = 3
    """A prompt that has ended teaches what prompts take. It is written once it is known that the event loop was not
    late meanwhile. Numbers: when it ended, and a Sample."""


class InvalidRecord(ValueError):
    """It is no record of this version."""


class Record(NamedTuple):
    """`numbers[0]` is seconds of the reader's clock, but in a record COUNTED. `ends` are tokens, in a record SENT one
    for each key.
    """

    kind: int
    slot: int
    keys: Sequence[int]
    ends: Sequence[float]
    numbers: Sequence[float]


NO_AGE: Final = -1.0

# Its kind, the prefiller's slot, and how many keys, ends and other numbers follow.
_HEAD: Final = Struct("<IIIII")
_KIND_AND_SLOT: Final = Struct("<II")
_NUMBERS: Final = {RecordKind.SENT: 3, RecordKind.ENDED: 6, RecordKind.COUNTED: 4, RecordKind.SAMPLED: 9}
_KEY_BYTES: Final = 8
_END_BYTES: Final = 4


@lru_cache(maxsize=16)
def _doubles(count: int) -> Struct:
    return Struct(f"={count}d")


def packed(record: Record) -> bytes:
    """As bytes. Ends are rounded to single precision."""
    kind, slot, keys, ends, numbers = record
    data = _HEAD.pack(kind, slot, len(keys), len(ends), len(numbers))
    if keys:  # short prompts have none
        data += array("Q", keys).tobytes() + array("f", ends).tobytes()
    return data + _doubles(len(numbers)).pack(*numbers)


def unpacked(data: bytes) -> Record:
    """What was packed. Raises InvalidRecord."""
    try:
        kind, slot, key_count, end_count, number_count = _HEAD.unpack_from(data)
    except error as problem:
        raise InvalidRecord(str(problem)) from None
    ends_at = _HEAD.size + _KEY_BYTES * key_count
    numbers_at = ends_at + _END_BYTES * end_count
    if number_count != _NUMBERS.get(kind) or end_count != (kind == RecordKind.SENT) * key_count:
        raise InvalidRecord("it has not the parts of a record")
    written = _doubles(number_count)
    if len(data) != numbers_at + written.size:
        raise InvalidRecord("it has not the length of a record")
    keys: Sequence[int] = ()
    ends: Sequence[float] = ()
    if key_count:
        keys, ends = array("Q", data[_HEAD.size : ends_at]), array("f", data[ends_at:numbers_at])
    return Record(kind, slot, keys, ends, written.unpack_from(data, numbers_at))


def kind_and_slot(data: bytes) -> tuple[int, int]:
    """The kind of a packed record and the prefiller's slot, read without unpacking the rest, as most records are for
    others. Raises InvalidRecord if the data is too short.
    """
    try:
        kind, slot = _KIND_AND_SLOT.unpack_from(data)
    except error as problem:
        raise InvalidRecord(str(problem)) from None
    return kind, slot


def translated(record: Record, slot: int, seconds: float) -> Record:
    """The same of another gateway, for whom the prefiller has this slot, and whose clock is so much ahead. Raises
    InvalidRecord for numbers that are none.
    """
    if record.kind == RecordKind.COUNTED:
        raise InvalidRecord("it is not for other gateways")
    if not all(map(isfinite, record.numbers)) or not all(map(isfinite, record.ends)):
        raise InvalidRecord("it has numbers that are none")
    at, *others = record.numbers
    return record._replace(slot=slot, numbers=[at + seconds, *others])


def without_keys(record: Record) -> Record:
    """The record without its prefix keys and ends, which are most of its bytes: it still teaches how long prompts take,
    but not what is cached.
    """
    return record._replace(keys=(), ends=())
