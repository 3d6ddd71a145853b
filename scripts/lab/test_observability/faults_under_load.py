"""What goes wrong at the engines and workers of the gateway under load, and which alerts tell of it. Each fault lasts
as long as its context, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from lab.test_observability.faults import Fault, rule
from lab.test_observability.fleet import change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lab.test_observability.faults import Site

_STOPPED_SECONDS: Final = 0.8


@asynccontextmanager
async def all_prefillers_crash(site: Site) -> AsyncIterator[None]:
    for engine in site.prefill:
        await engine.kill()
    try:
        yield
    finally:
        for engine in site.prefill:
            await engine.restart()


@asynccontextmanager
async def a_decoder_answers_500(site: Site) -> AsyncIterator[None]:
    with rule(site.decode[:1], "refuse_status", status=500):
        yield


@asynccontextmanager
async def a_decoder_has_no_kv_connector(site: Site) -> AsyncIterator[None]:
    await change(site.decode[0], protocol="none")
    try:
        yield
    finally:
        await change(site.decode[0], protocol=None)


@asynccontextmanager
async def clients_leave_before_the_hand_over(site: Site) -> AsyncIterator[None]:
    with rule(site.decode, "slow_headers", seconds=5.0, user="impatient"):
        async with site.clients.asking("impatient", per_second=6.0, leaves_after=1.0):
            yield


@asynccontextmanager
async def a_decoder_cannot_load_kv(site: Site) -> AsyncIterator[None]:
    with rule(site.decode[1:2], "load_failure"):
        yield


@asynccontextmanager
async def decoders_break_answers_off(site: Site) -> AsyncIterator[None]:
    with rule(site.decode, "reset_after_tokens", tokens=3, probability=0.3):
        yield


@asynccontextmanager
async def every_decoder_breaks_the_same_answers_off(site: Site) -> AsyncIterator[None]:
    with rule(site.decode, "reset_after_tokens", tokens=2, user="lost"):
        async with site.clients.asking("lost", per_second=4.0, stream=True, max_tokens=40):
            yield


@asynccontextmanager
async def many_requests_fail_at_once(site: Site) -> AsyncIterator[None]:
    with (
        rule(site.decode, "slow_headers", seconds=1.0, user="many"),
        rule(site.decode, "refuse_status", status=500, user="many"),
    ):
        async with site.clients.asking("many", per_second=20.0):
            yield


@asynccontextmanager
async def a_request_kills_decoders(site: Site) -> AsyncIterator[None]:
    with rule(site.decode, "kill", tokens=2, user="poison"):
        await site.clients.ask("poison", stream=True, max_tokens=40)
        try:
            yield
        finally:
            for engine in site.decode:
                if not engine.is_running:
                    await engine.restart()


@asynccontextmanager
async def some_prefills_are_slow(site: Site) -> AsyncIterator[None]:
    with rule(site.prefill, "slow_headers", seconds=11.0, user="slow"):
        async with site.clients.asking("slow", per_second=4.0, stream=True, max_tokens=4):
            yield


@asynccontextmanager
async def more_comes_than_there_is_room_for(site: Site) -> AsyncIterator[None]:
    with rule(site.decode, "slow_headers", seconds=30.0, user="flood"):
        async with site.clients.asking("flood", per_second=80.0, max_tokens=4):
            yield


@asynccontextmanager
async def a_worker_stands_still(site: Site) -> AsyncIterator[None]:
    worker = site.fleet.serving.processes()[-1]
    os.kill(worker, signal.SIGSTOP)
    try:
        await asyncio.sleep(_STOPPED_SECONDS)
    finally:
        os.kill(worker, signal.SIGCONT)
    yield


@asynccontextmanager
async def a_worker_dies(site: Site) -> AsyncIterator[None]:
    os.kill(site.fleet.serving.processes()[-1], signal.SIGKILL)
    yield


UNDER_LOAD: Final = (
    Fault(
        all_prefillers_crash,
        (
            "PdproxyNoHealthyInstance",
            "PdproxyInstanceDown",
            "PdproxyErrorBudgetBurnFast",
            "PdproxyErrorBudgetBurnSlow",
        ),
    ),
    Fault(a_decoder_answers_500, ("PdproxyInstanceFlapping",)),
    Fault(a_decoder_has_no_kv_connector, ("PdproxyInstanceMisfit", "PdproxyKvComputedAgain")),
    Fault(clients_leave_before_the_hand_over, ("PdproxyKvOrphaned",)),
    Fault(a_decoder_cannot_load_kv, ("PdproxyPairsKeptApart",)),
    Fault(decoders_break_answers_off, ("PdproxyAnswersResumedOften",)),
    Fault(every_decoder_breaks_the_same_answers_off, ("PdproxyAnswersLost",)),
    Fault(many_requests_fail_at_once, ("PdproxyRetryBudgetExhausted",)),
    Fault(a_request_kills_decoders, ("PdproxySuspectRequest",)),
    Fault(some_prefills_are_slow, ("PdproxyFirstTokenSlow",)),
    Fault(more_comes_than_there_is_room_for, ("PdproxyQueueRefuses",)),
    Fault(a_worker_stands_still, ("PdproxyEventLoopLate",)),
    Fault(a_worker_dies, ("PdproxyWorkerReplaced",)),
)


async def disturb(site: Site, seconds: float) -> None:
    """A little of much, so that every panel has something to show."""
    with rule(site.prefill, "refuse_status", status=500):
        await asyncio.sleep(seconds)
    for fault in (
        clients_leave_before_the_hand_over,
        every_decoder_breaks_the_same_answers_off,
        decoders_break_answers_off,
        a_decoder_answers_500,
        more_comes_than_there_is_room_for,
    ):
        async with fault(site):
            await site.clients.send(b"NOT HTTP\r\n\r\n")
            await asyncio.sleep(seconds)
    async with a_decoder_has_no_kv_connector(site):
        await asyncio.sleep(2 * seconds)
