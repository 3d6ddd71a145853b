"""Tests of local prefill: learned times of decoders and handoffs, and the limits of decoders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.balancer.engines import EngineFacts
from proxy.balancer.local_prefill import DOUBT_SECONDS, FirstToken, LocalChoice, LocalPrefill
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.prefill_cost import make_prompt_costs
from proxy.balancer.policies.prefiller import write_cache_count
from proxy.balancer.policies.prefixes import CacheCount
from proxy.balancer.shared.journal import Journal
from proxy.common.backend import Backend, Load
from tests.balancer.conftest import Balancer
from tests.balancer.policies.test_least_seconds import PIECE, Prefillers, prompt

MOST = 4096


class Fleet:
    """Prefillers that take 1 ms per token, and decoders. A handoff takes 0.2 s."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.prefillers = Prefillers(balancer)
        self.prefillers.teach()
        self.decoders = balancer.decoders
        self.journal = Journal(workers=1, write_only_rings=1)
        self.local = LocalPrefill(self.prefillers.pool, self.decoders, self.journal.writer_for(0))
        self.first, self.second = self.decoders.eligible_backends()

    def hand_off(self, request: PickRequest, decoder: Backend | None = None, seconds: float | None = 0.2) -> None:
        first_token = None if seconds is None else FirstToken(self.balancer.clock.now, seconds)
        self.local.learn_from_handoff((decoder or self.first).name, make_prompt_costs(request), first_token, 100)

    def faster_decoder(self, request: PickRequest, max_tokens: int = MOST) -> Backend | None:
        choice = self.local.find_faster_decoder(make_prompt_costs(request), max_tokens)
        return None if choice is None else choice.decoder

    def begin_answers(self) -> None:
        """Let each decoder write an answer."""
        for backend in (self.first, self.second):
            self.decoders.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=backend)).__enter__()

    def serve(
        self,
        request: PickRequest,
        seconds: float,
        told: tuple[int, int] | None,
        *,
        decoder: Backend | None = None,
        instead_seconds: float = 100.0,
        is_idle: bool = True,
    ) -> None:
        """Let a decoder compute a prompt, for which a prefiller would have taken `instead_seconds`."""
        backend = decoder or self.first
        choice = LocalChoice(
            decoder=backend,
            prompt_costs=make_prompt_costs(request),
            is_decoder_idle=is_idle,
            harm_per_second=0.0,
            prefiller_seconds=instead_seconds,
        )
        self.local.learn_from_local_prefill(backend.name, choice, FirstToken(self.balancer.clock.now, seconds), 1, told)

    def trust(self, decoder: Backend) -> None:
        """Let a decoder report the expected cached tokens, until they are trusted."""
        for _ in range(20):
            uncached = TURN.prompt_tokens - 19 * PIECE
            self.serve(TURN, 1.0, (TURN.prompt_tokens, TURN.prompt_tokens - uncached), decoder=decoder)

    def learn(self, seconds_per_token: float) -> None:
        """Teach the prefill time of decoders."""
        for number in range(40):
            tokens = 100 * (1 + number % 9)
            short = PickRequest(Load(), Load(), prompt(10**8 + number).request_subject)
            self.serve(short, 0.02 + tokens * seconds_per_token, (tokens, 0))


@pytest.fixture
def fleet(balancer: Balancer) -> Fleet:
    return Fleet(balancer)


TURN = prompt(*range(1, 20), 99)  # a decoder has cached all but the last piece


def test_next_turn_goes_to_the_decoder_of_the_previous_turn(fleet: Fleet) -> None:
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    # The decoder with the cached prefix takes about 1 s, and any prefiller 10 s.
    assert fleet.faster_decoder(TURN) == fleet.second
    assert fleet.faster_decoder(prompt(*range(500, 520))) is None


def test_faster_prefiller_with_cached_prefix_is_preferred(fleet: Fleet) -> None:
    fleet.learn(0.005)
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    fleet.prefillers.serve(prompt(*range(1, 20)))
    for _ in range(30):  # the expected cache hits are confirmed
        fleet.prefillers.serve(prompt(*range(1, 20)), cached=19 * PIECE - 1)
    assert fleet.faster_decoder(TURN) is None
    fleet.prefillers.begin(prompt(*range(3000, 3050)))
    fleet.prefillers.begin(prompt(*range(4000, 4050)))  # now it would have to wait
    assert fleet.faster_decoder(TURN) == fleet.second


@pytest.mark.parametrize(("seconds_per_token", "is_faster"), [(0.0005, True), (0.01, False)])
def test_short_prompts_go_to_decoders_faster_than_a_handoff(
    fleet: Fleet, seconds_per_token: float, is_faster: bool
) -> None:
    fleet.hand_off(prompt(8))
    fleet.learn(seconds_per_token)
    assert (fleet.faster_decoder(prompt(7)) is not None) is is_faster


def test_no_local_prefill_before_the_first_handoff(fleet: Fleet) -> None:
    fleet.learn(0.0001)
    fleet.hand_off(prompt(*range(1, 20)), seconds=None)
    assert fleet.faster_decoder(TURN) is None
    fleet.hand_off(prompt(*range(1, 20)))
    assert fleet.faster_decoder(TURN) is not None


def test_no_local_prefill_for_restricted_or_unknown_requests(fleet: Fleet) -> None:
    fleet.learn(0.0001)
    fleet.hand_off(prompt(*range(1, 20)))
    assert fleet.faster_decoder(TURN) == fleet.first
    assert fleet.faster_decoder(replace(TURN, avoided_backends=[fleet.second])) is None
    assert (
        fleet.faster_decoder(PickRequest(TURN.prefill_load, TURN.decode_load, TURN.request_subject, (), fleet.second))
        is None
    )
    assert fleet.faster_decoder(PickRequest.make_for_load(Load(1, 1))) is None


def test_no_local_prefill_without_predictions_of_prefillers(fleet: Fleet, balancer: Balancer) -> None:
    local = LocalPrefill(balancer.prefillers, fleet.decoders)  # this policy predicts no seconds
    local.learn_from_handoff(fleet.first.name, make_prompt_costs(prompt(*range(1, 20))), FirstToken(0.0, 5.0), 100)
    assert local.find_faster_decoder(make_prompt_costs(TURN), MOST) is None


def test_busier_decoder_computes_fewer_prompts(fleet: Fleet) -> None:
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.first)
    fleet.trust(fleet.first)
    leases = []
    while fleet.faster_decoder(TURN) is not None:
        for backend in (fleet.first, fleet.second):
            lease = fleet.decoders.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=backend))
            lease.__enter__()
            leases.append(lease)
    # 1 s becomes more than the 10 s of a prefiller.
    assert 2 * 50 < len(leases) < 2 * 100
    for lease in leases:
        lease.__exit__(None, None, None)


@pytest.mark.interpreted
@pytest.mark.parametrize("bound", ["limit", "knee", "memory"])
def test_no_local_prefill_on_a_full_decoder(fleet: Fleet, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.learn(0.0001)
    fleet.hand_off(prompt(*range(1, 20)))
    with fleet.decoders.make_lease(PickRequest.make_for_load(Load(1, 1000), preferred_backend=fleet.first)):
        assert fleet.faster_decoder(TURN) == fleet.first
        if bound == "limit":
            monkeypatch.setattr(fleet.decoders, "running_limit", lambda _: 1)
        elif bound == "knee":
            monkeypatch.setattr(fleet.decoders.policy, "learned_max_running", lambda _: 1)
        else:
            tokens = TURN.decode_load.kv_tokens + 1000
            fleet.decoders.health.on_probe(fleet.first, True, "200")
            fleet.decoders.health.set_engine_facts(fleet.first, EngineFacts(kv_memory_tokens=tokens))
        assert fleet.faster_decoder(TURN) != fleet.first


def test_decoder_that_was_gone_has_an_empty_cache(fleet: Fleet, balancer: Balancer) -> None:
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    balancer.eject(fleet.second)
    assert fleet.faster_decoder(TURN) is None
    balancer.clock.now += 1.2 * balancer.checks.eject_seconds
    with fleet.decoders.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=fleet.second)):
        pass
    assert fleet.faster_decoder(TURN) is None


def test_local_prefill_is_limited_to_twice_the_proven_tokens(fleet: Fleet) -> None:
    fleet.begin_answers()
    for pieces in (1, 2, 4, 8):
        cold = prompt(*range(1000 * pieces, 1000 * pieces + pieces))
        fleet.hand_off(prompt(*range(1, 20)))
        fleet.prefillers.begin(prompt(*range(5000, 5050)))
        fleet.prefillers.begin(prompt(*range(6000, 6050)))  # 25 s of work each
        assert fleet.faster_decoder(prompt(*range(7000, 7000 + 2 * pieces))) is None
        assert fleet.faster_decoder(cold) is not None
        fleet.serve(cold, 0.1, (cold.prompt_tokens, 0))
    assert fleet.faster_decoder(prompt(*range(7000, 7009))) is None  # more than 4,096 tokens
    assert fleet.faster_decoder(prompt(*range(7000, 7009)), 5000) is not None


def test_unreported_cache_is_inferred_from_the_prefill_time(fleet: Fleet) -> None:
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.first)
    for _ in range(10):
        fleet.serve(TURN, 1.1, None)
    assert fleet.faster_decoder(TURN) == fleet.first
    for _ in range(10):
        fleet.serve(TURN, 30.0, None)
    assert fleet.faster_decoder(TURN) is None


def test_reported_cache_misses_lower_the_trust(fleet: Fleet) -> None:
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.first)
    for _ in range(10):
        fleet.serve(TURN, 20.0, (TURN.prompt_tokens, 0))
    assert fleet.faster_decoder(TURN) is None


def test_reported_cleared_cache_of_a_decoder_is_applied(fleet: Fleet) -> None:
    events = fleet.journal.writer_for(1)
    events.write_record(b"what is not of caches")
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    for cleared, decoder in ((3, fleet.second), (4, None)):
        for backend in (fleet.first, fleet.second):
            write_cache_count(
                events,
                backend.slot,
                CacheCount(stored_tokens=20_000, reach_tokens=10**6, has_evicted=0, cleared_at_tokens=cleared),
            )
        assert fleet.faster_decoder(TURN) == decoder


def test_reported_evictions_of_a_decoder_are_applied(fleet: Fleet) -> None:
    fleet.learn(0.002)
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    write_cache_count(
        fleet.journal.writer_for(1),
        fleet.second.slot,
        CacheCount(stored_tokens=20_000, reach_tokens=500, has_evicted=1, cleared_at_tokens=0),
    )
    assert fleet.faster_decoder(TURN) is None


@pytest.mark.parametrize(("seconds", "is_kept"), [(10.5, True), (12.0, False)])
def test_local_prefill_pauses_when_decoders_were_slower(
    fleet: Fleet, seconds: float, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    for _ in range(8):
        assert fleet.faster_decoder(TURN) == fleet.second
        fleet.serve(TURN, seconds, (TURN.prompt_tokens, TURN.prompt_tokens), decoder=fleet.second, instead_seconds=10.0)
    assert (fleet.faster_decoder(TURN) == fleet.second) is is_kept
    assert ["skip_prefill" in message for message in caplog.messages] == [True] * (not is_kept)
    fleet.balancer.clock.now += DOUBT_SECONDS + 1
    assert fleet.faster_decoder(TURN) == fleet.second
    if not is_kept:  # the next pause is longer
        for _ in range(8):
            fleet.serve(TURN, 12.0, (TURN.prompt_tokens, TURN.prompt_tokens), instead_seconds=10.0)
        fleet.balancer.clock.now += DOUBT_SECONDS + 1
        assert fleet.faster_decoder(TURN) is None


def test_stalled_answers_count_as_cost_of_a_local_prefill(fleet: Fleet) -> None:
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    for _ in range(4):
        fleet.decoders.make_lease(PickRequest.make_for_load(Load(1, 1), preferred_backend=fleet.second)).__enter__()
    choice = fleet.local.find_faster_decoder(make_prompt_costs(TURN), MOST)
    assert choice is not None
    assert choice.harm_per_second == 0.5
    for _ in range(8):
        first_token = FirstToken(fleet.balancer.clock.now, 0.8 * choice.prefiller_seconds)
        fleet.local.learn_from_local_prefill(fleet.second.name, choice, first_token, 1, None)
    assert fleet.faster_decoder(TURN) is None


def test_idle_decoder_may_compute_longer_prompts_than_proven(fleet: Fleet) -> None:
    fleet.hand_off(prompt(*range(1, 20)))
    fleet.prefillers.begin(prompt(*range(5000, 5050)))
    fleet.prefillers.begin(prompt(*range(6000, 6050)))
    assert fleet.faster_decoder(prompt(*range(7000, 7008))) is not None
    assert fleet.faster_decoder(prompt(*range(7000, 7009))) is None
    fleet.begin_answers()
    assert fleet.faster_decoder(prompt(*range(7000, 7008))) is None


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("learned", "careful", "harm"), [(None, True, 2.0), (None, False, 0.5), (0.5, True, 1.0), (0.5, False, 1.0)]
)
def test_harm_to_running_answers_is_the_learned_one_or_assumed(
    fleet: Fleet, learned: float | None, careful: bool, harm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(fleet.decoders.policy), "append_harm_per_second", learned)
    fleet.hand_off(prompt(*range(1, 20)))
    fleet.prefillers.begin(prompt(*range(5000, 5050)))
    fleet.prefillers.begin(prompt(*range(6000, 6050)))
    for _ in range(4):
        fleet.begin_answers()
    choice = fleet.local.find_faster_decoder(make_prompt_costs(TURN), MOST, is_cautious=careful, must_queue=careful)
    assert choice is not None
    assert choice.harm_per_second == harm


def test_wait_for_the_steps_of_running_answers_is_learned_apart(fleet: Fleet) -> None:
    fleet.hand_off(prompt(8), seconds=5.0)
    one = prompt(1)
    for _ in range(20):
        fleet.serve(one, 0.3, (one.prompt_tokens, 0))
    own = fleet.local.prefill_cost.predict_seconds(one.prompt_tokens, 0)
    for _ in range(40):
        fleet.serve(one, 0.8, (one.prompt_tokens, 0), is_idle=False)
    assert fleet.local.prefill_cost.predict_seconds(one.prompt_tokens, 0) < 1.5 * own
    assert fleet.faster_decoder(prompt(2)) is not None
    fleet.hand_off(prompt(8), seconds=0.01)
    fleet.local.handoff_seconds = 0.01
    assert fleet.faster_decoder(prompt(3)) is not None  # an idle decoder makes no prompt wait
    fleet.begin_answers()
    assert fleet.faster_decoder(prompt(4)) is None


def test_queued_prompts_count_for_a_decoder(fleet: Fleet) -> None:
    fleet.hand_off(prompt(8))
    for _ in range(4):
        fleet.begin_answers()
    short = prompt(1)
    assert fleet.faster_decoder(short) is None
    waiting = [prompt(10**6 + number) for number in range(8)]
    for each in waiting:
        fleet.prefillers.pool.predict_work_seconds(each)
    assert fleet.faster_decoder(short) is not None
    for each in waiting:
        fleet.prefillers.pool.on_left_queue(each)
    assert fleet.faster_decoder(short) is None


def test_longer_prompts_require_faster_shorter_ones(fleet: Fleet) -> None:
    fleet.begin_answers()
    fleet.hand_off(prompt(8), seconds=1.0)
    two, cold = prompt(*range(1000, 1002)), prompt(*range(2000, 2002))
    one = prompt(1)
    fleet.serve(one, 0.2, (one.prompt_tokens, 0), instead_seconds=0.1)
    assert fleet.faster_decoder(two) is None
    fleet.serve(one, 0.2, (one.prompt_tokens, 0), instead_seconds=0.3)
    assert fleet.faster_decoder(cold) is not None


def test_late_first_tokens_are_not_learned(fleet: Fleet) -> None:
    fleet.hand_off(prompt(8))
    context = fleet.prefillers.policy.context
    lag: float | None = 0.2
    context.loop_lag_within = lambda began, ended: lag
    one = prompt(1)
    for _ in range(8):
        fleet.hand_off(prompt(8), seconds=0.4)
        fleet.serve(one, 20.0, (one.prompt_tokens, 0), instead_seconds=0.1)
    assert (fleet.local.handoff_seconds, fleet.local.prefill_cost.sample_count) == (0.2, 0)
    assert fleet.faster_decoder(one) is not None
    lag = None  # the lag is unknown
    fleet.hand_off(prompt(8), seconds=0.4)
    assert fleet.local.handoff_seconds == 0.2
    lag = 0.0
    fleet.faster_decoder(one)
    assert fleet.local.handoff_seconds > 0.2


def queue(fleet: Fleet, count: int) -> None:
    """Let prompts wait in the queue, each of which takes a prefiller about 1 s."""
    for number in range(count):
        fleet.prefillers.pool.predict_work_seconds(prompt(10**6 + number, 10**7 + number))


def test_turn_skips_the_queue_when_its_decoder_is_sooner(fleet: Fleet) -> None:
    fleet.learn(0.005)
    fleet.hand_off(prompt(*range(1, 20)), fleet.second)
    fleet.prefillers.serve(prompt(*range(1, 20)))
    for _ in range(30):  # the expected cache hits are confirmed
        fleet.prefillers.serve(prompt(*range(1, 20)), cached=19 * PIECE - 1)
    assert not fleet.local.skips_queue(TURN, MOST)  # a prefiller has the same prefix, and nothing waits
    queue(fleet, 20)
    assert fleet.local.skips_queue(TURN, MOST)
    choice = fleet.local.find_faster_decoder(make_prompt_costs(TURN), MOST)
    assert choice is not None
    assert choice.decoder == fleet.second
    assert fleet.faster_decoder(prompt(*range(500, 520))) is None  # the decision was for one request


def test_decoder_is_not_chosen_when_only_queued_requests_gain(fleet: Fleet) -> None:
    fleet.hand_off(prompt(8))
    fleet.learn(0.01)
    queue(fleet, 20)
    assert fleet.faster_decoder(prompt(1)) is None
