"""The fits to published figures."""

from __future__ import annotations

import pytest

from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES, Figure, published


@pytest.mark.parametrize("figure", list(published()), ids=lambda figure: f"{figure.machine}, {figure.what}")
def test_fit_is_within_seven_percent_of_the_published_figure(figure: Figure) -> None:
    assert abs(figure.error) <= 0.07


def test_every_machine_is_fitted_to_something() -> None:
    assert {figure.machine for figure in published()} == set(MACHINES)


def test_a3_decoder_makes_most_at_eight_sequences() -> None:
    machine = MACHINES["kimi-k2-thinking-a3"]
    rates = {number: number / machine.cost.decode(number, 0) for number in range(1, machine.decode.max_num_seqs + 1)}
    assert max(rates, key=lambda number: rates[number]) == 8
    assert machine.cost.knee_rate(machine.decode.max_num_seqs, 0) == pytest.approx(91, abs=2)
    assert rates[12] == pytest.approx(54, abs=2)


def test_machine_without_step_time_has_no_knee() -> None:
    assert Cost().knee_rate(8, 100) == float("inf")
