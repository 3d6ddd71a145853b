"""What the other gateways of a group have told, for as long as it counts.

The clocks of hosts are not compared: a message is as old as it is here since it was another than before. So the same
rule holds for a gateway that died, one that cannot reach the store, and a store that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.replicas.told import Charge, Told, Used, added, decode

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORGET_AFTER_TTLS: Final = 60


@dataclass(frozen=True, slots=True)
class _Peer:
    message: bytes
    told: Told | None
    heard_at: float


class Peers:
    """Of one gateway. All times are monotonic seconds."""

    def __init__(self, me: str, ttl_seconds: float) -> None:
        """`me`: the name under which this gateway finds its own messages."""
        self._me = me
        self._ttl_seconds = ttl_seconds
        self._peers: dict[str, _Peer] = {}

    def hear(self, messages: Mapping[str, bytes], now: float) -> None:
        """All that is in the store now, by the gateways' names."""
        before, self._peers = self._peers, {}
        for name, message in messages.items():
            if name == self._me:
                continue
            known = before.get(name)
            is_news = known is None or known.message != message
            self._peers[name] = _Peer(message, decode(message), now) if known is None or is_news else known

    def telling(self, now: float) -> list[Told]:
        """What counts now, of each gateway that can be understood."""
        return [
            peer.told
            for peer in self._peers.values()
            if peer.told is not None and now - peer.heard_at < self._ttl_seconds
        ]

    def charges(self, now: float) -> Mapping[str, Charge]:
        """What they have under way together, by instance."""
        return added(told.instances for told in self.telling(now))

    def used(self, now: float) -> Mapping[str, Used]:
        """What they have let in together, by client key."""
        return added(told.keys for told in self.telling(now))

    def lost(self, now: float) -> list[str]:
        """The names of those that were silent for so long that what they left in the store can be deleted."""
        after = _FORGET_AFTER_TTLS * self._ttl_seconds
        return [name for name, peer in self._peers.items() if now - peer.heard_at > after]
