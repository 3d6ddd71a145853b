"""News between gateways about loads and prompts, from the memory of one to that of the other."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from proxy.balancer.health import HealthBoard
from proxy.balancer.pick import PickRequest, PolicyContext
from proxy.balancer.policies.least_seconds import LeastSeconds
from proxy.balancer.policies.prefill_cost import (
    SECONDS_PER_LOAD,
    InvalidRecord,
    JournalRecord,
    PromptCosts,
    RecordKind,
    SentPrompt,
    pack_record,
    translate_record,
    unpack_record,
)
from proxy.balancer.policies.prefiller import Prefiller, write_cache_count
from proxy.balancer.policies.prefixes import CacheCount
from proxy.balancer.roster import Roster
from proxy.balancer.shared.journal import Journal
from proxy.balancer.shared.memory import QueueHeads
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from proxy.fleet.replicas.state import LocalState, News, PeerRows, SharedRows, decode_news, encode_news
from proxy.gateway.api_keys import KeyUsage
from tests.clock import Clock

_KEYS = [2**64 - 1, 7, 8]
_ENDS = [512.0, 1024.0, 1536.0]


@dataclass
class Gateway:
    """A gateway of two workers, the first with a policy. `order`: ports of prefillers by slot."""

    name: str
    order: tuple[int, ...]
    clock: Clock
    scoreboard: Scoreboard = field(default_factory=lambda: Scoreboard(workers=2, slots=8, guests=1))

    def __post_init__(self) -> None:
        self.board, self.queue_heads = HealthBoard(2, slot_count=8), QueueHeads(2, guests=1)
        journal, usage = Journal(3, write_only_rings=1), KeyUsage(2, slots=1, guest_rows=1)
        self.roster = Roster([("p", port) for port in self.order], [], self.scoreboard)
        context = PolicyContext(clock=self.clock, journal_writer=journal.writer_for(0))
        self.policy = LeastSeconds(context)
        rows = SharedRows(
            scoreboard=self.scoreboard,
            key_usage=usage,
            health_board=self.board,
            queue_heads=self.queue_heads,
            journal_writer=journal.writer_for(2),
        )
        self.own = LocalState(self.name, self.roster, dict, rows)
        self.guests = PeerRows(rows)
        self.events = journal.writer_for(3)

    def backend(self, port: int) -> Backend:
        return next(each.backend for each in self.roster.members_of_role(Role.PREFILL) if each.backend.port == port)

    def prefiller(self, port: int) -> Prefiller:
        """Return the state of a prefiller, after all received news."""
        prefillers = self.policy._prefillers
        known = prefillers.prefiller_of(self.backend(port))
        prefillers.prefillers_of([])
        return known

    def news(self) -> News | None:
        news = self.own.take_news(self.clock())
        return None if news is None else decode_news(encode_news(news))

    def changes(self) -> News:
        """Return the news, of which there must be some."""
        news = self.news()
        assert news is not None
        return news

    def take(self, news: News) -> None:
        slots = {self.backend(port).key: self.backend(port).slot for port in self.order}
        self.guests.replace_loads({slots[key]: charge for key, charge in news.instances.items()})
        self.guests.write_prompt_records(
            {slots[key]: records for key, records in news.prompts.items()}, self.clock() - news.now
        )


def send(
    prefiller: Prefiller, keys: Sequence[int], ends: Sequence[float], tokens: int, seconds: float, now: float
) -> SentPrompt:
    """Send a prompt without cached tokens."""
    load = Load(round(seconds / SECONDS_PER_LOAD), tokens)
    return prefiller.add_prompt(
        PromptCosts(PickRequest.make_for_load(load), keys, ends, tokens), 0, seconds, *load, now
    )


@pytest.fixture
def pair() -> tuple[Gateway, Gateway]:
    """Return two gateways with different clocks and different slots of the instances."""
    one, two = Gateway("one", (1, 2), Clock()), Gateway("two", (2, 1), Clock())
    one.clock.now += 1000.0
    return one, two


def test_sent_prompt_is_cached_for_all_gateways(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    two.prefiller(1)
    two.prefiller(2)
    sent = send(one.prefiller(1), _KEYS, _ENDS, 1600, 1.6, one.clock())
    news = one.changes()
    two.take(news)
    assert [two.prefiller(port).cached_prefixes.count_cached_pieces([*_KEYS, 9]) for port in (1, 2)] == [3, 0]
    one.clock.now += 1.0
    two.clock.now += 1.0
    assert two.prefiller(1).remaining_seconds(1.6, two.clock()) == pytest.approx(0.6)  # by the local clock

    one.prefiller(1).remove_prompt(sent, is_served=False, now=one.clock())
    news = one.changes()
    two.take(news)
    assert two.prefiller(1).cached_prefixes.count_cached_pieces(_KEYS) == 0
    assert one.news() is None
    assert two.news() is None  # received news are not sent again


def test_change_on_any_worker_is_published_once(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    assert one.news() is None
    one.scoreboard.load_row(1).add_load(one.backend(2).slot, requests=1, running=1, compute=5, kv=7)
    news = one.changes()
    assert news.instances == {one.backend(2).key: (1, 5, 7)}
    two.take(news)
    assert two.scoreboard.running_requests(two.backend(2).slot) == 1
    assert (one.news(), two.news()) == (None, None)
    one.scoreboard.erase_row(1)
    news = one.changes()
    assert news.instances == {one.backend(2).key: (0, 0, 0)}


def test_next_waiting_request_is_published_when_it_changes(pair: tuple[Gateway, Gateway]) -> None:
    one, _ = pair
    one.queue_heads.write_head(1, 70)
    one.queue_heads.write_head(0, 50)
    assert [news and news.front for news in (one.news(), one.news())] == [50, None]
    one.queue_heads.write_head(0, 0)
    assert [news and news.front for news in (one.news(), one.news())] == [70, None]
    assert one.own.make_full_state(1.0).front == 70


def test_published_prefixes_are_limited_in_bytes_per_second(pair: tuple[Gateway, Gateway]) -> None:
    one, _ = pair
    prefiller, rng = one.prefiller(1), random.Random(1)

    def published_counts(prompts: int) -> tuple[int, int]:
        for _ in range(prompts):
            keys = [rng.getrandbits(64) for _ in range(100)]
            send(prefiller, keys, [512.0 * (place + 1) for place in range(100)], 51_200, 1.0, 0)
        news = one.changes()
        (records,) = news.prompts.values()
        return len(records), sum(1 for data in records if unpack_record(data).prefix_keys)

    assert published_counts(200) == (200, 52)  # the other records have no prefixes
    one.clock.now += 0.1
    number, with_keys = published_counts(200)
    assert number == 200
    assert 10 <= with_keys <= 21
    one.clock.now += 3600
    assert published_counts(10) == (10, 10)

    for _ in range(5000):  # records without prefixes do not count
        send(prefiller, (), (), 100, 1.0, 0)
    assert published_counts(10) == (5010, 10)


def test_sessions_are_limited_at_all_gateways(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    prefiller = one.prefiller(2)
    sent = send(prefiller, [1, 2, 3], [2000.0, 4000.0, 6000.0], 6000, 1.0, one.clock())
    one.policy._session_limits.record_sent_prompt(prefiller.cached_prefixes, sent.prompt_costs, "a", sent, False)
    two.take(one.changes())
    elsewhere = two.prefiller(2)
    (home,) = two.policy._session_limits.sets_by_cache.values()
    (resident,) = home.resident_tokens
    assert home.prefiller_cache is elsewhere.cached_prefixes
    assert (resident.context_tokens, resident.idle_since - two.clock()) == (6000.0, sent.sent_at + 300.0 - one.clock())
    assert two.policy._session_limits.find_session([1, 2, 3, 4], None, two.clock()) is resident
    one.policy._session_limits.record_prompt_end(prefiller.cached_prefixes, sent, one.clock())
    two.take(one.changes())
    two.prefiller(2)
    assert resident.idle_since == pytest.approx(two.clock())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 20,
        pack_record(JournalRecord(RecordKind.SENT, 0, _KEYS, _ENDS, [1.0, 2.0])),
        pack_record(JournalRecord(RecordKind.SENT, 0, _KEYS, _ENDS[1:], [1.0, 2.0, 3.0])),
        pack_record(JournalRecord(RecordKind.SENT, 0, _KEYS, _ENDS, [1.0, 2.0, 3.0]))[:-1],
        pack_record(JournalRecord(RecordKind.SENT, 0, _KEYS, _ENDS, [1.0, 2.0, 3.0])) + b"more",
        pack_record(JournalRecord(RecordKind.SENT, 0, _KEYS, _ENDS, [float("nan"), 2.0, 3.0])),
        pack_record(JournalRecord(RecordKind.SENT, 0, _KEYS, [float("inf")] * 3, [1.0, 2.0, 3.0])),
        pack_record(JournalRecord(RecordKind.ENDED, 0, _KEYS, _ENDS, [1.0, 2.0, 3.0, 4.0])),
        pack_record(JournalRecord(7, 0, _KEYS, (), [1.0])),
        b"\xff" * 40,
    ],
)
def test_invalid_records_are_skipped(data: bytes, pair: tuple[Gateway, Gateway]) -> None:
    with pytest.raises(InvalidRecord):
        translate_record(unpack_record(data), 1, 2.0)
    one, two = pair
    send(one.prefiller(1), _KEYS, _ENDS, 1600, 1.6, one.clock())
    news = one.changes()
    prompts = {key: [data, *records] for key, records in news.prompts.items()}
    two.prefiller(1)
    two.take(News("one", round(one.clock() * 1e9), prompts=prompts))
    assert two.prefiller(1).cached_prefixes.count_cached_pieces(_KEYS) == 3


def test_record_survives_encoding_and_decoding() -> None:
    record = JournalRecord(RecordKind.SENT, 3, array("Q", _KEYS), array("f", _ENDS), (1.5, 2.5, 3.5))
    assert unpack_record(pack_record(record)) == record
    record = JournalRecord(RecordKind.ENDED, 3, (), (), (1.5, 2.5, 3.5, 4.5, -1.0, 1.0))
    assert unpack_record(pack_record(record)) == record
    record = JournalRecord(RecordKind.SAMPLED, 3, (), (), tuple(map(float, range(10))))
    assert unpack_record(pack_record(record)) == record


def test_invalid_messages_are_no_news() -> None:
    whole = News("one", 1, {"a": (1, 2, 3)}, -5, {"a": 7}, {"a": [b"x"]})
    assert decode_news(encode_news(whole)) == whole
    for message in (b"", b"\xff", encode_news(whole)[:-1], b"[]"):
        assert decode_news(message) is None


def test_kv_event_counts_are_not_published_to_peers(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    count = CacheCount(stored_tokens=10**6, reach_tokens=5000, has_evicted=1, cleared_at_tokens=0)
    one.news()
    write_cache_count(one.events, one.backend(1).slot, count)
    assert one.prefiller(1).cached_prefixes.capacity_tokens == 5000
    assert one.news() is None
    two.guests.write_prompt_records({0: [pack_record(JournalRecord(RecordKind.COUNTED, 0, (), (), count))]}, 0.0)
    assert two.prefiller(2).cached_prefixes.capacity_tokens == 10**6
