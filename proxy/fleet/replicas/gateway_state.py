"""What a gateway tells the others of its group: all that it has under way, as JSON, and what is new, as MessagePack."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Of some hundred gateways the sum still fits into a cell of the scoreboard.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# As large as a cell of the health board can be.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

Charge = tuple[_Count, _Count, _Count]
"""Of one instance: requests it works on, tokens of compute, tokens of KV cache with those that are pinned."""

Used = tuple[_Count, _Count]
"""Of one client key: requests in flight, requests in the minute that ends when it is told."""

_Counts = TypeVar("_Counts", Charge, Used)


class GatewayState(msgspec.Struct, frozen=True):
    """What one gateway has under way. Members that another version has besides are ignored."""

    turn: int
    """More each time, so that what is told anew differs from what is merely still there, and news are not older than
    they seem."""
    instances: dict[str, Charge] = {}
    """By Backend.key; those that have nothing are left out."""
    keys: dict[str, Used] = {}
    """By the name of the client key, likewise. Empty where limits hold for each gateway."""
    front: int = 0
    """Place of the first request in its queues, see `encode_head`; its clock says `turn`, in nanoseconds."""
    verdicts: dict[str, _Number] = {}
    """The instances, by Backend.key, that this gateway has found of no use by itself, with another number each time."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has changed since the last ones.

    Some may be lost: what they hold is in the next GatewayState, or is not needed.
    """

    me: str
    turn: int
    """Of the same count as in GatewayState: nanoseconds at the clock that records tell."""
    instances: dict[str, Charge] = {}
    """By Backend.key, those that have changed; they may have nothing any more."""
    front: int | None = None
    """As in GatewayState; None: where it was."""
    verdicts: dict[str, _Number] = {}
    """As in GatewayState, those that have changed; 0: not any more."""
    prompts: dict[str, list[bytes]] = {}
    """By the prefiller's Backend.key, what was sent there and what came of it: see
    balancer/policies/prefill_records.py."""

    @property
    def now(self) -> float:
        """When they were told: seconds at the clock that records tell."""
        return self.turn / 1e9


encode: Final = msgspec.json.Encoder().encode
encode_news: Final = msgspec.msgpack.Encoder().encode
_told_in: Final = msgspec.json.Decoder(GatewayState).decode
_news_in: Final = msgspec.msgpack.Decoder(News).decode


def decode(message: bytes) -> GatewayState | None:
    """None: it is nothing that this version understands."""
    try:
        return _told_in(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_news(message: bytes) -> News | None:
    """None: it is nothing that this version understands."""
    try:
        return _news_in(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def added(tables: Iterable[Mapping[str, _Counts]]) -> dict[str, _Counts]:
    """The sums by name."""
    total: dict[str, _Counts] = {}
    for table in tables:
        for name, counts in table.items():
            before = total.get(name)
            total[name] = counts if before is None else tuple(map(add, before, counts))
    return total
