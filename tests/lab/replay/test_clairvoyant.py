"""The clairvoyant policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from lab.replay import virtual_time
from lab.replay.fleet import Fleet, Replay, Subject
from lab.replay.policies import CLAIRVOYANT, ClairvoyantDecode, policies
from lab.replay.trace import Request
from proxy.balancer.pick import Candidate, PickRequest, PolicyContext
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Load, Role
from tests.lab.replay.conftest import MACHINE


@pytest.fixture
def seen(replayed: Callable[..., Replay], fleet: Fleet) -> Callable[[Sequence[Request]], Replay]:
    return lambda requests: replayed(requests, policies(fleet, "least_tokens")[CLAIRVOYANT][0])


def test_clairvoyant_knows_cached_and_pending_blocks(seen: Callable[..., Replay]) -> None:
    """The second comes while the first is computed; the third finds both prefillers idle."""
    at = (0.0, 1.15, 20.0)
    courses = seen(
        [Request(at[0], 1100, 1, (1, 2, 3)), *(Request(each, 1100, 1, (1, 2, 9)) for each in at[1:])]
    ).courses
    assert [course.cached_tokens for course in courses] == [0, 1024, 1024]
    assert len({course.prefiller for course in courses}) == 1


def test_clairvoyant_leaves_a_cache_with_a_long_queue(seen: Callable[..., Replay]) -> None:
    long = Request(9.9, 30_000, 1, tuple(range(100, 159)))
    first, other, again = seen([Request(0.0, 1100, 1, (1, 2, 3)), long, Request(10.0, 1100, 1, (1, 2, 9))]).courses
    assert other.prefiller == first.prefiller
    assert (again.prefiller == first.prefiller, again.cached_tokens) == (False, 0)


def test_shortest_queued_prompt_is_computed_first(seen: Callable[..., Replay]) -> None:
    long = [Request(0.0, 3000, 1, (n,) * 6) for n in (1, 2)]
    waiting = [Request(0.1, 2000, 1, (3,) * 4), Request(0.2, 500, 1, (4,)), Request(0.2, 600, 1, (5, 5))]
    courses = seen(long + waiting).courses
    ended = sorted(courses[2:], key=lambda course: course.first_token_at or 0.0)
    assert [course.request.input_tokens for course in ended] == [500, 600, 2000]


def test_decoder_has_no_room_past_saturation_and_answers_need_memory() -> None:
    machine = replace(
        MACHINE, cost=replace(MACHINE.cost, step_sequence=0.001, knee=2), decode=replace(MACHINE.decode, kv_tokens=5000)
    )
    policy = ClairvoyantDecode(machine, PolicyContext())
    scoreboard = Scoreboard(slots=2)
    row = scoreboard.load_row(0)
    candidates = [Candidate(Backend(Role.DECODE, "d", slot, slot), None, scoreboard) for slot in range(2)]

    def wanted(prompt: int, answer: int) -> PickRequest:
        return PickRequest(Load(), Load(), Subject(Request(0.0, prompt, answer, ())))

    row.add_load(0, requests=2, running=2, kv=100)
    row.add_load(1, requests=1, running=1, kv=3000)
    assert policy.choose_candidate(candidates, [0, 0], wanted(1000, 500)).backend.slot == 1
    assert policy.choose_candidate(candidates, [0, 0], wanted(1000, 1500)).backend.slot == 0
    assert policy.has_room(candidates)
    row.add_load(1, requests=1, running=1, kv=100)
    assert not policy.has_room(candidates)


def test_slow_prefiller_is_not_idle_while_others_are_busy(fleet: Fleet) -> None:
    """A share of 0.5 to 7 would be 43 requests; with all weight on the longer work it gets none."""
    slow = replace(fleet, prefillers=8, slow=0.5)
    rng = random.Random(1)
    at = list(accumulate(rng.expovariate(0.95 * slow.capacity / 0.3) for _ in range(650)))
    made: list[Replay] = []

    async def course() -> None:
        made.append(Replay(slow, *policies(slow, "least_load")[CLAIRVOYANT], seed=1))
        await made[0].run([Request(each, 200, 1, ()) for each in at])

    virtual_time.run(course(), virtual_time.VirtualLoop())
    assert sum(course.prefiller is not None and course.prefiller.slot == 0 for course in made[0].courses) >= 9
