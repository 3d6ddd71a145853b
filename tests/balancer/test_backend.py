"""Backends are values: an endpoint and its role."""

from __future__ import annotations

from proxy.balancer.backend import Backend, Role


def test_a_backend_is_named_by_its_endpoint() -> None:
    backend = Backend(Role.PREFILL, "10.0.0.1", 7100)
    assert (backend.name, backend.url) == ("10.0.0.1:7100", "http://10.0.0.1:7100")


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert Backend(Role.DECODE, "::1", 7100).url == "http://[::1]:7100"


def test_the_slot_does_not_make_another_backend() -> None:
    one, other = Backend(Role.DECODE, "a", 1, slot=1), Backend(Role.DECODE, "a", 1, slot=2)
    assert one == other
    assert hash(one) == hash(other)
