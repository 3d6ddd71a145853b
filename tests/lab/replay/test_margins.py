"""The table of one policy beside others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab.replay.figures import Case, Run, Slo, figures, margins
from lab.replay.fleet import Fleet, Replay
from lab.replay.trace import Request


@pytest.fixture
def run(replayed: Callable[..., Replay], fleet: Fleet) -> Callable[[str, float], Run]:
    """Return a function that makes a run with this share of answers in time."""

    def run(policy: str, share: float) -> Run:
        late = round(100 * (1 - share))
        requests = [Request(10.0 * number, 1000, 3, ()) for number in range(100)]
        made = replayed(requests)
        for course in made.courses[-late:] if late else ():
            course.first_token_at = course.request.at + 60.0
        return Run(Case("trace", "2P2D"), policy, 0.9, 1, figures(made, fleet, Slo()))

    return run


def test_margin_line_names_best_peer_and_lost_figures(run: Callable[[str, float], Run]) -> None:
    runs = [run("least_load", 0.95), run("today", 0.9), run("dynamo", 1.0), run("llm-d", 0.93)]
    head, line, _, output = margins(runs, "least_load").splitlines()
    words = line.split()
    assert head.split()[:3] == ["trace", "fleet", "load"]
    assert words[:8] == ["trace", "2P2D", "0.9", "94.4", "88.9", "100.0", "dynamo", "-"]
    assert line.rstrip().endswith("in time good")
    assert output.startswith("1 of 1 lines")


def test_differences_of_seeds_are_within_the_slack(run: Callable[[str, float], Run]) -> None:
    runs = [run("least_load", 0.95), run("today", 0.95), run("dynamo", 0.95)]
    _, line, _, output = margins(runs, "least_load").splitlines()
    assert line.split()[-1] == "-"
    assert output.startswith("0 of 1 lines")
