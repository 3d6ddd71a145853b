"""Numbers behind flags: what is one, and what the error says of anything else."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from proxy.tools.flag_numbers import duration_seconds, positive_number, positive_whole_number, whole_number


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole_number, "0", 0),
        (positive_whole_number, "1", 1),
        (duration_seconds, "0", 0.0),
        (duration_seconds, "1e3", 1000.0),
        (positive_number, "0.5", 0.5),
    ],
)
def test_valid_flag_numbers_are_parsed(kind: Callable[[str], float], text: str, value: float) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "texts", "problem"),
    [
        (whole_number, ["-1", "1.5", "some", "", "\u0661"], "must be a whole number, 0 or more"),
        (positive_whole_number, ["0", "-1", "1.5", "some"], "must be a whole number, 1 or more"),
        (
            duration_seconds,
            ["-0.1", "nan", "inf", "1e9", "soon"],
            "must be a number of seconds, 0 or more and below 1e9",
        ),
        (positive_number, ["0", "-1", "nan", "inf", "1e10", "much"], "must be a number above 0 and below 1e9"),
    ],
)
def test_invalid_number_is_reported_with_the_expectation(
    kind: Callable[[str], float], texts: list[str], problem: str
) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError) as raised:
            kind(text)
        assert str(raised.value) == problem
