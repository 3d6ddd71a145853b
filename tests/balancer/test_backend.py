"""Backends are values: an endpoint and its role."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.balancer.backend import Backend, Role


def test_a_backend_is_named_by_its_endpoint() -> None:
    backend = Backend(Role.PREFILL, "10.0.0.1", 7100)
    assert (backend.name, backend.url) == ("10.0.0.1:7100", "http://10.0.0.1:7100")


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert Backend(Role.DECODE, "::1", 7100).url == "http://[::1]:7100"


@pytest.mark.parametrize("more", [{"slot": 2}, {"trusted": True}, {"bootstrap_port": 8998}])
def test_what_is_known_of_a_backend_does_not_make_it_another(more: dict[str, Any]) -> None:
    one, other = Backend(Role.PREFILL, "a", 1), Backend(Role.PREFILL, "a", 1, **more)
    assert one == other
    assert hash(one) == hash(other)
