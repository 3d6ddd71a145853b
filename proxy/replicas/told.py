"""What a gateway tells the others of its group, as JSON."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Of some hundred gateways the sum still fits into a cell of the scoreboard.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

Charge = tuple[_Count, _Count, _Count]
"""Of one instance: requests it works on, tokens of compute, tokens of KV cache with those that are pinned."""

Used = tuple[_Count, _Count]
"""Of one client key: requests in flight, requests in the minute that ends when it is told."""

_Counts = TypeVar("_Counts", Charge, Used)


class Told(msgspec.Struct, frozen=True):
    """What one gateway has under way. Members that another version has besides are ignored."""

    turn: int
    """Another one each time, so that what is told anew differs from what is merely still there."""
    instances: dict[str, Charge] = {}
    """By Backend.key; those that have nothing are left out."""
    keys: dict[str, Used] = {}
    """By the name of the client key, likewise. Empty where limits hold for each gateway."""


encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(Told)


def decode(message: bytes) -> Told | None:
    """None: it is nothing that this version understands."""
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def added(tables: Iterable[Mapping[str, _Counts]]) -> dict[str, _Counts]:
    """The sums by name."""
    total: dict[str, _Counts] = {}
    for table in tables:
        for name, counts in table.items():
            before = total.get(name)
            total[name] = counts if before is None else tuple(map(add, before, counts))
    return total
