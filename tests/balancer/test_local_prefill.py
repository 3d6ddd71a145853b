"""When a prompt is better left to a decoder: by what both sides have shown to take, and never past a decoder's knee."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.backend import Backend, Load
from proxy.balancer.engines.engine_facts import EngineFacts
from proxy.balancer.local_prefill import LocalPrefill
from proxy.balancer.pick import PickRequest
from proxy.balancer.policies.asked import ask
from proxy.balancer.policies.cache_count import CacheCount
from proxy.balancer.policies.prefiller import write_count
from proxy.balancer.shared.journal import Journal
from tests.balancer.policies.test_least_seconds import PIECE, Prefillers, prompt

if TYPE_CHECKING:
    from tests.balancer.conftest import Balancer


class Both:
    """Prefillers that take 1 ms a token, and decoders; a hand-over takes 0.2 s."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.prefillers = Prefillers(balancer)
        self.prefillers.teach()
        self.decoders = balancer.decoders
        self.journal = Journal(workers=1, tellers=1)
        self.local = LocalPrefill(self.prefillers.pool, self.decoders, self.journal.seat(0))
        self.first, self.second = self.decoders.eligible()

    def hand_over(self, request: PickRequest, decoder: Backend | None = None, seconds: float | None = 0.2) -> None:
        self.local.handed_over((decoder or self.first).name, ask(request), seconds, 100)

    def trust(self, decoder: Backend) -> None:
        """It says that it has what it should."""
        for _ in range(20):
            uncached = TURN.prompt_tokens - 19 * PIECE
            self.local.served(decoder.name, ask(TURN), 1.0, 1, (TURN.prompt_tokens, TURN.prompt_tokens - uncached))

    def learn(self, seconds_per_token: float) -> None:
        """What decoders take."""
        for number in range(40):
            tokens = 100 * (1 + number % 9)
            short = ask(PickRequest(Load(), Load(), prompt(10**8 + number).subject))
            self.local.served(self.first.name, short, 0.02 + tokens * seconds_per_token, 1, (tokens, 0))


@pytest.fixture
def both(balancer: Balancer) -> Both:
    return Both(balancer)


MOST = 4096
TURN = prompt(*range(1, 20), 99)  # of which a decoder has all but the last piece


def test_the_next_turn_goes_where_the_turn_before_was_answered(both: Both) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.second)
    # At the decoder that has the beginning it takes 1 s, if that is true; with any prefiller 10 s.
    assert both.local.sooner(ask(TURN), MOST) == both.second
    assert both.local.sooner(ask(prompt(*range(500, 520))), MOST) is None


def test_a_prefiller_that_has_the_beginning_too_and_is_faster_is_asked(both: Both) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.second)
    both.prefillers.serve(prompt(*range(1, 20)))
    for _ in range(30):  # it is known that what is expected to be cached is
        both.prefillers.serve(prompt(*range(1, 20)), cached=19 * PIECE - 1)
    assert both.local.sooner(ask(TURN), MOST) is None
    both.prefillers.begin(prompt(*range(3000, 3050)))
    both.prefillers.begin(prompt(*range(4000, 4050)))  # now it would have to wait
    assert both.local.sooner(ask(TURN), MOST) == both.second


@pytest.mark.parametrize(("seconds_per_token", "is_sooner"), [(0.0005, True), (0.01, False)])
def test_short_prompts_go_to_decoders_that_take_no_longer_than_a_hand_over(
    both: Both, seconds_per_token: float, is_sooner: bool
) -> None:
    both.hand_over(prompt(8))
    both.learn(seconds_per_token)
    assert (both.local.sooner(ask(prompt(7)), MOST) is not None) is is_sooner


def test_nothing_is_left_to_a_decoder_before_a_hand_over_was_seen(both: Both) -> None:
    both.learn(0.0001)
    both.hand_over(prompt(*range(1, 20)), seconds=None)
    assert both.local.sooner(ask(TURN), MOST) is None
    both.hand_over(prompt(*range(1, 20)))
    assert both.local.sooner(ask(TURN), MOST) is not None


def test_who_is_not_free_to_choose_or_not_known_goes_the_usual_way(both: Both) -> None:
    both.learn(0.0001)
    both.hand_over(prompt(*range(1, 20)))
    assert both.local.sooner(ask(TURN), MOST) == both.first
    assert both.local.sooner(ask(TURN.avoiding([both.second])), MOST) is None
    assert both.local.sooner(ask(PickRequest(TURN.prefill, TURN.decode, TURN.subject, (), both.second)), MOST) is None
    assert both.local.sooner(ask(PickRequest.of(Load(1, 1))), MOST) is None


def test_where_nothing_is_predicted_of_prefillers_nothing_is_skipped(both: Both, balancer: Balancer) -> None:
    local = LocalPrefill(balancer.prefillers, both.decoders)  # they count tokens
    local.handed_over(both.first.name, ask(prompt(*range(1, 20))), 5.0, 100)
    assert local.sooner(ask(TURN), MOST) is None


def test_the_busier_a_decoder_is_the_less_it_is_left_with(both: Both) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.first)
    both.trust(both.first)
    leases = []
    while both.local.sooner(ask(TURN), MOST) is not None:
        for backend in (both.first, both.second):
            lease = both.decoders.lease(PickRequest.of(Load(1, 1), prefer=backend))
            lease.__enter__()
            leases.append(lease)
    # 1 s becomes more than the 10 s of a prefiller.
    assert 2 * 25 < len(leases) < 2 * 50
    for lease in leases:
        lease.__exit__(None, None, None)


@pytest.mark.interpreted
@pytest.mark.parametrize("bound", ["limit", "knee", "memory"])
def test_a_decoder_that_has_as_much_as_it_should_is_left_alone(
    both: Both, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.learn(0.0001)
    both.hand_over(prompt(*range(1, 20)))
    with both.decoders.lease(PickRequest.of(Load(1, 1000), prefer=both.first)):
        assert both.local.sooner(ask(TURN), MOST) == both.first
        if bound == "limit":
            monkeypatch.setattr(both.decoders, "limit", lambda _: 1)
        elif bound == "knee":
            monkeypatch.setattr(both.decoders.policy, "most_running", lambda _: 1)
        else:
            tokens = TURN.decode.kv + 1000
            monkeypatch.setattr(both.decoders, "facts", lambda _: EngineFacts(kv_tokens=tokens))
        assert both.local.sooner(ask(TURN), MOST) != both.first


def test_a_decoder_that_was_gone_has_nothing_in_its_cache(both: Both, balancer: Balancer) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.second)
    balancer.eject(both.second)
    assert both.local.sooner(ask(TURN), MOST) is None
    balancer.clock.now += 1.2 * balancer.checks.eject_seconds
    with both.decoders.lease(PickRequest.of(Load(1, 1), prefer=both.second)):
        pass
    assert both.local.sooner(ask(TURN), MOST) is None


def test_a_decoder_is_left_with_twice_of_what_one_has_computed_at_most(both: Both) -> None:
    for pieces in (1, 2, 4, 8):
        cold = prompt(*range(1000 * pieces, 1000 * pieces + pieces))
        both.hand_over(prompt(*range(1, 20)))
        both.prefillers.begin(prompt(*range(5000, 5050)))
        both.prefillers.begin(prompt(*range(6000, 6050)))  # 25 s of work each
        assert both.local.sooner(ask(prompt(*range(7000, 7000 + 2 * pieces))), MOST) is None
        assert both.local.sooner(ask(cold), MOST) is not None
        both.local.served(both.first.name, ask(cold), 0.1, 1, (cold.prompt_tokens, 0))
    assert both.local.sooner(ask(prompt(*range(7000, 7009))), MOST) is None  # more than 4,096 tokens
    assert both.local.sooner(ask(prompt(*range(7000, 7009))), 5000) is not None


def test_one_that_does_not_tell_is_judged_by_how_long_it_takes(both: Both) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.first)
    for _ in range(10):
        both.local.served(both.first.name, ask(TURN), 1.1, 1, None)
    assert both.local.sooner(ask(TURN), MOST) == both.first
    for _ in range(10):
        both.local.served(both.first.name, ask(TURN), 30.0, 1, None)
    assert both.local.sooner(ask(TURN), MOST) is None


def test_what_is_told_not_to_be_cached_is_not_counted_on(both: Both) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.first)
    for _ in range(10):
        both.local.served(both.first.name, ask(TURN), 20.0, 1, (TURN.prompt_tokens, 0))
    assert both.local.sooner(ask(TURN), MOST) is None


def test_a_decoder_that_tells_that_its_cache_is_empty_is_believed(both: Both) -> None:
    events = both.journal.seat(1)
    events.write(b"what is not of caches")
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.second)
    for cleared, decoder in ((3, both.second), (4, None)):
        for backend in (both.first, both.second):
            write_count(events, backend.slot, CacheCount(stored=20_000, reach=10**6, evicts=0, cleared=cleared))
        assert both.local.sooner(ask(TURN), MOST) == decoder


def test_a_decoder_that_tells_what_it_evicts_has_no_more(both: Both) -> None:
    both.learn(0.002)
    both.hand_over(prompt(*range(1, 20)), both.second)
    write_count(both.journal.seat(1), both.second.slot, CacheCount(stored=20_000, reach=500, evicts=1, cleared=0))
    assert both.local.sooner(ask(TURN), MOST) is None
