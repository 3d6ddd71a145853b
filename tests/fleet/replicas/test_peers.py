"""Messages of other gateways expire by the local clock; clocks of hosts may differ."""

from __future__ import annotations

import pytest

from proxy.balancer.shared.memory import AGEING, NO_HEAD, encode_head
from proxy.fleet.replicas.peers import Peers
from proxy.fleet.replicas.state import GatewayState, News, decode_news, decode_state, encode_state


def _message(turn: int, **instances: tuple[int, int, int]) -> bytes:
    return encode_state(GatewayState(turn, instances))


def test_loads_of_peers_are_added_without_the_local_one() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    messages = {
        "me": _message(1, a=(9, 9, 9)),
        "one": _message(7, a=(1, 2, 3)),
        "two": _message(3, a=(1, 1, 1), b=(0, 0, 5)),
    }
    peers.apply_messages(messages, 100.0)
    assert peers.charges_by_instance(100.5) == {"a": (2, 3, 4), "b": (0, 0, 5)}
    assert peers.count_current(100.5) == 2


@pytest.mark.parametrize("message", [b"", b"no JSON", b"[]", b'{"turn": ' + b"[" * 200_000, b'{"x": ' + b"[" * 200_000])
def test_undecodable_message_is_ignored(message: bytes) -> None:
    assert decode_state(message) is None


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x91" * 200_000, b"\x81\xa1x" + b"\x91" * 200_000])
def test_undecodable_news_are_ignored(message: bytes) -> None:
    assert decode_news(message) is None


def test_message_expires_when_unchanged_for_its_time_to_live() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    peers.apply_messages({"one": _message(1, a=(1, 0, 0))}, 100.0)
    peers.apply_messages({"one": _message(1, a=(1, 0, 0))}, 100.9)
    assert peers.charges_by_instance(100.99) == {"a": (1, 0, 0)}
    assert peers.charges_by_instance(101.0) == {}
    peers.apply_messages({"one": _message(2, a=(1, 0, 0))}, 101.5)
    assert peers.charges_by_instance(102.4) == {"a": (1, 0, 0)}


def test_news_of_known_gateways_count_if_newer_than_their_message() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    assert not peers.apply_news(News("one", 1, {"a": (1, 0, 0)}), 100.0)
    peers.apply_messages({"one": _message(5, a=(2, 0, 0), b=(1, 1, 1)), "me": _message(1)}, 100.0)
    assert not peers.apply_news(News("one", 5, {"a": (1, 0, 0)}), 100.1)
    assert not peers.apply_news(News("me", 9, {"a": (1, 0, 0)}), 100.1)
    assert peers.apply_news(News("one", 7, {"a": (3, 0, 0)}), 100.9)
    assert peers.charges_by_instance(100.9) == {"a": (3, 0, 0), "b": (1, 1, 1)}
    assert peers.charges_on(["a", "c"], 100.9) == {"a": (3, 0, 0), "c": (0, 0, 0)}
    peers.apply_messages({"one": _message(6, a=(2, 0, 0))}, 101.0)  # written before the news
    assert peers.charges_by_instance(101.9) == {"a": (3, 0, 0), "b": (1, 1, 1)}
    peers.apply_messages({"one": _message(8, b=(1, 1, 1))}, 101.5)
    assert peers.charges_by_instance(102.4) == {"b": (1, 1, 1)}
    assert peers.apply_news(News("one", 9, {"b": (0, 0, 0)}), 102.4)
    assert peers.charges_on(["b"], 103.4) == {}


def test_longest_wait_at_a_peer_is_converted_to_the_local_clock() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    ours, theirs = 100.0, 7.0
    state = GatewayState(round(theirs * 1e9), front=encode_head(0, AGEING * 5.0))  # it has waited for two seconds
    peers.apply_messages({"one": encode_state(state), "two": encode_state(GatewayState(1))}, ours)
    assert peers.first_head(ours) == encode_head(0, AGEING * (ours - 2.0))
    assert peers.apply_news(News("one", state.turn + 500_000_000, front=NO_HEAD), ours + 0.5)
    assert peers.first_head(ours + 0.5) == NO_HEAD
    assert peers.apply_news(News("one", state.turn + 600_000_000, front=state.front), ours + 0.6)
    assert peers.apply_news(News("one", state.turn + 700_000_000), ours + 0.7)  # the head of the queue is unchanged
    assert peers.first_head(ours + 0.7) == encode_head(0, AGEING * (ours - 2.0))
    assert peers.first_head(ours + 9.0) == NO_HEAD


def test_departed_gateway_is_dropped_at_once() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    peers.apply_messages({"one": _message(1, a=(1, 0, 0))}, 100.0)
    peers.apply_messages({}, 100.1)
    assert peers.charges_by_instance(100.1) == {}


def test_leftover_fields_in_the_store_are_deleted() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    peers.apply_messages({"one": _message(1)}, 100.0)
    assert (peers.silent_names(160.0), peers.silent_names(160.1)) == ([], ["one"])


def test_invalid_values_are_no_load() -> None:
    peers = Peers("me", ttl_seconds=1.0)
    for message in (
        b"",
        b"\xff",
        b"[]",
        b'{"turn":1,"instances":{"a":[1,-2,3]}}',
        b'{"turn":1,"instances":{"a":[1,2]}}',
    ):
        assert decode_state(message) is None
        peers.apply_messages({"one": message}, 100.0)
        assert (peers.charges_by_instance(100.0), peers.count_current(100.0)) == ({}, 0)


def test_unknown_fields_of_later_versions_are_ignored() -> None:
    assert decode_state(b'{"turn":1,"instances":{"a":[1,2,3]},"more":[]}') == GatewayState(1, {"a": (1, 2, 3)})


def test_gateway_with_the_first_name_gives_the_roles() -> None:
    roles = {"10.0.0.1:7100": "prefill"}
    messages = {
        "b": encode_state(GatewayState(1, roles=roles)),
        "c": encode_state(GatewayState(1, roles={"x": "decode"})),
    }
    follower, leader = Peers("d", ttl_seconds=1.0), Peers("a", ttl_seconds=1.0)
    for peers in (follower, leader):
        peers.apply_messages(messages, 100.0)
    assert follower.leader_roles(100.5) == roles
    assert leader.leader_roles(100.5) is None
    assert follower.leader_roles(102.0) is None  # the others are gone
