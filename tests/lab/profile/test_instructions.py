"""Parsing callgrind's files."""

from __future__ import annotations

import pytest

from lab.profile.instructions import instructions


def test_instructions_are_the_totals_of_a_dump() -> None:
    assert instructions("version: 1\nevents: Ir\nfn=(1) main\n1 20\n\ntotals: 1234\n") == 1234


def test_dump_without_totals_is_rejected() -> None:
    with pytest.raises(ValueError, match="no totals"):
        instructions("events: Ir\n")
