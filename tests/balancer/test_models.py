"""Tests of instances whose models do not match the others."""

from __future__ import annotations

from proxy.balancer.models import minority_instances
from proxy.common.backend import Backend, Role

P, D1, D2 = Backend(Role.PREFILL, "p", 1), Backend(Role.DECODE, "d", 1), Backend(Role.DECODE, "d", 2)


def test_no_minority_when_all_serve_the_same() -> None:
    assert minority_instances({}) == {}
    assert minority_instances({P: frozenset("ab"), D1: frozenset("ab"), D2: frozenset("ba")}) == {}


def test_minority_is_the_smaller_group() -> None:
    assert set(minority_instances({P: frozenset("x"), D1: frozenset("a"), D2: frozenset("a")})) == {P}


def test_minority_of_two_is_the_second() -> None:
    ((odd, hint),) = minority_instances({P: frozenset(["kimi_k26"]), D1: frozenset(["other_name"])}).items()
    assert odd == D1
    assert hint == (
        "serves 'other_name', and prefill instance p:1 serves 'kimi_k26': a request for what only one of them serves "
        "fails at the other"
    )


def test_long_and_many_names_are_shortened() -> None:
    many = frozenset({"a\nb", "x" * 1000, *"cdefgh"})
    ((_, hint),) = minority_instances({P: frozenset("a"), D1: many}).items()
    assert "\n" not in hint
    assert "and 5 others" in hint
    assert len(hint) < 400
