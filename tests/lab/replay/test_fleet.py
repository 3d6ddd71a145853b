"""Replays through the gateway's balancer: times of tokens, released state, and repeatability."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from lab.replay.fleet import Replay, parse_fleet
from lab.replay.policies import peer_names
from lab.replay.trace import Request
from proxy.common.backend import Load


def drawn(count: int, seed: int = 1) -> list[Request]:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 100) for _ in range(count))
    return [
        Request(at, rng.randint(1, 3000), rng.randint(1, 50), tuple(rng.randint(1, 9) for _ in range(3)))
        for at in times
    ]


def test_single_request_takes_prefill_transfer_and_a_step(replayed: Callable[..., Replay]) -> None:
    (course,) = replayed([Request(5.0, 1000, 11, ())]).courses
    assert course.first_token_seconds == pytest.approx(0.1 + 1.0 + 0.0028 + 0.01)
    assert course.token_seconds == pytest.approx(0.01)


def test_two_concurrent_requests_use_two_prefillers(replayed: Callable[..., Replay]) -> None:
    courses = replayed([Request(0.0, 1000, 1, ()), Request(0.0, 1000, 1, ())]).courses
    assert len({course.prefiller for course in courses}) == 2


def test_prompt_is_cached_at_its_prefiller(replayed: Callable[..., Replay]) -> None:
    again = [Request(10.0 * number, 1200, 1, (1, 2, 3)) for number in range(4)]
    courses = replayed(again).courses
    assert [course.cached_tokens for course in courses] == [0, 0, 1024, 1024], "least load takes turns"


def test_running_limit_queues_requests_in_the_gateway(replayed: Callable[..., Replay]) -> None:
    requests = [Request(0.0, 1000, 1, ()) for _ in range(6)]
    assert Counter(course.first_token_seconds is not None for course in replayed(requests).courses) == {True: 6}
    limited = replayed(requests, max_running_prefill=1)
    assert max(course.first_token_seconds or 0.0 for course in limited.courses) == pytest.approx(3 * 1.1, abs=0.1)


def test_requests_are_rejected_after_the_admission_limit(replayed: Callable[..., Replay]) -> None:
    courses = replayed([Request(0.0, 50_000, 1, ()) for _ in range(6)], max_running_prefill=1).courses
    assert [course.first_token_at is None for course in courses] == [False] * 4 + [True] * 2


def test_run_leaves_no_load(replayed: Callable[..., Replay]) -> None:
    replay = replayed(drawn(300))
    assert all(course.ended_at is not None for course in replay.courses)
    assert all(not engine.batch.running + engine.batch.blocks.used for engine in replay.engines.values())
    pools = replay.pools
    for pool in (pools.prefill, pools.decode):
        assert {pool.scoreboard.open_leases(backend.slot) for backend in pool.all_backends()} == {0}
        assert {replay.load(backend) for backend in pool.all_backends()} == {Load()}


def test_run_is_repeatable_with_any_hash_seed() -> None:
    program = (
        "import sys; sys.path[:0] = ['scripts', '.']\n"
        "from tests.lab.replay.test_fleet import drawn\n"
        "from tests.lab.replay.conftest import MACHINE\n"
        "from lab.replay import virtual_time\n"
        "from lab.replay.fleet import Fleet, Replay\n"
        "from lab.replay.policies import CLAIRVOYANT, peer_names, policies\n"
        "fleet = Fleet(3, 2, MACHINE, MACHINE)\n"
        "for name in [*peer_names(), CLAIRVOYANT]:\n"
        "    async def course():\n"
        "        replay = Replay(fleet, *policies(fleet, 'least_tokens')[name], seed=1)\n"
        "        await replay.run(drawn(150))\n"
        "        print(name, [course.ended_at for course in replay.courses])\n"
        "    virtual_time.run(course(), virtual_time.VirtualLoop())\n"
    )
    output = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(output) == 1
    assert len(output.pop().splitlines()) == len(peer_names()) + 1


@pytest.mark.parametrize("text", ["", "8P", "0P8D", "8P0D", "8D8P", "8P8D1", "8P8D:", "8P8D:0", "8P8D:-1", "8P8D:x"])
def test_invalid_fleet_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="8P8D"):
        parse_fleet(text)


def test_fleet_text_has_prefillers_and_decoders() -> None:
    assert parse_fleet("2p16d") == (2, 16, None)
    assert parse_fleet("8P8D:0.5") == (8, 8, 0.5)
