"""Working sets: sessions that wait while caches are too small, and each case in which they must not wait."""

from __future__ import annotations

from zlib import crc32

import pytest

from proxy.balancer.policies.working_sets import MAX_SESSIONS, CachedSession
from tests.balancer.policies.session_fleet import Cache, Fleet, chain

pytestmark = pytest.mark.interpreted  # a fake cache derives from a class that is compiled


@pytest.fixture
def full() -> Fleet:
    """Return a fleet whose limit has begun, and whose residents use all of it."""
    fleet = Fleet()
    fleet.thrash()
    assert fleet.sets.are_limits_active
    return fleet


def outsider(fleet: Fleet) -> int:
    """Return a session without room."""
    return next(number for number in range(10) if not found(fleet, number).is_resident)


def found(fleet: Fleet, number: int) -> CachedSession:
    session = fleet.sets.find_session(chain(number, 12), None, fleet.now)
    assert session is not None
    return session


def test_prompt_continues_the_session_whose_last_prompt_it_extends() -> None:
    fleet = Fleet()
    fleet.send(chain(1, 0), 5000)
    fleet.send(chain(2, 0), 5000)
    assert fleet.sets.find_session(chain(1, 1), None, 1.0) is fleet.sets.find_session(chain(1, 0), None, 1.0)
    assert fleet.sets.find_session(chain(1, 1), None, 1.0) is not fleet.sets.find_session(chain(2, 1), None, 1.0)
    assert fleet.sets.find_session([7, 8], None, 1.0) is None


def test_partial_last_piece_does_not_end_a_session() -> None:
    fleet = Fleet()
    fleet.send([1, 2, 3, 99], 5000)
    assert fleet.sets.find_session([1, 2, 3, 4, 98], None, 1.0) is not None


def test_session_id_joins_a_new_chain_after_compaction() -> None:
    fleet = Fleet()
    fleet.send(chain(1, 4), 50_000, session="s")
    fleet.now = 20.0
    fleet.send([1, 2], 6000, session="s")
    assert len(fleet.sets) == 1
    assert fleet.sets.resident_count == 1
    assert next(iter(fleet.sets.sets_by_cache.values())).used_tokens == 6000


def test_parallel_chain_with_the_same_session_id_is_another_session() -> None:
    fleet = Fleet()
    fleet.send(chain(1, 4), 50_000, session="s", ends=False)
    fleet.send(chain(2, 4), 50_000, session="s")
    assert len(fleet.sets) == 2


def test_chain_that_compaction_has_replaced_expires() -> None:
    fleet = Fleet()
    fleet.send(chain(1, 4), 50_000)
    fleet.now = 100.0
    fleet.send(chain(2, 4), 6000)
    assert next(iter(fleet.sets.sets_by_cache.values())).used_tokens == 6000


def test_fork_counts_shared_tokens_once() -> None:
    fleet = Fleet()
    fleet.send(chain(1, 4), 50_000)
    fleet.send([1000, 1001, 1002, 77, 78], 52_000, cached=48_000)
    assert next(iter(fleet.sets.sets_by_cache.values())).used_tokens == 54_000


def test_nothing_waits_when_everything_fits() -> None:
    fleet = Fleet()
    for turn in range(50):
        for session in range(10):
            fleet.turn(chain(session, turn), 10_000, found=1.0)
    assert not fleet.sets.are_limits_active


def test_nothing_waits_when_engines_report_no_cached_tokens() -> None:
    fleet = Fleet()
    for turn in range(50):
        for session in range(10):
            fleet.turn(chain(session, turn), 10_000)
    assert not fleet.sets.are_limits_active


def test_nothing_waits_while_the_reach_of_caches_is_unknown() -> None:
    fleet = Fleet(is_learned=False)
    fleet.thrash(turns=40)
    assert not fleet.sets.are_limits_active


def test_nothing_waits_while_prefillers_are_idle() -> None:
    fleet = Fleet()
    for turn in range(40):
        for session in range(10):
            fleet.turn(chain(session, turn), 10_000, found=0.0)
            fleet.now += 1.0
    assert not fleet.sets.are_limits_active


def test_nothing_waits_when_the_option_is_off() -> None:
    fleet = Fleet()
    fleet.is_enabled = False
    fleet.thrash(turns=40)
    assert not fleet.sets.are_limits_active


def test_waiting_sessions_go_when_the_option_is_turned_off(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    full.is_enabled = False
    assert full.next((session, full.now)) == [session]
    assert not full.sets.are_limits_active


def test_single_turns_never_wait(full: Fleet) -> None:
    """A burst of one-shot requests passes, and none of them takes a place in the working set."""
    residents = full.sets.resident_count
    for number in range(100):
        keys = [10_000_000 + 10 * number, 10_000_001 + 10 * number]
        assert full.holds(keys) is None
        full.send(keys, 50_000)
    assert full.sets.resident_count == residents


def test_first_turns_are_no_residents_without_room(full: Fleet) -> None:
    full.send(chain(50, 0), 50_000)
    assert full.holds(chain(50, 1)) is not None


def test_residents_go_and_others_wait(full: Fleet) -> None:
    number = outsider(full)
    assert full.holds(chain(number, 12)) is found(full, number)
    for other in range(10):
        assert full.holds(chain(other, 12)) is None or not found(full, other).is_resident


def test_session_goes_when_a_resident_never_comes_back(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    assert full.next((session, full.now)) == []
    full.now += 100.0
    assert full.next((session, full.now - 1)) == [session]


def test_impatient_session_takes_the_place_of_a_resident_with_most_turns(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    for number in range(10):
        each = found(full, number)
        each.turn_count, each.idle_since = (20 + number if each.is_resident else 0), full.now + 30
    most = max((found(full, number) for number in range(10)), key=lambda each: each.turn_count)
    full.now += 35
    assert full.next((session, full.now - 20)) == []
    assert full.next((session, full.now - 40)) == [session]
    assert not most.is_resident


def test_impatient_session_waits_while_residents_have_had_few_turns(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    for number in range(10):
        each = found(full, number)
        each.turn_count, each.idle_since = 1, full.now + 30
    full.now += 35
    assert full.next((session, full.now - 40)) == []


def test_resident_between_arrival_and_answer_keeps_its_place(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    for number in range(10):
        if found(full, number).is_resident:
            full.sets.record_arrival(chain(number, 12), None, full.now)
    full.now += 60
    assert full.next((session, full.now - 60)) == []


def test_session_is_admitted_regardless_after_the_longest_wait(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    full.sets.admit_regardless(session, full.now)
    assert session.is_resident


def test_key_with_few_sessions_does_not_wait_for_a_key_with_many(full: Fleet) -> None:
    for number in range(10):
        found(full, number).last_prefix_key = crc32(b"many")
    session = full.holds(chain(outsider(full), 12), "few")
    assert session is not None
    full.now += 3
    assert full.next((session, full.now - 1)) == [session]


def test_key_with_many_sessions_does_not_replace_those_of_a_key_with_few(full: Fleet) -> None:
    number = outsider(full)
    for other in range(10):
        found(full, other).last_prefix_key = crc32(b"few")
    waiting = full.holds(chain(number, 12), "many")
    assert waiting is not None
    waiting.context_tokens = 1_000_000.0
    full.now += 3
    assert full.next((waiting, full.now - 1)) == []


def test_conversation_larger_than_a_cache_has_its_turn(full: Fleet) -> None:
    full.send(chain(60, 0), 5_000_000)
    full.now += 600
    session = full.holds(chain(60, 1))
    assert session is None or full.next((session, full.now - 1)) == [session]


def test_placed_session_does_not_lose_its_place_before_its_prompt(full: Fleet) -> None:
    full.now += 100
    first, second = (number for number in range(10) if number in (outsider(full), 0) or number < 2)
    session = full.holds(chain(outsider(full), 12))
    placed = session or found(full, first)
    full.sets.admit_regardless(placed, full.now)
    full.now += 60
    other = found(full, second if found(full, second) is not placed else first)
    assert full.next((other, full.now - 50)) in ([], [other])
    assert placed.is_resident


def test_limit_shrinks_while_residents_lose_prefixes(full: Fleet) -> None:
    home = full.sets.sets_by_cache[full.caches[0]]
    before = home.limit_tokens
    residents = [number for number in range(10) if found(full, number).is_resident]
    for turn in range(12, 20):
        for number in residents:
            full.turn(chain(number, turn), 10_000, found=0.0)
    assert home.limit_tokens < 0.9 * before


def test_limit_grows_slowly_while_residents_find_prefixes(full: Fleet) -> None:
    home = full.sets.sets_by_cache[full.caches[0]]
    home.limit_tokens = before = home.used_tokens
    full.sets.waiting_turn_count = 1
    residents = [number for number in range(10) if found(full, number).is_resident]
    for turn in range(12, 22):
        for number in residents:
            full.turn(chain(number, turn), 10_000, found=1.0)
    assert before < home.limit_tokens < 1.5 * before


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_reach_that_is_wrong_by_a_factor_does_not_decide_the_limit(factor: float) -> None:
    fleet = Fleet()
    fleet.caches[0].capacity_tokens = factor * 1_000_000
    fleet.thrash()
    assert fleet.sets.sets_by_cache[fleet.caches[0]].limit_tokens == pytest.approx(75_000, rel=0.2)


def test_limit_that_does_not_help_is_lifted_and_not_believed_again_soon() -> None:
    fleet = Fleet()
    fleet.thrash(turns=14)
    fleet.sets.waiting_turn_count = 1
    for turn in range(14, 44):
        for number in range(10):
            fleet.turn(chain(number, turn), 10_000, found=0.0)
        if fleet.sets.lifted_count:
            break
    for number in range(100):
        fleet.turn(chain(number % 10, 44 + number // 10), 10_000, found=0.0)
    assert fleet.sets.lifted_count == 1
    assert not fleet.sets.are_limits_active


def test_limit_ends_when_no_session_waits(full: Fleet) -> None:
    residents = [number for number in range(10) if found(full, number).is_resident]
    for turn in range(12, 30):
        for number in residents:
            full.turn(chain(number, turn), 10_000, found=1.0)
    assert not full.sets.are_limits_active


def test_prefiller_that_joins_gets_a_limit_and_takes_waiting_sessions(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    full.caches.append(Cache())
    full.send([5, 6], 5000, at=1)
    assert full.next((session, full.now)) == [session]
    assert session.prefiller_cache is full.caches[1]


def test_place_of_a_client_that_left_does_not_keep_others_waiting(full: Fleet) -> None:
    first, second = [number for number in range(10) if not found(full, number).is_resident][:2]
    sessions = [full.holds(chain(number, 12)) for number in (first, second)]
    assert sessions[0] is not None
    assert sessions[1] is not None
    full.now += 100.0
    assert full.next((sessions[0], full.now - 1)) == [sessions[0]]
    full.sets.record_arrival(chain(first, 12), None, full.now)
    assert full.next((sessions[1], full.now - 1)) == []
    full.sets.record_left_queue(chain(first, 12), None, full.now)  # its client disconnects in the queue
    assert full.next((sessions[1], full.now - 1)) == [sessions[1]]


def test_disabled_prefiller_gets_no_sessions(full: Fleet) -> None:
    session = full.holds(chain(outsider(full), 12))
    assert session is not None
    full.caches.append(Cache())
    full.send([77_000, 77_001], 5000, at=1)
    full.enabled = 1
    assert full.next((session, full.now)) == []
    full.enabled = 2
    assert full.next((session, full.now)) == [session]


def test_limits_begin_while_another_prefiller_is_disabled() -> None:
    fleet = Fleet(2)
    fleet.send([5, 6], 5000, at=1)
    fleet.enabled = 1
    fleet.thrash()
    assert fleet.sets.are_limits_active


def test_prompt_that_ends_after_its_prefiller_left_leaves_nothing(full: Fleet) -> None:
    number = next(number for number in range(10) if found(full, number).is_resident)
    full.now += 1.0
    full.turn(chain(number, 13), 10_000)
    sent = full.send(chain(number, 14), 10_000, ends=False)
    assert sent.resident_tokens
    full.sets.forget_cache(full.caches[0])
    sent.record_usage(10_000, 0)
    full.sets.record_prompt_end(full.caches[0], sent, full.now)
    assert not full.sets.sets_by_cache


def test_prefiller_that_is_emptied_or_leaves_has_no_residents(full: Fleet) -> None:
    full.sets.forget_cache(full.caches[0])
    assert full.sets.resident_count == 0
    assert full.holds(chain(0, 12)) is None


def test_remembered_sessions_are_bounded() -> None:
    fleet = Fleet()
    for number in range(MAX_SESSIONS + 100):
        fleet.now += 0.01
        fleet.send([10 * number, 10 * number + 1], 2000)
    assert len(fleet.sets) == MAX_SESSIONS
    assert fleet.sets.find_session([0, 1], None, fleet.now) is None


def test_one_session_does_not_wait_for_a_thousand_of_another_key(full: Fleet) -> None:
    """It is admitted before sessions of the other key that have waited longer."""
    for number in range(10):
        found(full, number).last_prefix_key = crc32(b"many")
    waiting: list[tuple[CachedSession, float]] = []
    for number in range(100, 1100):
        full.send(chain(number, 0), 5000)
        session = full.holds(chain(number, 1), "many")
        if session is not None:  # the first ones may have room
            waiting.append((session, full.now - 20.0))
    few = outsider(full)
    session = full.holds(chain(few, 12), "few")
    assert session is not None
    full.now += 3.0
    assert session in full.next(*waiting, (session, full.now - 1.0))


def test_burst_of_one_shot_requests_takes_no_place(full: Fleet) -> None:
    before = {number for number in range(10) if found(full, number).is_resident}
    for number in range(100, 1100):
        assert full.holds(chain(number, 0)) is None
        full.send(chain(number, 0), 5000)
    assert {number for number in range(10) if found(full, number).is_resident} == before


def test_parallel_turns_of_one_session_take_one_place(full: Fleet) -> None:
    number = outsider(full)
    turns = [full.holds(chain(number, 12)), full.holds([*chain(number, 12), 999_999])]
    assert turns[0] is not None
    assert turns[0] is turns[1]
    full.now += 60.0  # all residents are idle
    assert full.next(*[(turns[0], full.now - 40.0)] * 2) == turns
    (home,) = full.sets.sets_by_cache.values()
    assert list(home.resident_tokens).count(turns[0]) == 1


def test_turn_that_a_decoder_computes_counts_for_its_session(full: Fleet) -> None:
    resident = next(found(full, number) for number in range(10) if found(full, number).is_resident)
    number = next(number for number in range(10) if found(full, number) is resident)
    turns = resident.turn_count
    full.sets.record_local_turn(chain(number, 14), None, full.now)
    assert (resident.turn_count, resident.idle_since, resident.is_resident) == (turns + 1, full.now, True)
    assert full.sets.find_session(chain(number, 15), None, full.now) is resident
    full.sets.record_local_turn(chain(77, 3), None, full.now)  # a first turn
