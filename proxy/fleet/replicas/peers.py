"""What the other gateways of a group have told, for as long as it counts.

The clocks of hosts are not compared: a message is as old as it is here since it was another than before. So the same
rule holds for a gateway that died, one that cannot reach the store, and a store that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.shared.memory import NO_HEAD, first_head, shift_head
from proxy.fleet.replicas.gateway_state import Charge, News, Used, added, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

_FORGET_AFTER_TTLS: Final = 60
_NOTHING: Final = (0, 0, 0)


@dataclass(slots=True)
class _Peer:
    message: bytes
    heard_at: float
    turn: int | None = None
    """None: it cannot be understood."""
    instances: dict[str, Charge] = field(default_factory=dict)
    keys: dict[str, Used] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)
    front: int = NO_HEAD


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
            peer = self._peers[name] = before.get(name) or _Peer(b"", now)
            if peer.message == message:
                continue
            peer.message, peer.heard_at = message, now
            told = decode(message)
            if told is None:
                peer.turn = None
            elif peer.turn is None or told.turn > peer.turn:  # otherwise it was written before the last news
                peer.turn, peer.keys = told.turn, told.keys
                peer.instances, peer.verdicts = dict(told.instances), dict(told.verdicts)
                peer.front = shift_head(told.front, now - told.turn / 1e9)

    def hear_news(self, news: News, now: float) -> bool:
        """Whether they count: they come from another gateway, whose message is known, and after all that it has told
        so far.
        """
        peer = self._peers.get(news.me)
        if peer is None or peer.turn is None or news.turn <= peer.turn:
            return False
        peer.turn, peer.heard_at = news.turn, now
        peer.instances.update(news.instances)
        peer.verdicts.update(news.verdicts)
        if news.front is not None:
            peer.front = shift_head(news.front, now - news.now)
        return True

    def telling(self, now: float) -> int:
        """How many gateways there are that can be understood and have told something that counts now."""
        return len(self._counting(now))

    def charges(self, now: float) -> Mapping[str, Charge]:
        """What they have under way together, by instance."""
        return added(peer.instances for peer in self._counting(now))

    def charges_on(self, instances: Iterable[str], now: float) -> Mapping[str, Charge]:
        """The same of some instances."""
        peers = self._counting(now)
        return added({name: peer.instances.get(name, _NOTHING) for name in instances} for peer in peers)

    def used(self, now: float) -> Mapping[str, Used]:
        """What they have let in together, by client key."""
        return added(peer.keys for peer in self._counting(now))

    def verdicts(self, now: float) -> Set[tuple[str, str, int]]:
        """Which instances they have found of no use: the instance, the gateway, and the number of its verdict."""
        return {
            (instance, name, number)
            for name, peer in self._peers.items()
            if self._counts(peer, now)
            for instance, number in peer.verdicts.items()
            if number
        }

    def front(self, now: float) -> int:
        """Where the next one in their queues stands, by this gateway's clock; NO_HEAD: none waits."""
        return first_head(peer.front for peer in self._counting(now))

    def lost(self, now: float) -> list[str]:
        """The names of those that were silent for so long that what they left in the store can be deleted."""
        after = _FORGET_AFTER_TTLS * self._ttl_seconds
        return [name for name, peer in self._peers.items() if now - peer.heard_at > after]

    def _counting(self, now: float) -> list[_Peer]:
        return [peer for peer in self._peers.values() if self._counts(peer, now)]

    def _counts(self, peer: _Peer, now: float) -> bool:
        return peer.turn is not None and now - peer.heard_at < self._ttl_seconds
