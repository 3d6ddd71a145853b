"""The reports of the other gateways of a group, for as long as they count.

Clocks of different hosts are not compared. The age of a report is the time since it arrived here and differed from the
one before. So one rule covers a dead gateway, a gateway that cannot reach the store, and an unreachable store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.shared.memory import NO_HEAD, first_head, shift_head
from proxy.fleet.replicas.state import KeyUse, LoadCharge, News, decode_state, sum_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

_FORGET_AFTER_TTLS: Final = 60
_NO_CHARGE: Final = (0, 0, 0)


@dataclass(slots=True)
class _Peer:
    last_message: bytes
    received_at: float
    turn_number: int | None = None
    """None: the message cannot be read."""
    charges_by_instance: dict[str, LoadCharge] = field(default_factory=dict)
    usage_by_key: dict[str, KeyUse] = field(default_factory=dict)
    verdicts_by_instance: dict[str, int] = field(default_factory=dict)
    roles_by_instance: dict[str, str] = field(default_factory=dict)
    first_head: int = NO_HEAD


class Peers:
    """The other gateways of the group. All times are monotonic seconds."""

    def __init__(self, own_name: str, ttl_seconds: float) -> None:
        """Start without peers.

        Args:
            own_name: Name of this gateway, whose own messages are skipped.
            ttl_seconds: Time for which a report counts.
        """
        self._own_name = own_name
        self._ttl_seconds = ttl_seconds
        self._peers_by_name: dict[str, _Peer] = {}

    def apply_messages(self, messages: Mapping[str, bytes], now: float) -> None:
        """Take all messages in the store, by name of the gateway. Gateways without a message are forgotten."""
        before, self._peers_by_name = self._peers_by_name, {}
        for name, message in messages.items():
            if name == self._own_name:
                continue
            peer = self._peers_by_name[name] = before.get(name) or _Peer(b"", now)
            if peer.last_message == message:
                continue
            peer.last_message, peer.received_at = message, now
            state = decode_state(message)
            if state is None:
                peer.turn_number = None
            elif peer.turn_number is None or state.turn > peer.turn_number:  # otherwise it is older than the last news
                peer.turn_number, tokens = state.turn, state.key_tokens
                peer.usage_by_key = {name: (*counts, tokens.get(name, 0)) for name, counts in state.keys.items()}
                peer.charges_by_instance, peer.verdicts_by_instance = dict(state.instances), dict(state.verdicts)
                peer.roles_by_instance = state.roles
                peer.first_head = shift_head(state.front, now - state.turn / 1e9)

    def apply_news(self, news: News, now: float) -> bool:
        """Take news, and return whether they count.

        They count if they come from another known gateway, and are newer than all its reports.
        """
        peer = self._peers_by_name.get(news.me)
        if peer is None or peer.turn_number is None or news.turn <= peer.turn_number:
            return False
        peer.turn_number, peer.received_at = news.turn, now
        peer.charges_by_instance.update(news.instances)
        peer.verdicts_by_instance.update(news.verdicts)
        if news.front is not None:
            peer.first_head = shift_head(news.front, now - news.now)
        return True

    def count_current(self, now: float) -> int:
        """Return the number of gateways whose reports can be read and count now."""
        return len(self._current_peers(now))

    def charges_by_instance(self, now: float) -> Mapping[str, LoadCharge]:
        """Return the summed load by instance."""
        return sum_tables(peer.charges_by_instance for peer in self._current_peers(now))

    def charges_on(self, instances: Iterable[str], now: float) -> Mapping[str, LoadCharge]:
        """Return the summed load of some instances."""
        peers = self._current_peers(now)
        return sum_tables(
            {name: peer.charges_by_instance.get(name, _NO_CHARGE) for name in instances} for peer in peers
        )

    def usage_by_key(self, now: float) -> Mapping[str, KeyUse]:
        """Return the summed use by client key."""
        return sum_tables(peer.usage_by_key for peer in self._current_peers(now))

    def current_verdicts(self, now: float) -> Set[tuple[str, str, int]]:
        """Return the unhealthy instances: each with the gateway that found it, and the number of the verdict."""
        return {
            (instance, name, number)
            for name, peer in self._peers_by_name.items()
            if self._is_current(peer, now)
            for instance, number in peer.verdicts_by_instance.items()
            if number
        }

    def first_head(self, now: float) -> int:
        """Return the place of the first request in their queues by this gateway's clock; NO_HEAD: none is queued."""
        return first_head(peer.first_head for peer in self._current_peers(now))

    def leader_roles(self, now: float) -> Mapping[str, str] | None:
        """Return the roles that the leading gateway gives to elastic instances; None: this gateway leads.

        The gateway with the first name leads, which is the oldest one. So a gateway that restarts with the roles of
        its configuration follows the others.
        """
        current = [name for name, peer in self._peers_by_name.items() if self._is_current(peer, now)]
        first = min(current, default=self._own_name)
        return None if self._own_name <= first else self._peers_by_name[first].roles_by_instance

    def silent_names(self, now: float) -> list[str]:
        """Return the names of gateways that are silent for so long that their messages can be deleted."""
        after = _FORGET_AFTER_TTLS * self._ttl_seconds
        return [name for name, peer in self._peers_by_name.items() if now - peer.received_at > after]

    def _current_peers(self, now: float) -> list[_Peer]:
        return [peer for peer in self._peers_by_name.values() if self._is_current(peer, now)]

    def _is_current(self, peer: _Peer, now: float) -> bool:
        return peer.turn_number is not None and now - peer.received_at < self._ttl_seconds
