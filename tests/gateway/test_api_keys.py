"""ApiKeys: the holders of keys, their usage over all workers, and the time until there is room."""

from __future__ import annotations

import hashlib
import os
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from proxy.common.errors import LimitExceeded, Unauthorized
from proxy.gateway.api_keys import ANONYMOUS, ApiKey, ApiKeys, KeyUsage, TokenReservation, assign_slots
from proxy.settings import ClientKey
from tests.clock import Clock

MINUTE = 60.0


def key(name: str, secret: str = "", **limits: int) -> ClientKey:
    digest = hashlib.sha256((secret or f"sk-{name}").encode()).hexdigest()
    return ClientKey.model_validate({"name": name, "key_sha256": digest, **limits})


class Host:
    """The workers of one host, with the same keys."""

    def __init__(self, clock: Clock, workers: int = 2) -> None:
        clock.now = 100 * MINUTE
        self.clock = clock
        self.usage = KeyUsage(workers, slots=4)
        self.workers = [ApiKeys(self.usage, worker, clock) for worker in range(workers)]
        self.slots: dict[str, int] = {}

    def configure(self, *keys: ClientKey) -> None:
        self.slots = assign_slots([key.name for key in keys], self.slots, self.usage.slot_count)
        for api_keys in self.workers:
            api_keys.replace_keys(keys, self.slots)

    def key(self, name: str, worker: int = 0) -> ApiKey:
        return self.workers[worker].find_key(f"Bearer sk-{name}", None)

    def ask(self, name: str, worker: int = 0) -> None:
        """One short request."""
        with self.workers[worker].count_in_flight(self.key(name, worker)):
            pass

    def refusal(self, name: str, worker: int = 0) -> LimitExceeded:
        with pytest.raises(LimitExceeded) as refused:
            self.ask(name, worker)
        assert refused.value.status == 429
        return refused.value

    def retry_after_ms(self, name: str, worker: int = 0) -> int:
        error = self.refusal(name, worker)
        assert error.code == "key_rate"
        assert error.retry_after_seconds is not None
        return round(error.retry_after_seconds * 1000)


@pytest.fixture
def host(clock: Clock) -> Host:
    return Host(clock)


# Identification


def test_clients_are_anonymous_and_not_counted_without_keys(host: Host) -> None:
    api_keys = host.workers[0]
    assert not api_keys.are_keys_required
    for authorization in (None, "Bearer whatever"):
        assert api_keys.find_key(authorization, None) is ANONYMOUS
    with api_keys.count_in_flight(ANONYMOUS), api_keys.count_in_flight(ANONYMOUS):
        assert not any(host.usage._usage_cells)


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [("Bearer sk-a", None), ("bearer  sk-a ", None), (None, "sk-a"), ("Basic YTph", "sk-a"), ("Bearer sk-a", "sk-b")],
)
def test_key_may_be_a_bearer_token_or_x_api_key(host: Host, authorization: str | None, x_api_key: str | None) -> None:
    host.configure(key("a"), key("b"))
    assert host.workers[0].find_key(authorization, x_api_key).key_name == "a"


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        *((None, None), ("", ""), ("Bearer", None), ("Bearer ", None), ("Basic sk-a", None), ("sk-a", None)),
        *(("Bearer sk-A", None), ("Bearer sk-a x", None), (None, "sk-"), ("Bearer sk-b", "sk-a")),
        ("Bearer sk-\udcff", None),  # how aiohttp decodes a byte that is not UTF-8
        ("Bearer " + hashlib.sha256(b"sk-a").hexdigest(), None),
    ],
)
def test_client_without_a_valid_key_is_rejected(host: Host, authorization: str | None, x_api_key: str | None) -> None:
    host.configure(key("a"))
    with pytest.raises(Unauthorized) as refused:
        host.workers[0].find_key(authorization, x_api_key)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert "sk-" not in refused.value.message


def test_removed_key_is_rejected_while_its_requests_continue(host: Host) -> None:
    host.configure(key("a"), key("b"))
    with host.workers[0].count_in_flight(host.key("a")):
        host.configure(key("b"))
        with pytest.raises(Unauthorized):
            host.key("a")
    assert not any(host.usage.count_in_flight(slot) for slot in range(4))


def test_changed_key_replaces_the_old_one(host: Host) -> None:
    host.configure(key("a", "sk-old"))
    assert host.workers[0].find_key("Bearer sk-old", None).key_name == "a"
    host.configure(key("a", "sk-new"))
    assert host.workers[0].find_key("Bearer sk-new", None).key_name == "a"
    with pytest.raises(Unauthorized):
        host.workers[0].find_key("Bearer sk-old", None)


# Requests in flight


def test_requests_in_flight_are_limited_over_all_workers(host: Host) -> None:
    host.configure(key("a", max_concurrent=2), key("b", max_concurrent=1))
    with host.workers[0].count_in_flight(host.key("a")), host.workers[1].count_in_flight(host.key("a")):
        for worker in (0, 1):
            error = host.refusal("a", worker)
            assert (error.code, error.retry_after_seconds) == ("key_concurrency", 1.0)
        host.ask("b")
    host.ask("a")


def test_request_is_not_in_flight_after_any_end(host: Host) -> None:
    host.configure(key("a", max_concurrent=1))

    def fail() -> None:
        with host.workers[0].count_in_flight(host.key("a")):
            assert host.usage.count_in_flight(0) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert host.usage.count_in_flight(0) == 0


def test_request_that_is_never_entered_counts_nothing(host: Host) -> None:
    host.configure(key("a", requests_per_minute=1))
    host.workers[0].count_in_flight(host.key("a"))
    assert not any(host.usage._usage_cells)


def test_dead_workers_requests_are_not_in_flight_but_used(host: Host) -> None:
    host.configure(key("a", max_concurrent=1, requests_per_minute=2))
    host.workers[1].count_in_flight(host.key("a", 1)).__enter__()
    assert host.refusal("a").code == "key_concurrency"
    host.usage.erase_row(1)
    host.ask("a")
    assert host.refusal("a").code == "key_rate"


def test_a_worker_cannot_write_past_its_row() -> None:
    usage = KeyUsage(workers=2, slots=2)
    with pytest.raises(IndexError):
        usage.usage_row(0).add_in_flight(2, 1)
    with pytest.raises(IndexError):
        usage.usage_row(0).count_request(2, 1)
    with pytest.raises(IndexError):
        usage.usage_row(2)
    assert not any(usage._usage_cells)


def test_workers_share_the_usage_across_a_fork(host: Host) -> None:
    host.configure(key("a", max_concurrent=1))
    pid = os.fork()
    if pid == 0:
        host.workers[1].count_in_flight(host.key("a", 1)).__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    assert host.refusal("a").code == "key_concurrency"


# Requests per minute


def test_requests_per_minute_are_limited_over_all_workers(host: Host) -> None:
    host.configure(key("a", requests_per_minute=4), key("b", requests_per_minute=1))
    for worker in (0, 1, 1, 0):
        host.ask("a", worker)
    assert host.refusal("a", 0).code == host.refusal("a", 1).code == "key_rate"
    host.ask("b")


def test_rejected_request_is_not_counted(host: Host) -> None:
    host.configure(key("a", requests_per_minute=2, max_concurrent=1))
    with host.workers[0].count_in_flight(host.key("a")):
        host.refusal("a")
    host.ask("a")
    waits = {host.retry_after_ms("a") for _ in range(10)}
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("limit", "previous", "current", "elapsed_seconds", "wait_ms"),
    [
        (10, 0, 9, 0, 0),
        (10, 0, 10, 0, 60_001),  # all of this minute, and until one of the ten has left the window
        (10, 0, 10, 45, 15_001),
        (10, 10, 0, 0, 1),
        (10, 20, 0, 0, 30_001),  # twenty become ten in half a minute
        (10, 20, 0, 30, 1),
        (10, 20, 0, 45, 0),
        (10, 20, 4, 45, 0),
        (10, 20, 5, 45, 1),
        (10, 20, 9, 45, 12_001),
        (10, 0, 40, 0, 60_000 + 45_001),  # the limit was lowered
        (1, 1, 0, 0, 1),
        (1, 0, 1, 59, 1_001),
        (1, 1_000_000, 0, 0, 60_000),
    ],
)
def test_window_slides_as_if_requests_of_the_last_minute_came_evenly(
    host: Host, limit: int, previous: int, current: int, elapsed_seconds: int, wait_ms: int
) -> None:
    host.configure(key("a"))
    host.usage._usage_cells[1 + 99 % 2] = (99 << 32) + previous  # a million requests take long
    for number in range(current):
        host.ask("a", number % 2)
    host.configure(key("a", requests_per_minute=limit))
    host.clock.now += elapsed_seconds
    if wait_ms:
        assert host.retry_after_ms("a") == wait_ms
    else:
        host.ask("a")


def test_minute_before_last_is_forgotten(host: Host) -> None:
    host.configure(key("a", requests_per_minute=2))
    for _ in range(2):
        host.ask("a")
    host.clock.now += 2 * MINUTE
    for _ in range(2):
        host.ask("a")
    host.refusal("a")


@given(
    limit=st.integers(1, 20),
    arrivals=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 1)), min_size=1, max_size=60),
)
def test_request_is_admitted_exactly_after_retry_after(limit: int, arrivals: list[tuple[int, int]]) -> None:
    """The model knows when each request was let in, and applies the formula to it in exact numbers."""
    clock = Clock()
    host = Host(clock)
    host.configure(key("a", requests_per_minute=limit))
    start_ms = now_ms = round(clock.now * 1000)
    accept: list[int] = []

    def used() -> Fraction:
        minute, elapsed_ms = divmod(now_ms, 60_000)
        before = sum(at // 60_000 == minute - 1 for at in accept)
        now = sum(at // 60_000 == minute for at in accept)
        return before * (1 - Fraction(elapsed_ms, 60_000)) + now

    def move_to(ms: int) -> None:
        nonlocal now_ms
        now_ms = ms
        clock.now = ms / 1000

    for gap_ms, worker in arrivals:
        move_to(now_ms + gap_ms)
        if used() >= limit:
            wait_ms = host.retry_after_ms("a", worker)
            assert wait_ms > 0
            move_to(now_ms + wait_ms - 1)
            assert host.retry_after_ms("a", worker) == 1
            move_to(now_ms + 1)
        host.ask("a", worker)
        accept.append(now_ms)
    for minute in range(start_ms // 60_000, now_ms // 60_000 + 1):
        assert sum(at // 60_000 == minute for at in accept) <= limit


# Tokens per minute


def reserve(host: Host, tokens: int, worker: int = 0) -> TokenReservation:
    """Admit a request of the key `a` that reserves tokens."""
    host.ask("a", worker)
    limit = host.key("a", worker).token_limit
    assert limit is not None
    return limit.reserve_tokens(tokens)


def token_wait_ms(host: Host, worker: int = 0) -> int:
    error = host.refusal("a", worker)
    assert error.code == "key_tokens"
    assert error.retry_after_seconds is not None
    return round(error.retry_after_seconds * 1000)


def test_tokens_per_minute_are_limited_over_all_workers(host: Host) -> None:
    host.configure(key("a", tokens_per_minute=100), key("b", tokens_per_minute=100))
    reserve(host, 60, worker=0)
    reserve(host, 40, worker=1)
    for worker in (0, 1):
        assert token_wait_ms(host, worker) == 60_001  # all of this minute, and until a token has left the window
    host.ask("b")
    host.clock.now += 60.001
    host.ask("a")


def test_tokens_settle_with_the_usage_of_the_request(host: Host) -> None:
    host.configure(key("a", tokens_per_minute=100))
    first, second = reserve(host, 50), reserve(host, 50, worker=1)
    token_wait_ms(host)
    first.settle_reservation(10)
    assert host.usage.recent_tokens(0, 100) == 60
    second.settle_reservation(90)
    assert host.usage.recent_tokens(0, 100) == 100
    token_wait_ms(host)


def test_tokens_are_returned_only_where_they_still_count(host: Host) -> None:
    host.configure(key("a", tokens_per_minute=100))
    early, late = reserve(host, 100), host.key("a", 1).token_limit
    assert late is not None
    host.clock.now += MINUTE
    late.reserve_tokens(30)
    early.settle_reservation(40)
    assert (host.usage.recent_tokens(0, 100), host.usage.recent_tokens(0, 101)) == (40, 30)
    another = late.reserve_tokens(70)
    host.clock.now += 2 * MINUTE
    late.reserve_tokens(5)
    another.settle_reservation(0)
    assert host.usage.recent_tokens(0, 103) == 5


def test_tokens_beyond_the_reservation_count_when_they_are_known(host: Host) -> None:
    host.configure(key("a", tokens_per_minute=100))
    long_answer = reserve(host, 10)
    host.clock.now += 5 * MINUTE
    long_answer.settle_reservation(400)
    assert host.usage.recent_tokens(0, 105) == 390
    assert token_wait_ms(host) == 60_000 + 44_616  # 390 become less than 100 after 44.6 s of the next minute


def test_token_count_stays_within_its_bits(host: Host) -> None:
    host.configure(key("a", tokens_per_minute=100))
    for _ in range(3):
        reservation = host.key("a").token_limit
        assert reservation is not None
        reservation.reserve_tokens(1 << 31)
    assert host.usage.recent_tokens(0, 100) == (1 << 32) - 1


def test_limits_may_change_while_usage_stays(host: Host) -> None:
    host.configure(key("a"), key("b"))
    for _ in range(5):
        host.ask("b")
    host.configure(key("b", requests_per_minute=5))
    assert host.refusal("b").code == "key_rate"
    host.configure(key("c"), key("b", requests_per_minute=6))
    host.ask("b")
    host.refusal("b")


# Slots


@pytest.mark.parametrize(
    ("names", "before", "slots"),
    [
        ("abc", {}, {"a": 0, "b": 1, "c": 2}),
        ("cab", {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2}),
        ("bd", {"a": 0, "b": 1}, {"b": 1, "d": 2}),  # the slot of a may still be in use
        ("bde", {"b": 1}, {"b": 1, "d": 0, "e": 2}),
        ("bcd", {"a": 0, "b": 3}, {"b": 3, "c": 1, "d": 2}),
        ("bcde", {"a": 0, "b": 3}, {"b": 3, "c": 1, "d": 2, "e": 0}),  # there is no other
        ("", {"a": 0}, {}),
    ],
)
def test_key_keeps_its_slot_and_new_key_gets_the_lowest_free(
    names: str, before: dict[str, int], slots: dict[str, int]
) -> None:
    assert assign_slots(names, before, 4) == slots


def test_more_keys_than_slots_are_rejected() -> None:
    with pytest.raises(ValueError, match="there are 5 client keys, but 4 is the limit"):
        assign_slots("abcde", {}, 4)


@given(st.lists(st.sets(st.sampled_from("abcdefgh"), max_size=5), max_size=10))
def test_keys_never_share_a_slot(generations: list[set[str]]) -> None:
    slots: dict[str, int] = {}
    for names in generations:
        before, slots = slots, assign_slots(sorted(names), slots, 5)
        assert set(slots) == names
        assert len(set(slots.values())) == len(names)
        assert set(slots.values()) <= set(range(5))
        assert all(slots[name] == before[name] for name in names & set(before))


def test_requests_of_other_gateways_count_but_are_not_own_usage() -> None:
    usage = KeyUsage(workers=2, slots=2, guest_rows=1)
    for worker in range(2):
        usage.usage_row(worker).add_in_flight(1, 1)
        for _ in range(worker + 1):
            usage.usage_row(worker).count_request(1, 100)
    guest = usage.usage_row(2)
    usage.usage_row(1).count_tokens(1, 100, 50)
    guest.replace_counts(1, 5, 100, (7, 90))
    assert (usage.count_in_flight(1), usage.recent_requests(1, 100)) == (7, 10)
    assert usage.recent_tokens(1, 100) == 140
    assert usage.own_usage(1, 100 * MINUTE) == (2, 3, 50)
    assert usage.own_usage(1, 101.5 * MINUTE) == (2, 2, 25)  # half of the minute before, rounded up
    assert usage.own_usage(1, 102 * MINUTE) == (2, 0, 0)
    guest.replace_counts(1, 0, 101, (4, 60))
    assert (usage.count_in_flight(1), usage.recent_requests(1, 100), usage.recent_requests(1, 101)) == (2, 3, 4)
