"""Faults of engines and workers under load, and of an idle gateway, with their alerts.

Each fault lasts as long as its context.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from lab.common.fleet import Gateway
from lab.common.load import Load
from lab.test_observability.site import Site, change
from proxy.sim.engine import SimulatedEngine

_STOPPED_SECONDS: Final = 0.8
_MANY: Final = 200
_FULL_CHECKS: Final = 60
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. Its `alerts` fire only while it lasts."""

    context: Callable[[Site], AbstractAsyncContextManager[None]]
    alerts: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.context.__name__.replace("_", " ")


@contextmanager
def rule(engines: Sequence[SimulatedEngine], *actions: str, **fields: Any) -> Iterator[None]:
    """Let engines misbehave."""
    for engine in engines:
        for action in actions:
            engine.faults.add(action, **fields)
    try:
        yield
    finally:
        for engine in engines:
            engine.faults.clear()


# Under load


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
    worker = site.serving.workers()[-1]
    os.kill(worker, signal.SIGSTOP)
    try:
        await asyncio.sleep(_STOPPED_SECONDS)
    finally:
        os.kill(worker, signal.SIGCONT)
    yield


@asynccontextmanager
async def a_worker_dies(site: Site) -> AsyncIterator[None]:
    os.kill(site.serving.workers()[-1], signal.SIGKILL)
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
    Fault(a_decoder_has_no_kv_connector, ("PdproxyInstanceMisfit", "PdproxyKvComputedAgain", "PdproxyReason")),
    Fault(clients_leave_before_the_hand_over, ("PdproxyKvOrphaned",)),
    Fault(a_decoder_cannot_load_kv, ("PdproxyPairsKeptApart",)),
    Fault(decoders_break_answers_off, ("PdproxyAnswersResumedOften",)),
    Fault(every_decoder_breaks_the_same_answers_off, ("PdproxyAnswersLost",)),
    Fault(many_requests_fail_at_once, ("PdproxyRetryBudgetExhausted",)),
    Fault(a_request_kills_decoders, ("PdproxySuspectRequest",)),
    Fault(some_prefills_are_slow, ("PdproxyFirstTokenSlow",)),
    Fault(more_comes_than_there_is_room_for, ("PdproxyQueueRefuses", "PdproxyImpaired")),
    Fault(a_worker_stands_still, ("PdproxyEventLoopLate",)),
    Fault(a_worker_dies, ("PdproxyWorkerReplaced",)),
)


async def _queue_is_filled(site: Site) -> None:
    """Wait until requests are queued. On a busy machine that takes longer."""
    for _ in range(_FULL_CHECKS):
        if await asyncio.to_thread(site.serving.figure, "queued_requests") > 0:
            return
        await asyncio.sleep(1.0)


async def disturb(site: Site, seconds: float) -> None:
    """Cause several faults briefly, so that every panel has data."""
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
            if fault is more_comes_than_there_is_room_for:
                await _queue_is_filled(site)
            await asyncio.sleep(seconds)


# Faults of an idle gateway


@asynccontextmanager
async def large_bodies_fill_the_memory(site: Site) -> AsyncIterator[None]:
    """Fill the memory of a gateway that is limited to a quarter more than it uses."""
    gateway = site.idle
    mapped = await _mapped_bytes(gateway)
    await asyncio.to_thread(gateway.end)
    gateway.under = ("prlimit", f"--as={int(mapped * 1.25)}")
    await asyncio.to_thread(gateway.restart)
    writers: list[asyncio.StreamWriter] = []
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    try:
        while await _mapped_bytes(gateway) < 0.935 * mapped * 1.25:
            _, writer = await asyncio.open_connection(gateway.host, gateway.port)
            writers.append(writer)
            writer.write(head.format(8 * _MIB).encode() + b'{"prompt": "' + bytes(7 * _MIB))
            await writer.drain()
            await asyncio.sleep(0.2)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()
        # The closed connections free the heap.
        gateway.under = ()


@asynccontextmanager
async def connections_use_the_descriptors_up(site: Site) -> AsyncIterator[None]:
    gateway = site.idle
    process = gateway.pid
    opened = [await asyncio.open_connection(gateway.host, gateway.port) for _ in range(_MANY)]
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{process}/fd"))
    resource.prlimit(process, resource.RLIMIT_NOFILE, (int(used / 0.87), before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
        for _, writer in opened:
            writer.close()


@asynccontextmanager
async def the_new_configuration_is_wrong(site: Site) -> AsyncIterator[None]:
    site.idle.reload(admission={"max_waiting": "many"})
    try:
        yield
    finally:
        site.idle.reload()


@asynccontextmanager
async def a_name_is_not_known(site: Site) -> AsyncIterator[None]:
    gateway = site.idle
    gateway.reload(decode=[*gateway.settings["decode"], "gone.invalid:7100"])
    try:
        yield
    finally:
        gateway.reload()


@asynccontextmanager
async def a_source_of_discovery_fails(site: Site) -> AsyncIterator[None]:
    site.idle.reload(discovery={"files": ["/nowhere/engines.yaml"]})
    try:
        yield
    finally:
        site.idle.reload()


@asynccontextmanager
async def nobody_reads_the_log(site: Site) -> AsyncIterator[None]:
    async def ask(_: int) -> str:
        await site.other_clients.ask(prompt="Hi there, how are you, and what do you want to know?", max_tokens=1)
        return ""

    with site.tap.closed():
        async with Load(ask).at_a_time(16, leaves=True):
            yield


@asynccontextmanager
async def a_prefill_never_ends(site: Site) -> AsyncIterator[None]:
    with rule(site.others[:1], "hang_before_headers", user="stuck"):
        async with site.other_clients.asking("stuck", 0.001, leaves_after=600.0, prompt="Hello " * 100):
            yield


@asynccontextmanager
async def canaries_get_no_answer(site: Site) -> AsyncIterator[None]:
    gateway = site.idle
    with rule(site.others[1:2], "refuse_status", status=500):
        gateway.reload(doctor={"every_seconds": 1.0, "canary_tokens": 64, "canary_seconds": 5.0})
        try:
            yield
        finally:
            gateway.reload()


@asynccontextmanager
async def a_gateway_is_killed(site: Site) -> AsyncIterator[None]:
    await asyncio.to_thread(site.idle.end, signal.SIGKILL)
    try:
        yield
    finally:
        await asyncio.to_thread(site.idle.restart)


async def _mapped_bytes(gateway: Gateway) -> int:
    with open(f"/proc/{gateway.pid}/statm", encoding="ascii") as file:  # noqa: ASYNC230 reads of /proc do not block
        return int(file.read().split()[0]) * resource.getpagesize()


IDLE: Final = (
    Fault(large_bodies_fill_the_memory, ("PdproxyOutOfMemory",)),
    Fault(a_gateway_is_killed, ("PdproxyDown",)),
    Fault(connections_use_the_descriptors_up, ("PdproxyOpenFilesNearLimit",)),
    Fault(the_new_configuration_is_wrong, ("PdproxyReloadFailed",)),
    Fault(canaries_get_no_answer, ("PdproxyCanaryFails",)),
    Fault(a_name_is_not_known, ("PdproxyNameLookupsFail",)),
    Fault(a_source_of_discovery_fails, ("PdproxyDiscoveryFails",)),
    Fault(nobody_reads_the_log, ("PdproxyLogLinesDropped",)),
    Fault(a_prefill_never_ends, ("PdproxyRequestsStuck",)),
)
