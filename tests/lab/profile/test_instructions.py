"""What is read of callgrind's files."""

from __future__ import annotations

import pytest

from lab.profile.instructions import instructions


def test_the_instructions_of_a_part_are_its_totals() -> None:
    assert instructions("version: 1\nevents: Ir\nfn=(1) main\n1 20\n\ntotals: 1234\n") == 1234


def test_a_file_without_totals_is_none_of_callgrinds() -> None:
    with pytest.raises(ValueError, match="no totals"):
        instructions("events: Ir\n")
