"""Tests of `least_load` for prefillers: choice, charges, learning and the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest

from proxy.balancer.lease import Lease
from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
from proxy.balancer.policies.least_seconds import LeastSeconds
from proxy.balancer.policies.prefill_cost import PrefillSample, PrefillStep, make_prompt_costs
from proxy.balancer.policies.prefiller import Prefiller, write_cache_count
from proxy.balancer.policies.prefixes import CacheCount
from proxy.balancer.shared.journal import Journal
from proxy.common.backend import Backend, Load, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.dialects.call import PREFILL_OVERHEAD_TOKENS
from proxy.wire.prefix import PrefixKeys
from tests.balancer.conftest import Balancer

PIECE = 512


@dataclass(frozen=True)
class Subject:
    prompt_tokens: int
    prefix_keys: PrefixKeys
    output_tokens: int = 256
    session_id: str | None = None
    first_token_seconds: float | None = None

    def request_texts(self) -> None:
        return None

    def requested_priority(self, *, is_lower_first: bool) -> None:
        return None


def prompt(*pieces: int, session: str | None = None, has_keys: bool = True) -> PickRequest:
    """Return a request with pieces of 512 tokens. Prompts share a prefix up to their first different piece."""
    tokens = PIECE * len(pieces)
    sizes = tuple(4 * PIECE * (place + 1) for place in range(len(pieces)))
    load = Load(tokens + PREFILL_OVERHEAD_TOKENS, tokens)
    keys = PrefixKeys(pieces, sizes) if has_keys else PrefixKeys()
    return PickRequest(load, Load(0, tokens), Subject(tokens, keys, session_id=session))


class Prefillers:
    """Two prefillers with the policy. Engines take 1 ms per token and report cached tokens."""

    def __init__(
        self, balancer: Balancer, max_running: int | None = None, *, worker: int = 0, journal: Journal | None = None
    ) -> None:
        self.clock = balancer.clock
        seat = None if journal is None else journal.writer_for(worker)
        self.policy = LeastSeconds(PolicyContext(worker, clock=balancer.clock, journal_writer=seat))
        self.pool = balancer.pool(Role.PREFILL, self.policy, max_running, load_row=balancer.scoreboard.load_row(worker))
        self.scoreboard = balancer.scoreboard
        self.roster = balancer.roster
        self.health = balancer.health

    @property
    def candidates(self) -> Sequence[Candidate]:
        self.pool.all_backends()
        return self.pool._chooser.candidates

    @property
    def states(self) -> list[Prefiller]:
        """States of the prefillers that were chosen, in this order."""
        return list(self.policy._prefillers.prefillers_by_key.values())

    def begin(self, request: PickRequest) -> Lease:
        return self.pool.make_lease(request).__enter__()

    def serve(self, request: PickRequest, *, cached: int | None = 0, seconds: float | None = None) -> Backend:
        """Serve a request while no other one is in flight, and return its backend."""
        with self.pool.make_lease(request) as lease:
            uncached = request.prompt_tokens - (cached or 0)
            self.clock.now += uncached / 1000 if seconds is None else seconds
            lease.record_usage(request.prompt_tokens, cached)
            lease.release_compute()
            return lease.backend

    def teach(self) -> None:
        for number in range(40):
            self.serve(prompt(*range(start := 10**9 + 1000 * number, start + 2 + number % 9)))


def one_at_a_time(prefillers: Prefillers) -> None:
    """Teach that all prefillers compute one prompt after the other."""
    for prefiller in prefillers.states:
        for number in range(20):
            tokens = 1000.0 + 500 * (number % 5)
            sample = PrefillSample(tokens, 0.0, tokens / 1000, 3.0, 1.0, 0.0, 0.0)
            if prefiller.concurrency_estimate.target_in_flight > 1:
                prefiller.concurrency_estimate.learn_from_sample(sample)
        assert prefiller.concurrency_estimate.target_in_flight == 1


@pytest.fixture
def prefillers(balancer: Balancer) -> Prefillers:
    return Prefillers(balancer)


def test_prompt_goes_to_the_prefiller_with_its_cached_prefix(prefillers: Prefillers) -> None:
    first = prefillers.serve(prompt(1, 2, 3, 4))
    for tail in range(10, 20):
        assert prefillers.serve(prompt(1, 2, 3, tail), cached=3 * PIECE) == first


def test_burst_with_one_prefix_spills_over_when_the_queue_costs_more(
    prefillers: Prefillers,
) -> None:
    prefillers.teach()
    first = prefillers.serve(prompt(*range(1, 20)))
    chosen = [prefillers.begin(prompt(*range(1, 20), 100 + number)).backend for number in range(11)]
    assert chosen[:2] == [first, first]
    assert len(set(chosen)) == 2


@pytest.mark.parametrize("has_keys", [True, False])
def test_session_selects_the_same_of_equal_prefillers(prefillers: Prefillers, has_keys: bool) -> None:
    def whose(number: int) -> Backend:
        # The prefixes are unknown, as in a gateway that did not serve the earlier turns.
        pieces = range(start := next(fresh), start + 4)
        return prefillers.serve(prompt(*pieces, session=f"session {number}", has_keys=has_keys))

    fresh = iter(range(10**6, 10**7, 100))
    first = [whose(number) for number in range(11)]
    assert len(set(first)) == 2
    assert [whose(number) for number in range(11)] == first


def test_cached_prefix_outweighs_session(prefillers: Prefillers) -> None:
    prefillers.teach()
    first = prefillers.serve(prompt(1, 2, 3, 4))
    for number in range(6):
        assert prefillers.serve(prompt(1, 2, 3, 9, session=f"{number}"), cached=3 * PIECE) == first


def test_uncached_work_is_charged_and_released_exactly(prefillers: Prefillers) -> None:
    prefillers.teach()
    cold = prefillers.begin(prompt(1, 2, 3, 4, 5, 6, 7, 8))
    charged = prefillers.scoreboard.load_of(cold.backend.slot).compute_tokens
    cold.record_usage(8 * PIECE, 0)
    prefillers.clock.now += 4.0
    cold.release_compute()
    cold.__exit__(None, None, None)
    warm = prefillers.begin(prompt(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert warm.backend == cold.backend
    assert prefillers.scoreboard.load_of(warm.backend.slot).compute_tokens < 0.7 * charged
    warm.__exit__(None, None, None)
    assert {prefillers.scoreboard.load_of(slot) for slot in range(4)} == {Load()}


def test_request_without_subject_is_charged_its_load(prefillers: Prefillers) -> None:
    load = Load(12_345, 678)
    with prefillers.pool.make_lease(PickRequest.make_for_load(load)) as lease:
        assert prefillers.scoreboard.load_of(lease.backend.slot) == load


def test_failed_prompt_is_not_expected_in_the_cache(prefillers: Prefillers) -> None:
    with pytest.raises(RuntimeError), prefillers.pool.make_lease(prompt(1, 2, 3)) as lease:
        raise RuntimeError
    cached = prefillers.policy._prefillers.prefiller_of(lease.backend).cached_prefixes
    assert cached.count_cached_pieces([1, 2, 3]) == 0


def test_predictions_are_learned_from_answers(prefillers: Prefillers) -> None:
    prefillers.teach()
    assert prefillers.pool.predict_work_seconds(prompt(*range(5, 25))) == pytest.approx(10.24, rel=0.15)


def test_waiting_time_is_not_learned_as_prefill_time(prefillers: Prefillers) -> None:
    prefillers.teach()
    leases = [prefillers.begin(prompt(*range(100 * number, 100 * number + 8))) for number in range(8)]
    by_backend: dict[Backend, list[Lease]] = {}
    for lease in leases:
        by_backend.setdefault(lease.backend, []).append(lease)
    for pair in zip(*by_backend.values(), strict=True):
        prefillers.clock.now += 8 * PIECE / 1000
        for lease in pair:
            lease.record_usage(8 * PIECE, 0)
            lease.release_compute()
            lease.__exit__(None, None, None)
    assert prefillers.pool.predict_work_seconds(prompt(*range(5000, 5008))) == pytest.approx(4.1, rel=0.15)


def test_prefiller_has_room_when_its_work_is_almost_done(prefillers: Prefillers) -> None:
    prefillers.teach()
    for _ in range(20):
        burst(prefillers, together=False)
    one_at_a_time(prefillers)
    assert prefillers.pool.has_room()
    for number in (1, 2):
        prefillers.begin(prompt(*range(100 * number, 100 * number + 8)))
    assert not prefillers.pool.has_room()
    prefillers.clock.now += 3.5
    assert not prefillers.pool.has_room()


@pytest.mark.parametrize(("max_running", "more"), [(None, 100), (1, 0)])
def test_no_queueing_until_the_order_of_prompts_is_known(
    balancer: Balancer, max_running: int | None, more: int
) -> None:
    prefillers = Prefillers(balancer, max_running)
    prefillers.teach()
    leases: list[Lease] = []
    while prefillers.pool.has_room() and len(leases) < 102:
        leases.append(prefillers.begin(prompt(start := 10**9 + 100 * len(leases), start + 1)))
    assert len(leases) == 2 + more


def test_waiting_request_is_overtaken_by_one_that_suits_the_free_prefiller(prefillers: Prefillers) -> None:
    prefillers.teach()
    one_at_a_time(prefillers)
    hot = [prompt(*range(1, 30), 100 + number) for number in range(3)]
    cold = prompt(*range(500, 504))
    busy = prefillers.serve(prompt(*range(1, 30)))
    lease = prefillers.begin(hot[0])
    assert lease.backend == busy
    assert prefillers.pool.index_to_admit([hot[1]]) is None
    assert prefillers.pool.index_to_admit([hot[1], cold]) == 1
    assert prefillers.begin(cold).backend != busy


def test_queue_for_one_cache_moves_to_a_free_prefiller(prefillers: Prefillers) -> None:
    prefillers.teach()
    one_at_a_time(prefillers)
    prefillers.serve(prompt(*range(1, 5)))
    prefillers.begin(prompt(*range(1, 5), 99))
    waiting = [prompt(*range(1, 5), *range(1000 * number, 1000 * number + 6)) for number in range(10)]
    assert prefillers.pool.index_to_admit(waiting) is not None


def test_decoders_are_charged_in_tokens(balancer: Balancer) -> None:
    pool = balancer.pool(Role.DECODE, "least_load")
    first = pool.make_lease(prompt(1, 2, 3, 4)).__enter__()
    assert balancer.scoreboard.load_of(first.backend.slot) == Load(0, 4 * PIECE)
    assert pool.make_lease(prompt(1, 2)).__enter__().backend != first.backend
    assert pool.has_room()
    assert pool.index_to_admit([prompt(1)]) == 0


def test_overdue_prefiller_is_avoided(prefillers: Prefillers) -> None:
    prefillers.teach()
    stuck = prefillers.begin(prompt(*range(1, 9))).backend
    prefillers.clock.now += 60.0
    assert prefillers.begin(prompt(*range(1, 8), 50)).backend != stuck


@pytest.fixture
def workers() -> list[Prefillers]:
    """Two workers of one gateway."""
    balancer, journal = Balancer(), Journal(workers=2)
    return [Prefillers(balancer, worker=worker, journal=journal) for worker in range(2)]


def test_conversation_follows_the_choice_of_another_worker(workers: list[Prefillers]) -> None:
    for number in range(20):
        pieces = range(1000 * number, 1000 * number + 8)
        first = workers[number % 2].serve(prompt(*pieces))
        assert workers[1 - number % 2].serve(prompt(*pieces, 10**8), cached=8 * PIECE) == first


def test_workers_share_an_instance_that_came_back_in_another_slot(workers: list[Prefillers]) -> None:
    one, other = workers
    back = one.pool.all_backends()[0]
    assert other.serve(prompt(7)).port in (1, 2)
    roster = one.roster
    assert roster.remove_backend(Role.PREFILL, back.host, back.port)
    assert roster.drop_drained_backends() == [back]
    for port in (3, back.port):  # the first of them takes its slot
        added = Backend(Role.PREFILL, back.host, port)
        assert roster.add_for_administrator(added)
        for worker in workers:
            assert added in worker.pool.all_backends()
            worker.health.on_probe(added, True, "test")
            assert added in worker.pool.eligible_backends()
            worker.serve(prompt(port))
    assert one.pool.all_backends()[-1] == back
    one.clock.now += 60.0  # slow start is over
    pieces = range(500, 508)
    assert one.serve(replace(prompt(*pieces), preferred_backend=back)) == back
    assert other.serve(prompt(*pieces, 509), cached=8 * PIECE) == back


def test_workers_learn_the_same_values(workers: list[Prefillers]) -> None:
    one, other = workers
    candidates = other.candidates
    for number in range(40):
        one.serve(prompt(*range(start := 10**9 + 1000 * number, start + 2 + number % 9)))
        other.policy._prefillers.prefillers_of(candidates)  # applies the records
    failed = one.begin(prompt(7, 8, 9))
    failed.__exit__(RuntimeError, RuntimeError(), None)
    for place in range(20):
        one.serve(prompt(*range(1, 6)), cached=0 if place else None)
    assert other.pool.predict_work_seconds(prompt(*range(50, 70))) == pytest.approx(10.24, rel=0.2)
    for mine, its in zip(
        one.policy._prefillers.prefillers_of(candidates),
        other.policy._prefillers.prefillers_of(candidates),
        strict=True,
    ):
        assert (
            its.cached_prefixes.count_cached_pieces([7, 8, 9])
            == mine.cached_prefixes.count_cached_pieces([7, 8, 9])
            == 0
        )
        assert its.cached_prefixes.count_cached_pieces(range(1, 6)) == mine.cached_prefixes.count_cached_pieces(
            range(1, 6)
        )
        assert its.cached_prefixes.hit_trust == mine.cached_prefixes.hit_trust
        assert its.cached_prefixes.token_odometer == pytest.approx(mine.cached_prefixes.token_odometer)


@pytest.mark.parametrize("lag", [0.0, 0.2])
def test_workers_share_samples_except_late_ones(workers: list[Prefillers], lag: float) -> None:
    one, other = workers
    one.policy.context.loop_lag_within = lambda began, ended: lag
    request = prompt(*range(50, 70))
    before = other.pool.predict_work_seconds(request)
    served = one.serve(prompt(*range(1, 9)), seconds=40.0)
    for number in range(40):
        one.serve(prompt(*range(start := 10**7 + 100 * number, start + 2)), seconds=10.0)
    read_records(workers)
    assert (other.pool.predict_work_seconds(request) > 2 * before) is (lag == 0.0)
    known = other.policy._prefillers.prefiller_of(served)
    assert not known.in_flight_count, "that prompts have ended is heard at once"
    assert known.cached_prefixes.count_cached_pieces(list(range(1, 9))) == 8


def test_policy_logs_that_a_prefiller_computes_more_with_more_prompts(
    prefillers: Prefillers, caplog: pytest.LogCaptureFixture
) -> None:
    one_at_a_time(prefillers)
    known = prefillers.policy._prefillers
    prefiller = known.prefiller_of(prefillers.pool.all_backends()[0])
    for fill, seconds in ((3.0, 0.1), (1.0, 1.0)):
        for _ in range(100):
            prefillers.clock.now += seconds
            sample = PrefillSample(1000.0, 0.0, seconds, 3.0, 1.0, 0.0, 0.0, fill)
            known.learn_prefill(prefiller, sample, prefillers.clock.now)
    assert not prefiller.concurrency_estimate.computes_in_order
    assert [record.fields for record in caplog.records] == [{"backend": prefiller.backend.name}]  # type: ignore[attr-defined]


def test_sample_is_shared_once_the_lag_is_known(workers: list[Prefillers]) -> None:
    one, other = workers
    known_until = 0.0
    one.policy.context.loop_lag_within = lambda began, ended: 0.0 if ended <= known_until else None
    for number in range(40):
        one.serve(prompt(*range(start := 10**7 + 100 * number, start + 2)), seconds=10.0)
    read_records(workers)
    assert other.policy._prefillers.prefill_cost.sample_count == 0
    known_until = one.clock.now
    one.serve(prompt(3))
    read_records(workers)
    assert other.policy._prefillers.prefill_cost.sample_count > 20


def test_cache_counts_reach_all_workers() -> None:
    balancer, journal = Balancer(), Journal(workers=2, write_only_rings=1)
    workers = [Prefillers(balancer, worker=worker, journal=journal) for worker in range(2)]
    engines = journal.writer_for(2)
    there = workers[0].serve(prompt(1, 2, 3))
    read_records(workers)
    write_cache_count(
        engines, there.slot, CacheCount(stored_tokens=10**6, reach_tokens=10_000, has_evicted=True, cleared_at_tokens=0)
    )
    workers[0].serve(prompt(*range(50, 58)))
    read_records(workers)
    for worker in workers:
        cached = worker.policy._prefillers.prefiller_of(there).cached_prefixes
        assert (cached.capacity_tokens, cached.count_cached_pieces([1, 2, 3])) == (10_000, 3)
    write_cache_count(
        engines, there.slot, CacheCount(stored_tokens=10**6, reach_tokens=0, has_evicted=False, cleared_at_tokens=1)
    )
    read_records(workers)
    assert [
        worker.policy._prefillers.prefiller_of(there).cached_prefixes.count_cached_pieces([1, 2, 3])
        for worker in workers
    ] == [0, 0]


def test_time_to_load_a_prefix_is_learned_and_predicted_by_all_workers() -> None:
    """The device keeps one piece. Loading a token from the tier below it takes 0.8 ms, computing one takes 1 ms."""
    balancer, journal = Balancer(), Journal(workers=2, write_only_rings=1)
    workers = [Prefillers(balancer, worker=worker, journal=journal) for worker in range(2)]
    one = workers[0]
    one.teach()
    prefixes: dict[Backend, Sequence[int]] = {}
    for start in range(1, 2000, 100):
        prefixes.setdefault(one.serve(prompt(*range(start, start + 20))), range(start, start + 20))
    assert len(prefixes) == 2
    count = CacheCount(0, 10**6, has_evicted=1, cleared_at_tokens=0, device_reach_tokens=PIECE)
    for backend in prefixes:
        write_cache_count(journal.writer_for(2), backend.slot, count)
    read_records(workers)
    for tail in range(1000, 1060):
        length = 5 + tail % 16
        for backend, keys in prefixes.items():
            seconds = (PIECE + 0.8 * length * PIECE) / 1000
            request = prompt(*keys[:length], tail)
            assert one.serve(request, cached=length * PIECE, seconds=seconds) == backend
    read_records(workers)
    for worker in workers:
        known = worker.policy._prefillers
        for backend, keys in prefixes.items():
            _, seconds = known.predict_cost_on(known.prefiller_of(backend), make_prompt_costs(prompt(*keys, 999)))
            assert seconds == pytest.approx((PIECE + 0.8 * 20 * PIECE) / 1000, rel=0.2)


def test_cleared_cache_keeps_the_engine_and_its_prompts_in_flight() -> None:
    journal = Journal(workers=1, write_only_rings=1)
    prefillers = Prefillers(Balancer(), journal=journal)
    served = prefillers.serve(prompt(1, 2, 3))
    known = prefillers.policy._prefillers.prefiller_of(served)
    known._prompts_computed_alone = 100
    write_cache_count(
        journal.writer_for(1),
        served.slot,
        CacheCount(stored_tokens=10**6, reach_tokens=0, has_evicted=0, cleared_at_tokens=0),
    )
    lease = prefillers.begin(prompt(1, 2, 3, 4))
    assert lease.backend == served
    read_records([prefillers])
    write_cache_count(
        journal.writer_for(1),
        served.slot,
        CacheCount(stored_tokens=10**6, reach_tokens=0, has_evicted=0, cleared_at_tokens=1),
    )
    prefillers.serve(prompt(7, 8, 9))
    read_records([prefillers])
    assert known.computes_one_at_a_time
    assert known.cached_prefixes.count_cached_pieces([1, 2, 3, 4]) == 4
    lease.__exit__(None, None, None)


def read_records(workers: list[Prefillers]) -> None:
    for worker in workers:
        worker.policy._prefillers.prefillers_of(worker.candidates)


def test_prompt_of_another_worker_counts_with_its_remaining_time(workers: list[Prefillers]) -> None:
    one, other = workers
    one.teach()
    leases = [one.begin(prompt(*range(100 * number, 100 * number + 8))) for number in range(2)]
    assert len({lease.backend for lease in leases}) == 2
    one.clock.now += 3.5
    candidates = other.candidates
    other.policy._prefillers.prefillers_of(candidates)
    reader = other.policy._prefillers.slot_reader
    waits = other.policy._wait_seconds_of(reader.all_places, reader.compute_by_place, other.clock())
    assert all(0.2 < wait < 1.2 for wait in waits)
    for lease in leases:
        lease.__exit__(None, None, None)


def test_prefiller_that_was_unreachable_has_an_empty_cache(balancer: Balancer, prefillers: Prefillers) -> None:
    gone = prefillers.serve(prompt(1, 2, 3))
    assert prefillers.policy.remembered_prefixes
    balancer.health.on_outcome(gone, UpstreamError(Failure.CONNECT, gone, "refused"))
    prefillers.pool.all_backends()
    assert not prefillers.policy.remembered_prefixes


def test_prediction_assumes_the_expected_cache_hits(prefillers: Prefillers) -> None:
    prefillers.teach()
    for number in range(4):  # failed cache hits raise the charge and not the prediction
        prefillers.serve(prompt(*range(1, 9), 100 + number), cached=0)
    lease = prefillers.begin(prompt(*range(1, 9), 200))
    assert lease.policy_prediction is not None
    assert lease.policy_prediction.cached_tokens == 8 * PIECE
    assert lease.policy_prediction.predicted_seconds == pytest.approx(PIECE / 1000, rel=0.5)
    lease.__exit__(None, None, None)


def test_prediction_of_a_fully_cached_prompt_is_the_rest_of_its_last_block(
    prefillers: Prefillers,
) -> None:
    prefillers.teach()
    whole = prompt(*range(1, 9))
    for _ in range(30):
        prefillers.serve(whole, cached=8 * PIECE - 128, seconds=0.128)
        prefillers.serve(prompt(*range(1, 5)), cached=4 * PIECE - 128, seconds=0.128)
    with prefillers.pool.make_lease(whole) as lease:
        assert lease.policy_prediction is not None
        assert lease.policy_prediction.cached_tokens == 8 * PIECE - 128
        prefillers.clock.now += 0.3


def burst(prefillers: Prefillers, *, together: bool) -> None:
    """Serve three prompts of 1 s on each prefiller. The third is computed with the second or after it."""
    leases = [prefillers.begin(prompt(start := 10**7 * number, start + 1)) for number in range(6)]
    by_backend: dict[Backend, list[Lease]] = {}
    for lease in leases:
        by_backend.setdefault(lease.backend, []).append(lease)
    for place in range(3):
        if place < 2 or not together:
            prefillers.clock.now += 1.024
        for each in by_backend.values():
            if len(each) > place:
                each[place].record_usage(2 * PIECE, 0)
                each[place].__exit__(None, None, None)


@pytest.mark.parametrize("together", [True, False])
def test_prefiller_that_never_batches_is_recognized(prefillers: Prefillers, together: bool) -> None:
    prefillers.teach()
    for _ in range(20):
        burst(prefillers, together=together)
    known = prefillers.states
    assert [prefiller.computes_one_at_a_time for prefiller in known] == [not together] * 2


def step(pieces: int) -> float:
    """Return the time of prompts that are computed in one step."""
    return 0.2 + pieces * PIECE / 10_000


def teach_steps(prefillers: Prefillers) -> None:
    for number in range(40):
        pieces = range(start := 10**9 + 1000 * number, start + 2 + number % 9)
        prefillers.serve(prompt(*pieces), seconds=step(len(pieces)))


def test_batched_prompts_share_the_fixed_cost_of_a_step(prefillers: Prefillers) -> None:
    teach_steps(prefillers)
    first = prefillers.begin(prompt(1, 2, 3, 4))
    behind = [prefillers.begin(prompt(10 * number, 10 * number + 1)) for number in range(1, 6)]
    there = [lease for lease in [first, *behind] if lease.backend == first.backend]
    assert len(there) == 3
    predicted = [lease.policy_prediction.predicted_seconds for lease in there if lease.policy_prediction is not None]
    assert predicted == pytest.approx([step(4), step(4) + step(2), step(4) + step(4)], rel=0.05)


def test_simultaneous_answers_are_learned_as_one_step(prefillers: Prefillers) -> None:
    teach_steps(prefillers)
    request = prompt(*range(50, 54))
    for number in range(60):
        leases = [prefillers.begin(prompt(*range(start := 1000 * number + 100 * each, start + 4))) for each in range(6)]
        by_backend: dict[Backend, list[Lease]] = {}
        for lease in leases:
            by_backend.setdefault(lease.backend, []).append(lease)
        prefillers.clock.now += step(4)
        for first, *_ in by_backend.values():
            first.record_usage(4 * PIECE, 0)
            first.__exit__(None, None, None)
        prefillers.clock.now += step(8)
        for _, *others in by_backend.values():
            for each in others:
                each.record_usage(4 * PIECE, 0)
                each.__exit__(None, None, None)
    assert prefillers.pool.predict_work_seconds(request) == pytest.approx(step(4), rel=0.05)


@pytest.mark.parametrize(("pieces", "goes"), [(1, True), (12, False)])
def test_waiting_prompt_joins_the_next_step_when_it_saves_more_than_it_delays(
    prefillers: Prefillers, pieces: int, goes: bool
) -> None:
    teach_steps(prefillers)
    one_at_a_time(prefillers)
    for number in (1, 2):
        prefillers.begin(prompt(*range(100 * number, 100 * number + 4)))
    prefillers.clock.now += step(4) - 0.01
    for number in (3, 4):
        assert prefillers.pool.has_room()
        prefillers.begin(prompt(*range(100 * number, 100 * number + 4)))
    waiting = prompt(*range(100, 104), *range(500, 500 + pieces))  # it takes less time where the first one went
    prefillers.pool.predict_work_seconds(waiting)
    assert prefillers.pool.has_room()
    assert (prefillers.pool.index_to_admit([waiting]) == 0) is goes
    prefillers.pool.on_left_queue(waiting)


def test_prompt_with_equal_costs_everywhere_joins_the_next_step(prefillers: Prefillers) -> None:
    """Waiting in the gateway would only make it too late for that step."""
    teach_steps(prefillers)
    one_at_a_time(prefillers)
    for number in (1, 2):
        prefillers.begin(prompt(*range(100 * number, 100 * number + 4)))
    sent = 0
    while prefillers.pool.index_to_admit([prompt(start := 10**6 + 100 * sent, start + 1)]) == 0:
        prefillers.begin(prompt(start, start + 1))
        sent += 1
    assert sent * 2 * PIECE == 2 * 16_384, "until the next step of both has no room"


def test_prompt_that_exceeds_the_next_step_waits(prefillers: Prefillers) -> None:
    """It would not complete sooner, and a later prompt may take less time there."""
    teach_steps(prefillers)
    one_at_a_time(prefillers)
    for number in (1, 2):
        prefillers.begin(prompt(*range(100 * number, 100 * number + 4)))
    assert prefillers.pool.index_to_admit([prompt(*range(10**6, 10**6 + 33))]) is None
    assert prefillers.pool.index_to_admit([prompt(*range(10**6, 10**6 + 32))]) == 0


def test_batching_is_tested_again_periodically_and_after_a_restart(prefillers: Prefillers) -> None:
    prefillers.teach()
    for _ in range(20):
        burst(prefillers, together=False)
    known = prefillers.states
    assert [prefiller.computes_one_at_a_time for prefiller in known] == [True, True]
    prefillers.policy.forget_cache(known[0].backend)
    assert [prefiller.computes_one_at_a_time for prefiller in known] == [False, True]
    for number in range(1100):
        request = prompt(2 * 10**9 + 10 * number)
        prefillers.serve(
            PickRequest(
                request.prefill_load, request.decode_load, request.request_subject, preferred_backend=known[1].backend
            )
        )
    assert not known[1].computes_one_at_a_time


def test_step_capacity_is_learned_from_full_steps(prefillers: Prefillers) -> None:
    known = prefillers.policy._prefillers.prefiller_of(prefillers.serve(prompt(1)))
    full = PrefillStep(8000.0, 0.0, 0.2, began_at=0.0, largest_prompt_tokens=1000.0)
    for _ in range(60):
        known.learn_step_capacity(full, left_out_tokens=1000.0)
    assert known.step_capacity_tokens == pytest.approx(9000.0, rel=0.01)
    known.learn_step_capacity(
        PrefillStep(2000.0, 0.0, 0.2, began_at=0.0, largest_prompt_tokens=1000.0), left_out_tokens=30_000.0
    )
    assert known.step_capacity_tokens == pytest.approx(9000.0, rel=0.01)
    known.learn_step_capacity(
        PrefillStep(12_000.0, 0.0, 0.2, began_at=0.0, largest_prompt_tokens=1000.0), left_out_tokens=None
    )
    assert known.step_capacity_tokens > 12_000
    known.learn_step_capacity(
        PrefillStep(30_000.0, 0.0, 0.2, began_at=0.0, largest_prompt_tokens=30_000.0), left_out_tokens=None
    )
    assert known.step_capacity_tokens < 13_000, "such a prompt takes several steps"
    prefillers.policy.forget_cache(known.backend)
    assert known.step_capacity_tokens == 16_384


def test_long_prompts_computed_alone_are_not_evidence_against_batching(prefillers: Prefillers) -> None:
    prefillers.teach()
    for number in range(40):
        leases = [
            prefillers.begin(prompt(*range(start := 1000 * (10 * number + each), start + 20))) for each in range(6)
        ]
        for place in range(3):
            prefillers.clock.now += 10.24
            for lease in leases[2 * place : 2 * place + 2]:
                lease.record_usage(20 * PIECE, 0)
                lease.__exit__(None, None, None)
    assert not any(prefiller.computes_one_at_a_time for prefiller in prefillers.states)


@pytest.mark.parametrize("lag", [0.2, 2.0])
def test_costs_are_not_learned_while_the_event_loop_is_late(balancer: Balancer, lag: float) -> None:
    prefillers = Prefillers(balancer)
    prefillers.teach()
    before = prefillers.pool.predict_work_seconds(prompt(*range(50, 70)))
    prefillers.policy.context.loop_lag_within = lambda began, ended: lag
    for number in range(60):
        prefillers.serve(prompt(*range(start := 10**7 + 100 * number, start + 2)), seconds=1.024 + lag)
    assert prefillers.pool.predict_work_seconds(prompt(*range(50, 70))) == before


def test_costs_are_learned_once_the_lag_is_known(balancer: Balancer) -> None:
    prefillers = Prefillers(balancer)
    known_until = 0.0
    prefillers.policy.context.loop_lag_within = lambda began, ended: 0.0 if ended <= known_until else None
    prefillers.teach()
    request = prompt(*range(50, 70))
    before = prefillers.pool.predict_work_seconds(request)
    known_until = prefillers.clock.now
    prefillers.serve(prompt(3))
    assert prefillers.pool.predict_work_seconds(request) > 2 * before


def test_request_waits_at_most_about_twice_its_predicted_wait(prefillers: Prefillers) -> None:
    assert prefillers.policy.max_hold_seconds(None, 1) == inf
    prefillers.teach()
    one_at_a_time(prefillers)
    for number in (1, 2):
        prefillers.begin(prompt(*range(100 * number, 100 * number + 8)))
    waiting = [prompt(*range(1000 * number, 1000 * number + 8)) for number in range(1, 5)]
    for request in waiting:
        prefillers.pool.predict_work_seconds(request)
    # Each prompt takes 4.1 s. Each prefiller has one in flight and two that wait.
    held = prefillers.pool.policy.max_hold_seconds(waiting[0], 4)
    assert held == pytest.approx(2 * (4.1 + 2 * 4.1 + 3 * 4.1), rel=0.15)
    for request in waiting:
        prefillers.pool.on_left_queue(request)
    assert prefillers.pool.policy.max_hold_seconds(waiting[0], 1) < held - 12
    assert prefillers.pool.would_take_now()


def test_request_that_waits_for_decoders_has_no_prefill_hold(prefillers: Prefillers) -> None:
    prefillers.teach()
    one_at_a_time(prefillers)
    prefillers.begin(prompt(*range(100, 108)))
    waiting = prompt(*range(1000, 1008))
    prefillers.pool.predict_work_seconds(waiting)
    assert prefillers.pool.policy.max_hold_seconds(waiting, 1) == inf
    prefillers.begin(prompt(*range(200, 208)))
    assert prefillers.pool.policy.max_hold_seconds(waiting, 1) < inf
