"""Working sets of several workers or gateways, which limit the sessions of the same prefillers together."""

from __future__ import annotations

import pytest

from proxy.balancer.policies.prefill_cost import JournalRecord, RecordKind, pack_record, translate_record, unpack_record
from proxy.balancer.policies.prefixes import CachedPrefixes
from proxy.balancer.policies.session_records import NO_LIMIT, SessionRecords
from proxy.balancer.policies.working_sets import MAX_SESSIONS, CachedSession
from proxy.balancer.shared.journal import Journal, JournalWriter
from tests.balancer.policies.session_fleet import Fleet, chain

pytestmark = pytest.mark.interpreted  # a fake cache derives from a class that is compiled


class Worker(Fleet):
    """The working sets of one worker, which shares a journal with others."""

    def __init__(self, journal: JournalWriter, caches: int = 1) -> None:
        self._journal = journal
        self.is_late = False
        super().__init__(caches, records=SessionRecords(journal, self._slot_of, self.read))

    def _slot_of(self, cache: CachedPrefixes) -> int:
        return [id(each) for each in self.caches].index(id(cache))

    def read(self) -> None:
        """Apply the records of the others."""
        for data in self._journal.new_records() if not self.is_late else ():
            record = unpack_record(data)
            self.sets.apply_record(record, self.caches[record.slot])


class Gateway:
    """Workers with one journal."""

    def __init__(self, workers: int = 2, caches: int = 1) -> None:
        journal = Journal(workers)
        self.workers = [Worker(journal.writer_for(number), caches) for number in range(workers)]

    def turn(self, worker: int, session: int, turn: int, tokens: int = 10_000, *, found: float | None = None) -> None:
        """Send a turn through one worker and complete it. The others learn of it."""
        one = self.workers[worker]
        one.read()
        one.turn(chain(session, turn), tokens, found=found)
        for each in self.workers:
            each.now = one.now
            each.read()
            if each is not one:
                each.sets.record_prefill_work(tokens / 10_000, one.now - 1.0)  # a SENT record has it

    def thrash(self) -> None:
        """Let ten sessions take turns on all workers, which lose their prefixes, until there is a limit."""
        for number in range(24):
            for session in range(10):
                if not self.is_active:
                    self.turn((number + session) % len(self.workers), session, number, found=0.0)
        assert self.is_active

    @property
    def is_active(self) -> bool:
        return any(worker.sets.are_limits_active for worker in self.workers)

    def session(self, worker: int, number: int) -> CachedSession:
        found = self.workers[worker].sets.find_session(chain(number, 200), None, self.workers[worker].now)
        assert found is not None
        return found

    def residents(self, worker: int) -> set[int]:
        return {number for number in range(10) if self.session(worker, number).is_resident}


@pytest.fixture(params=[2, 3])
def full(request: pytest.FixtureRequest) -> Gateway:
    """Return workers whose limit has begun, and whose residents use all of it."""
    gateway = Gateway(request.param)
    gateway.thrash()
    return gateway


def test_workers_begin_a_limit_together(full: Gateway) -> None:
    limits = {home.limit_tokens for worker in full.workers for home in worker.sets.sets_by_cache.values()}
    assert [worker.sets.are_limits_active for worker in full.workers] == [True] * len(full.workers)
    assert len(limits) == 1


def test_workers_together_admit_no_more_tokens_than_one_worker(full: Gateway) -> None:
    """Each worker has turns of sessions without a place, and each looks for room."""
    first = full.workers[0]
    full.turn(0, 0, 23, tokens=1)  # an end of a turn, after which its resident is idle
    waiting: list[list[tuple[CachedSession, float]]] = []
    for number, worker in enumerate(full.workers):
        worker.now += 60.0  # all residents are idle
        outside = [session for session in range(10) if session not in full.residents(number)]
        waiting.append([(full.session(number, session), worker.now - 50.0) for session in outside])
    for worker, turns in zip(full.workers, waiting, strict=True):
        worker.sets.waiting_turn_count = len(turns)
        worker.sets.next_sessions(turns, 30.0, worker.now)
    for worker in full.workers:
        worker.read()
    limit = next(iter(first.sets.sets_by_cache.values())).limit_tokens
    admitted = set().union(*(full.residents(number) for number in range(len(full.workers))))
    assert sum(full.session(0, session).own_tokens for session in admitted) <= limit
    assert all(full.residents(number) == admitted for number in range(len(full.workers)))


def test_session_continues_at_another_worker() -> None:
    gateway = Gateway()
    gateway.turn(0, 1, 0)
    gateway.turn(1, 1, 1)
    gateway.turn(0, 1, 2)
    assert [len(worker.sets) for worker in gateway.workers] == [1, 1]
    assert [gateway.session(number, 1).turn_count for number in (0, 1)] == [3, 3]


def test_session_id_joins_chains_of_different_workers() -> None:
    one, two = Gateway().workers
    one.send(chain(1, 0), 5000, session="a")
    two.read()
    two.now = 1.0
    two.send(chain(2, 0), 3000, session="a")
    one.read()
    assert (len(one.sets), len(two.sets)) == (1, 1)


def test_resident_with_a_turn_at_one_worker_keeps_its_place_at_another(full: Gateway) -> None:
    one, two = full.workers[:2]
    resident = min(full.residents(0))
    one.send(chain(resident, 24), 10_000, ends=False)
    two.now = one.now = one.now + 60.0  # the other residents are idle
    outside = next(number for number in range(10) if number not in full.residents(1))
    waiting = [(full.session(1, outside), two.now - 50.0)]
    for _ in range(20):
        two.sets.next_sessions(waiting, 30.0, two.now)
    assert full.session(1, resident).is_resident


def test_resident_of_one_worker_does_not_wait_at_another(full: Gateway) -> None:
    resident = min(full.residents(0))
    assert full.workers[1].holds(chain(resident, 24)) is None


def test_losses_at_all_workers_count_for_the_limit() -> None:
    """No worker alone has seen enough of them."""
    gateway = Gateway(3)
    gateway.thrash()
    first = next(iter(gateway.workers[0].sets.sets_by_cache.values()))
    before = first.limit_tokens
    for number in range(3, 60):
        for session in sorted(gateway.residents(0)):
            gateway.turn(number % 3, session, 24 + number, found=0.0)
    assert first.limit_tokens < before


def test_limit_stays_while_a_turn_waits_at_another_worker(full: Gateway) -> None:
    one, two = full.workers[:2]
    outside = next(number for number in range(10) if number not in full.residents(1))
    for number in range(24, 120):
        assert two.holds(chain(outside, 23)) is not None
        full.turn(0, min(full.residents(0)), number, found=1.0)
    assert one.sets.are_limits_active


def test_limit_ends_at_all_workers(full: Gateway) -> None:
    for number in range(24, 120):
        full.turn(0, min(full.residents(0)), number, found=1.0)
    assert [worker.sets.are_limits_active for worker in full.workers] == [False] * len(full.workers)


def test_worker_that_has_lost_all_records_holds_nothing_back(full: Gateway) -> None:
    """A worker that takes the place of a dead one knows no session."""
    late = Worker(full.workers[0]._journal._journal.writer_for(0))
    late.now = full.workers[0].now
    assert [late.holds(chain(number, 24)) for number in range(10)] == [None] * 10


def test_report_of_a_dead_worker_counts_for_a_short_time(full: Gateway) -> None:
    one, two = full.workers[:2]
    outside = next(number for number in range(10) if number not in full.residents(1))
    assert two.holds(chain(outside, 23)) is not None
    one.read()
    assert one.sets._awaits_turn(one.now)
    assert not one.sets._awaits_turn(one.now + 10.0)


@pytest.mark.parametrize(
    ("kind", "keys", "numbers"),
    [
        (RecordKind.SESSION, [0, *range(1000)], [0.0, -5e9, 9e9, 1e9, 7.0, 1e9, 1e12, -1e12, 1e3, 1e12, -7.0]),
        (RecordKind.SESSION, [], [0.0] * 11),
        (RecordKind.LIMIT, [], [0.0, 1.0, NO_LIMIT, 1.0, 1e18]),
        (RecordKind.LIMIT, [], [0.0, NO_LIMIT, NO_LIMIT, 0.0, 1e18]),
        (RecordKind.WAITING, [], [0.0, 1.0, 1e12]),
    ],
)
def test_numbers_of_another_gateway_are_bounded(kind: RecordKind, keys: list[int], numbers: list[float]) -> None:
    (worker,) = Gateway(1).workers
    record = translate_record(unpack_record(pack_record(JournalRecord(kind, 7, keys, (), numbers))), 0, 5.0)
    worker.sets.apply_record(record, worker.caches[0])
    assert worker.sets.resident_count <= 1
    assert 0 <= sum(home.used_tokens for home in worker.sets.sets_by_cache.values()) <= 1
    assert len(worker.sets._by_tail) <= 6
    assert worker.sets._believed_from <= 5.0 + 3600.0


def test_sessions_of_other_workers_are_bounded() -> None:
    one, two = Gateway().workers
    for number in range(MAX_SESSIONS + 10):
        one.send(chain(number, 0), 2000)
        two.read()
    assert len(two.sets) == MAX_SESSIONS
