"""Learning policies do no harm on any engines and loads, compared with `least_tokens`.

Equal answers with Poisson arrivals are `vllm bench serve --ignore-eos --request-rate`. Similar answers in a closed loop
are `sglang.bench_serving --max-concurrency`, and all requests at once are its default.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.lab.replay.no_harm import ARRIVALS, LENGTHS, Outcome, World, compared

FLEETS = ((2, 2), (2, 8), (1, 1), (4, 1))
AT_MOST = 1.1
"""Maximum ratio of a mean to that with `least_tokens`."""
EQUAL_SECONDS = 0.005
"""Smaller differences of a mean do not count."""


def assert_no_harm(ours: Outcome, plain: Outcome) -> None:
    """Compare a run of the policies under test with one of `least_tokens`."""
    assert ours.served >= plain.served - 0.001
    assert ours.first_token_seconds <= AT_MOST * plain.first_token_seconds + EQUAL_SECONDS


@pytest.mark.covering(
    "step lengths arrivals fleet is_late",
    product(("constant", "linear"), LENGTHS, ARRIVALS, FLEETS, (False, True)),
)
def test_decode_policy_does_no_harm_without_a_saturation_point(
    step: str, lengths: str, arrivals: str, fleet: tuple[int, int], is_late: bool
) -> None:
    prefillers, decoders = fleet
    world = World(
        step=step, lengths=lengths, arrivals=arrivals, prefillers=prefillers, decoders=decoders, is_late=is_late
    )
    assert_no_harm(*compared(world, decode="least_load"))


@pytest.mark.covering("lengths arrivals fleet is_late", product(LENGTHS, ARRIVALS, FLEETS, (False, True)))
def test_decode_policy_does_no_harm_with_a_saturation_point(
    lengths: str, arrivals: str, fleet: tuple[int, int], is_late: bool
) -> None:
    """Requests may wait for their first token, since they get the last one sooner."""
    prefillers, decoders = fleet
    world = World(
        step="kneed", lengths=lengths, arrivals=arrivals, prefillers=prefillers, decoders=decoders, is_late=is_late
    )
    ours, plain = compared(replace(world, requests=600), decode="least_load")
    assert ours.served >= plain.served - 0.001
    assert ours.answer_seconds <= AT_MOST * plain.answer_seconds


@pytest.mark.parametrize("seed", [2, 4])
def test_decode_policy_does_no_harm_near_saturation(seed: int) -> None:
    """The saturation point is found while the decoders have more answers than that already."""
    world = World(step="kneed", lengths="mixed", decoders=4, requests=1200, load=0.95, seed=seed)
    ours, plain = compared(world, decode="least_load")
    assert ours.served >= plain.served
    assert ours.answer_seconds <= AT_MOST * plain.answer_seconds


@pytest.mark.parametrize("lengths", ["similar", "mixed"])
def test_decode_policy_is_better_where_a_saturation_point_matters(lengths: str) -> None:
    world = World(step="kneed", lengths=lengths, decoders=4, requests=1500, load=0.85)
    ours, plain = compared(world, decode="least_load")
    assert ours.served >= plain.served - 0.001
    assert ours.answer_seconds < 0.7 * plain.answer_seconds


def test_decode_policy_keeps_its_throughput_while_many_requests_wait() -> None:
    """Requests beyond the saturation point would delay all others, which would be released in turn."""
    world = World(step="kneed", lengths="similar", max_answers=12, decoders=4, requests=1500, load=0.97)
    ours, plain = compared(world, decode="least_load")
    assert ours.served == plain.served == 1.0
    assert ours.answer_seconds < 0.3 * plain.answer_seconds
