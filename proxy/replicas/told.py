"""What a gateway tells the others of its group, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of some hundred gateways the sum still fits into a cell of the scoreboard.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

Charge = tuple[_Count, _Count, _Count]
"""Of one instance: requests it works on, tokens of compute, tokens of KV cache with those that are pinned."""


class Told(msgspec.Struct, frozen=True):
    """What one gateway has under way. Members that another version has besides are ignored."""

    turn: int
    """Another one each time, so that what is told anew differs from what is merely still there."""
    instances: dict[str, Charge] = {}
    """By Backend.key; those that have nothing are left out."""


encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(Told)


def decode(message: bytes) -> Told | None:
    """None: it is nothing that this version understands."""
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def added(charges: Mapping[str, Charge], more: Mapping[str, Charge]) -> dict[str, Charge]:
    """The sum by key."""
    total = dict(charges)
    for key, (running, compute, kv) in more.items():
        before = total.get(key, (0, 0, 0))
        total[key] = before[0] + running, before[1] + compute, before[2] + kv
    return total
