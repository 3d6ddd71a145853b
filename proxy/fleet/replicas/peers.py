"""The reports of the other gateways of a group, for as long as they count.

Clocks of different hosts are not compared. The age of a report is the time since it arrived here and differed from the
one before. So one rule covers a dead gateway, a gateway that cannot reach the store, and an unreachable store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.shared.memory import NO_HEAD, first_head, shift_head
from proxy.fleet.replicas.state import Charge, News, Used, decode, summed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

_FORGET_AFTER_TTLS: Final = 60
_NO_CHARGE: Final = (0, 0, 0)


@dataclass(slots=True)
class _Peer:
    message: bytes
    received_at: float
    turn: int | None = None
    """None: the message cannot be read."""
    instances: dict[str, Charge] = field(default_factory=dict)
    keys: dict[str, Used] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    front: int = NO_HEAD


class Peers:
    """The other gateways of the group. All times are monotonic seconds."""

    def __init__(self, me: str, ttl_seconds: float) -> None:
        """Start without peers.

        Args:
            me: Name of this gateway, whose own messages are skipped.
            ttl_seconds: Time for which a report counts.
        """
        self._me = me
        self._ttl_seconds = ttl_seconds
        self._peers: dict[str, _Peer] = {}

    def take_messages(self, messages: Mapping[str, bytes], now: float) -> None:
        """Take all messages in the store, by name of the gateway. Gateways without a message are forgotten."""
        before, self._peers = self._peers, {}
        for name, message in messages.items():
            if name == self._me:
                continue
            peer = self._peers[name] = before.get(name) or _Peer(b"", now)
            if peer.message == message:
                continue
            peer.message, peer.received_at = message, now
            state = decode(message)
            if state is None:
                peer.turn = None
            elif peer.turn is None or state.turn > peer.turn:  # otherwise it is older than the last news
                peer.turn, tokens = state.turn, state.key_tokens
                peer.keys = {name: (*counts, tokens.get(name, 0)) for name, counts in state.keys.items()}
                peer.instances, peer.verdicts = dict(state.instances), dict(state.verdicts)
                peer.roles = state.roles
                peer.front = shift_head(state.front, now - state.turn / 1e9)

    def take_news(self, news: News, now: float) -> bool:
        """Take news, and return whether they count.

        They count if they come from another known gateway, and are newer than all its reports.
        """
        peer = self._peers.get(news.me)
        if peer is None or peer.turn is None or news.turn <= peer.turn:
            return False
        peer.turn, peer.received_at = news.turn, now
        peer.instances.update(news.instances)
        peer.verdicts.update(news.verdicts)
        if news.front is not None:
            peer.front = shift_head(news.front, now - news.now)
        return True

    def count(self, now: float) -> int:
        """Return the number of gateways whose reports can be read and count now."""
        return len(self._current_peers(now))

    def charges(self, now: float) -> Mapping[str, Charge]:
        """Return the summed load by instance."""
        return summed(peer.instances for peer in self._current_peers(now))

    def charges_on(self, instances: Iterable[str], now: float) -> Mapping[str, Charge]:
        """Return the summed load of some instances."""
        peers = self._current_peers(now)
        return summed({name: peer.instances.get(name, _NO_CHARGE) for name in instances} for peer in peers)

    def key_usage(self, now: float) -> Mapping[str, Used]:
        """Return the summed use by client key."""
        return summed(peer.keys for peer in self._current_peers(now))

    def verdicts(self, now: float) -> Set[tuple[str, str, int]]:
        """Return the unhealthy instances: each with the gateway that found it, and the number of the verdict."""
        return {
            (instance, name, number)
            for name, peer in self._peers.items()
            if self._is_current(peer, now)
            for instance, number in peer.verdicts.items()
            if number
        }

    def front(self, now: float) -> int:
        """Return the place of the first request in their queues by this gateway's clock; NO_HEAD: none is queued."""
        return first_head(peer.front for peer in self._current_peers(now))

    def leader_roles(self, now: float) -> Mapping[str, str] | None:
        """Return the roles that the leading gateway gives to elastic instances; None: this gateway leads.

        The gateway with the first name leads, which is the oldest one. So a gateway that restarts with the roles of
        its configuration follows the others.
        """
        current = [name for name, peer in self._peers.items() if self._is_current(peer, now)]
        first = min(current, default=self._me)
        return None if self._me <= first else self._peers[first].roles

    def silent_names(self, now: float) -> list[str]:
        """Return the names of gateways that are silent for so long that their messages can be deleted."""
        after = _FORGET_AFTER_TTLS * self._ttl_seconds
        return [name for name, peer in self._peers.items() if now - peer.received_at > after]

    def _current_peers(self, now: float) -> list[_Peer]:
        return [peer for peer in self._peers.values() if self._is_current(peer, now)]

    def _is_current(self, peer: _Peer, now: float) -> bool:
        return peer.turn is not None and now - peer.received_at < self._ttl_seconds
