"""What workers tell each other of prompts that they have sent to prefillers, as records of the journal.

Other gateways are told the same, see `replicas`: their records have another slot and another clock, and may be
anything.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from math import isfinite
from struct import Struct, error
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kind(IntEnum):
    """Of a record."""

    SENT = 0
    """A prompt with these keys goes there. Numbers: when, the predicted seconds, and the tokens that are not expected
    to be cached. The pieces that the keys name have these ends."""
    ENDED = 1
    """One has ended, and nothing has come of these keys. Numbers: when, how far the odometer has to be moved, the trust
    and the capacity by now, and a sample, if it teaches one."""
    COUNTED = 2
    """The engine has told of its cache. Numbers: those of a CacheCount. Not for other gateways, which ask it, too."""


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


# Its kind, the prefiller's slot, and how many keys, ends and other numbers follow.
_HEAD: Final = Struct("<IIIII")
_KIND_AND_SLOT: Final = Struct("<II")
_NUMBERS: Final = {Kind.SENT: (3,), Kind.ENDED: (4, 11), Kind.COUNTED: (4,)}


def packed(record: Record) -> bytes:
    """As bytes. Ends are rounded to single precision."""
    kind, slot, keys, ends, numbers = record
    head = _HEAD.pack(kind, slot, len(keys), len(ends), len(numbers))
    return head + array("Q", keys).tobytes() + array("f", ends).tobytes() + array("d", numbers).tobytes()


def unpacked(data: bytes) -> Record:
    """What was packed. Raises InvalidRecord."""
    try:
        kind, slot, *counts = _HEAD.unpack_from(data)
        at, columns = _HEAD.size, []
        for code, count in zip("Qfd", counts, strict=True):
            column = array(code)
            end = at + count * column.itemsize
            column.frombytes(data[at:end])
            columns.append(column)
            at = end
    except (error, ValueError) as problem:
        raise InvalidRecord(str(problem)) from None
    keys, ends, numbers = columns
    is_whole = at == len(data) and [len(column) for column in columns] == counts
    if not is_whole or len(numbers) not in _NUMBERS.get(kind, ()) or len(ends) != (kind == Kind.SENT) * len(keys):
        raise InvalidRecord("it has not the parts of a record")
    return Record(kind, slot, keys, ends, numbers)


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
    if record.kind == Kind.COUNTED:
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
