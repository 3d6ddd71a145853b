"""Tests of `least_load` for decoders: choice, saturation point and charges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from proxy.balancer.engines import EngineFacts
from proxy.balancer.lease import Lease
from proxy.balancer.pick import PickRequest, PolicyContext
from proxy.balancer.policies.least_decode_seconds import LeastDecodeSeconds
from proxy.balancer.policies.least_tokens import make_policy
from proxy.common.backend import Backend, Load, Role
from proxy.dialects.call import DECODE_OVERHEAD_TOKENS
from proxy.wire.prefix import NO_PREFIX_KEYS
from tests.balancer.conftest import Balancer
from tests.balancer.policies.test_decode_pace import on_an_a3
from tests.balancer.policies.test_least_seconds import Subject


def asking(prompt_tokens: int = 1000, output_tokens: int = 256, prefer: Backend | None = None) -> PickRequest:
    load = Load(DECODE_OVERHEAD_TOKENS, prompt_tokens + output_tokens)
    return PickRequest(load, load, Subject(prompt_tokens, NO_PREFIX_KEYS, output_tokens), preferred_backend=prefer)


class Decoders:
    """Two decoders with the policy."""

    def __init__(self, balancer: Balancer) -> None:
        self.clock = balancer.clock
        self.kv_tokens: int | None = None
        self.others = 0
        self.scoreboard = balancer.scoreboard
        self.policy = LeastDecodeSeconds(
            PolicyContext(
                clock=balancer.clock,
                role=Role.DECODE,
                facts_of_engine=lambda _: EngineFacts(kv_memory_tokens=self.kv_tokens),
                others_running_requests=lambda _: self.others,
            )
        )
        self.pool = balancer.pool(Role.DECODE, self.policy)

    def begin(self, request: PickRequest | None = None) -> Lease:
        """Begin an answer and note its first token."""
        lease = self.pool.make_lease(request or asking()).__enter__()
        lease.confirm_beginning()
        return lease

    def write(self, streams: int, tokens: int = 100, step: Callable[[int], float] = on_an_a3) -> None:
        """Write this number of answers at a time on each of the decoders, as fast as an A3 writes them."""
        leases = [self.begin(asking(prefer=backend)) for backend in self.pool.all_backends() for _ in range(streams)]
        self.clock.now += tokens * step(streams)
        for lease in leases:
            lease.answer_tokens = tokens + 1
            lease.__exit__(None, None, None)

    def teach(self) -> None:
        for _ in range(4):
            for streams in range(1, 13):
                self.write(streams)
        self.clock.now += 1.0
        self.write(1)


@pytest.fixture
def decoders(balancer: Balancer) -> Decoders:
    return Decoders(balancer)


def test_least_load_for_decoders_is_least_decode_seconds() -> None:
    assert isinstance(make_policy("least_load", PolicyContext(role=Role.DECODE)), LeastDecodeSeconds)
    assert not isinstance(make_policy("least_load", PolicyContext(role=Role.PREFILL)), LeastDecodeSeconds)


def test_answer_goes_to_fewest_running_answers_regardless_of_prompt_length(decoders: Decoders) -> None:
    first = decoders.begin(asking(100_000))
    second = decoders.begin(asking(10))
    assert second.backend != first.backend
    third = decoders.begin(asking(10))
    assert third.backend == second.backend, "of equals the one that holds less"
    assert decoders.begin(asking(10)).backend == first.backend


def test_equal_decoders_take_turns(decoders: Decoders) -> None:
    backends = []
    for _ in range(4):
        with decoders.pool.make_lease(asking()) as lease:
            backends.append(lease.backend)
    assert backends[0] != backends[1]
    assert backends[:2] == backends[2:]


@dataclass
class Gaps:
    """Token clock of one answer."""

    timed_gaps: int = 0


@pytest.mark.parametrize("harm", [0.0, 1.0])
def test_harm_of_prompts_is_read_from_the_token_clocks_beside_them(decoders: Decoders, harm: float) -> None:
    def write(seconds: float, share: float = 1.0) -> None:
        decoders.clock.now += seconds
        gaps.timed_gaps += round(10 * share * seconds)

    for _ in range(20):
        gaps = Gaps()
        answer = decoders.pool.make_lease(asking()).__enter__()
        answer.confirm_beginning(gaps)
        write(4.0)
        prompt = replace(asking(prefer=answer.backend), computes_prompt=True)
        with decoders.pool.make_lease(prompt) as lease:
            write(1.0, 1 - harm)
            lease.confirm_beginning()
            write(3.0)
        with decoders.pool.make_lease(prompt):
            write(1.0, 1 - harm)  # the answer ends before the prompt is computed
            answer.answer_tokens = 8 * gaps.timed_gaps
            answer.__exit__(None, None, None)
        decoders.clock.now += 1.0
    assert decoders.policy.append_harm_per_second == pytest.approx(harm, abs=0.1)


def test_token_clocks_of_a_bounded_number_of_answers_are_read(decoders: Decoders) -> None:
    backend = decoders.pool.all_backends()[0]
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(decoders.pool.make_lease(asking(prefer=backend))).confirm_beginning(Gaps())
        assert len(decoders.policy._decoders_by_name[backend.name].timed_answers) == 16
    assert not decoders.policy._decoders_by_name[backend.name].timed_answers


def test_prompt_that_fails_is_no_longer_computed(decoders: Decoders) -> None:
    backend = decoders.pool.all_backends()[0]
    with decoders.pool.make_lease(replace(asking(prefer=backend), computes_prompt=True)):
        assert decoders.policy._decoders_by_name[backend.name].computing_prompts == 1
    assert decoders.policy._decoders_by_name[backend.name].computing_prompts == 0


def test_decoder_at_its_saturation_point_has_no_room(decoders: Decoders) -> None:
    assert decoders.pool.has_room()
    decoders.teach()
    assert decoders.policy.decode_pace.saturation_answers == 8
    assert decoders.policy.learned_max_running(decoders.pool.all_backends()[0]) == 8
    leases = [decoders.begin() for _ in range(15)]
    assert decoders.pool.has_room()
    leases.append(decoders.begin())
    assert not decoders.pool.has_room()
    leases[0].__exit__(None, None, None)
    assert decoders.pool.has_room()
    assert decoders.begin().backend == leases[0].backend


def test_requests_are_spread_when_all_decoders_are_saturated(decoders: Decoders) -> None:
    decoders.teach()
    leases = [decoders.begin() for _ in range(19)]
    counts = [sum(lease.backend == backend for lease in leases) for backend in {lease.backend for lease in leases}]
    assert sorted(counts) == [9, 10]


def test_requests_are_spread_when_all_decoders_reach_the_tried_count(decoders: Decoders) -> None:
    """The decoder that is to have fewer answers does not get all others."""
    for _ in range(10):
        decoders.write(4)
    assert decoders.policy.decode_pace.scout_preferred_answers < 4
    leases = [decoders.begin() for _ in range(60)]
    counts = [sum(lease.backend == backend for lease in leases) for backend in {lease.backend for lease in leases}]
    assert max(counts) <= 31


def test_streams_of_other_workers_count(decoders: Decoders) -> None:
    decoders.others = 7
    for _ in range(10):
        decoders.clock.now += 1.0
        other = decoders.begin()
        decoders.clock.now += 49 * on_an_a3(8)
        other.answer_tokens = 50
        other.__exit__(None, None, None)
    assert decoders.policy.decode_pace.rates_by_bucket[8] == pytest.approx(1 / on_an_a3(8), rel=0.05)


def test_kv_of_answers_is_learned_by_their_token_limits(decoders: Decoders) -> None:
    for _ in range(10):
        decoders.write(1, tokens=100)
    assert decoders.policy.load_of_request(decoders.begin().backend, asking()).kv_tokens == 1101
    assert decoders.policy.load_of_request(decoders.begin().backend, asking(1000, 8192)).kv_tokens == 9192, (
        "another limit"
    )


def test_decoder_without_kv_memory_for_an_answer_has_no_room(decoders: Decoders) -> None:
    decoders.kv_tokens = 40_000
    leases = [decoders.begin(asking(18_000, 100)) for _ in range(4)]
    assert not decoders.pool.has_room()
    leases[3].__exit__(None, None, None)
    assert decoders.pool.has_room()
    assert decoders.begin(asking(18_000, 100)).backend == leases[3].backend


def test_answers_in_prefill_count_for_kv_memory(decoders: Decoders) -> None:
    decoders.kv_tokens = 40_000
    decoders.begin(asking(18_000, 100))
    for _ in range(3):
        assert decoders.pool.has_room()
        decoders.pool.make_lease(asking(18_000, 100)).__enter__()
    assert not decoders.pool.has_room()


def test_idle_decoder_accepts_answer_larger_than_its_memory(decoders: Decoders) -> None:
    decoders.kv_tokens = 1000
    decoders.begin(asking(5000)).__exit__(None, None, None)
    assert decoders.pool.has_room()


def test_failed_answer_is_not_learned(decoders: Decoders) -> None:
    lease = decoders.begin()
    decoders.clock.now += 5.0
    lease.answer_tokens = 50
    lease.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not decoders.policy.decode_pace.sample_count


def test_decoder_in_slow_start_gets_its_share(balancer: Balancer, decoders: Decoders) -> None:
    slow: Backend = decoders.pool.all_backends()[0]
    balancer.put_on_probation(slow)
    with decoders.pool.make_lease(asking()) as lease:
        lease.release_compute()
    leases = [decoders.begin() for _ in range(22)]
    assert sum(lease.backend == slow for lease in leases) <= 3


def test_learned_saturation_point_is_logged_when_it_acts_and_when_it_is_dropped(
    decoders: Decoders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy.balancer")
    decoders.teach()
    assert not caplog.messages, "nothing has waited"
    leases = [decoders.begin() for _ in range(16)]
    for _ in range(3):
        assert not decoders.pool.has_room()
        assert decoders.pool.would_take_now()
    assert [message for message in caplog.messages if "requests wait" in message] == caplog.messages
    assert len(caplog.messages) == 1
    for lease in leases:
        lease.__exit__(None, None, None)
    for _ in range(12):
        decoders.write(8, tokens=50, step=lambda answers: 2.2 * on_an_a3(answers))
    assert decoders.policy.decode_pace.saturation_answers == float("inf")
    assert len(caplog.messages) == 2
    assert "dropped" in caplog.messages[1]


def test_request_waits_at_most_twice_its_gain_from_the_saturation_point(decoders: Decoders) -> None:
    request = asking()
    assert decoders.pool.policy.max_hold_seconds(request, 1) == float("inf"), "nothing is learned"
    decoders.teach()
    assert decoders.pool.policy.max_hold_seconds(request, 1) == float("inf"), "decoders are free"
    for _ in range(16):
        decoders.begin()
    assert not decoders.pool.has_room()
    gain = 101 * (on_an_a3(9) / 9 - on_an_a3(8) / 8)
    for waiting in (2, 20):
        # Without the limit all of them would share the two decoders.
        expected = pytest.approx(2 * gain * (16 + waiting) / 2, rel=0.2)
        assert decoders.pool.policy.max_hold_seconds(request, waiting) == expected
        assert decoders.pool.policy.max_hold_seconds(None, waiting) == expected


def test_would_take_ignores_learned_limits(decoders: Decoders) -> None:
    decoders.kv_tokens = 40_000
    leases = [decoders.begin(asking(18_000, 100)) for _ in range(4)]
    assert not decoders.pool.has_room()
    assert decoders.pool.would_take_now(), "what an answer more will hold is a guess"
    leases += [decoders.begin(asking(18_000, 100)) for _ in range(2)]
    assert not decoders.pool.would_take_now()


def test_earlier_large_answers_do_not_serialize_small_ones(decoders: Decoders) -> None:
    decoders.kv_tokens = 40_000
    for _ in range(50):
        decoders.begin(asking(38_000)).__exit__(None, None, None)
    for _ in range(10):
        assert decoders.pool.has_room()
        decoders.begin(asking(100, 100))


@pytest.mark.parametrize(("lag", "learns"), [(0.0, True), (0.01, True), (0.5, False), (None, False)])
def test_answer_is_not_learned_when_the_event_loop_was_late(
    balancer: Balancer, lag: float | None, learns: bool
) -> None:
    decoders = Decoders(balancer)
    decoders.policy.context.loop_lag_within = lambda began, ended: lag
    decoders.write(1)
    decoders.clock.now += 1.0
    decoders.write(1)
    assert bool(decoders.policy.decode_pace.sample_count) == learns


def test_answer_is_learned_once_the_lag_is_known(decoders: Decoders) -> None:
    lag: float | None = None
    decoders.policy.context.loop_lag_within = lambda began, ended: lag
    decoders.write(1)
    lag = 0.0
    decoders.clock.now += 1.0
    decoders.write(1)
    assert decoders.policy.decode_pace.sample_count >= 2
