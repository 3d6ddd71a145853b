"""Numbers and flags that clients spell in several ways."""

from __future__ import annotations

import pytest

from proxy.wire.python_json import read_flag, read_whole_number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        ("7", 7),
        (" 7 ", 7),
        (7.0, 7),
        ("7.0", 7),
        (True, 1),
        (str(-(2**63)), -(2**63)),
        (str(2**64 - 1), 2**64 - 1),
        (-(2**70), -(2**70)),
    ],
)
def test_whole_number_may_be_spelled_in_several_ways(value: object, number: int) -> None:
    assert read_whole_number(value) == number
    assert isinstance(read_whole_number(value), int)


@pytest.mark.parametrize("value", [str(-(2**63) - 1), str(2**64), float(2**63), -float(2**63), 1e300])
def test_number_of_more_than_64_bits_stays_as_it_is(value: object) -> None:
    assert read_whole_number(value) is value


@pytest.mark.parametrize("value", [7.5, "7.5", "x", "", None, [], {}, float("inf"), float("-inf"), float("nan")])
def test_other_than_a_whole_number_is_rejected_without_quoting_it(value: object) -> None:
    with pytest.raises(ValueError, match=r"^neither that nor spelled like it$"):
        read_whole_number(value)


@pytest.mark.parametrize(("value", "is_set"), [(True, True), (0, False), ("yes", True), ("off", False), (1.0, True)])
def test_flag_may_be_spelled_in_several_ways(value: object, is_set: bool) -> None:
    assert read_flag(value) is is_set


@pytest.mark.parametrize("value", [2, "x", None, []])
def test_other_than_a_flag_is_rejected(value: object) -> None:
    with pytest.raises(ValueError, match="neither"):
        read_flag(value)
