"""Backends are values: an endpoint and its role."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.common.backend import Backend, Role


def test_backend_name_is_host_and_port() -> None:
    backend = Backend(Role.PREFILL, "10.0.0.1", 7100)
    assert (backend.name, backend.url) == ("10.0.0.1:7100", "http://10.0.0.1:7100")


def test_backend_name_has_ipv6_host_in_brackets() -> None:
    assert Backend(Role.DECODE, "::1", 7100).url == "http://[::1]:7100"


@pytest.mark.parametrize(
    ("host", "other", "are_one"),
    [
        ("localhost", "127.0.0.1", True),
        ("localhost.", "127.0.0.1", True),
        ("::ffff:7f00:1", "localhost", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::1", "localhost", False),  # another process may listen there
        ("127.0.0.2", "localhost", False),
        ("engine", "127.0.0.1", False),
    ],
)
def test_backends_with_two_spellings_of_an_address_are_equal(host: str, other: str, are_one: bool) -> None:
    one, two = Backend(Role.PREFILL, host, 7100), Backend(Role.PREFILL, other, 7100)
    assert (one == two, hash(one) == hash(two), one.place == two.place) == (are_one,) * 3
    assert one.name != two.name
    assert one != Backend(Role.PREFILL, host, 7101)


@pytest.mark.parametrize("more", [{"slot": 2}, {"is_trusted": True}, {"bootstrap_port": 8998}])
def test_backends_are_equal_whatever_their_models_and_rights(more: dict[str, Any]) -> None:
    one, other = Backend(Role.PREFILL, "a", 1), Backend(Role.PREFILL, "a", 1, **more)
    assert one == other
    assert hash(one) == hash(other)
