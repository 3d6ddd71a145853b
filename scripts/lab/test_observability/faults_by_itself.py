"""What goes wrong with a gateway itself, at the one that serves nobody else, and which alerts tell of it. Each fault
lasts as long as its context, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from lab.test_observability.faults import Fault, rule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lab.test_observability.faults import Site
    from lab.test_observability.fleet import Gateway

_MANY: Final = 200
_MIB: Final = 1024 * 1024


@asynccontextmanager
async def large_bodies_fill_the_memory(site: Site) -> AsyncIterator[None]:
    """As many as it takes, and no more: what is there is limited to a quarter more than it uses."""
    gateway = site.fleet.idle
    mapped = int((await _proc(gateway, "statm")).split()[0]) * resource.getpagesize()
    await gateway.program.end()
    gateway.program.under = ("prlimit", f"--as={int(mapped * 1.25)}")
    await gateway.start()
    host, _, port = gateway.target.partition(":")
    writers: list[asyncio.StreamWriter] = []
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    try:
        while int((await _proc(gateway, "statm")).split()[0]) * resource.getpagesize() < 0.935 * mapped * 1.25:
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(head.format(8 * _MIB).encode() + b'{"prompt": "' + bytes(7 * _MIB))
            await writer.drain()
            await asyncio.sleep(0.2)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()
        # Connections are closed, and the heap is given back.
        gateway.program.under = ()


@asynccontextmanager
async def connections_use_the_descriptors_up(site: Site) -> AsyncIterator[None]:
    gateway = site.fleet.idle
    (process,) = gateway.processes()
    host, _, port = gateway.target.partition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(_MANY)]
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
    site.fleet.idle.reload(admission={"max_waiting": "many"})
    try:
        yield
    finally:
        site.fleet.idle.reload()


@asynccontextmanager
async def a_name_is_not_known(site: Site) -> AsyncIterator[None]:
    gateway = site.fleet.idle
    gateway.reload(decode=[*gateway.settings["decode"], "gone.invalid:7100"])
    try:
        yield
    finally:
        gateway.reload()


@asynccontextmanager
async def a_source_of_discovery_fails(site: Site) -> AsyncIterator[None]:
    site.fleet.idle.reload(discovery={"files": ["/nowhere/engines.yaml"]})
    try:
        yield
    finally:
        site.fleet.idle.reload()


@asynccontextmanager
async def nobody_reads_the_log(site: Site) -> AsyncIterator[None]:
    async def ask() -> None:
        while True:
            await site.others.ask(prompt="Hi there, how are you, and what do you want to know?", max_tokens=1)

    with site.fleet.idle.tap.closed():
        asking = [asyncio.create_task(ask()) for _ in range(16)]
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


@asynccontextmanager
async def a_prefill_never_ends(site: Site) -> AsyncIterator[None]:
    with rule(site.fleet.others[:1], "hang_before_headers", user="stuck"):
        asking = asyncio.create_task(site.others.ask("stuck", leaves_after=600.0, prompt="Hello " * 100))
        try:
            yield
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking


@asynccontextmanager
async def canaries_get_no_answer(site: Site) -> AsyncIterator[None]:
    gateway = site.fleet.idle
    with rule(site.fleet.others[1:2], "refuse_status", status=500):
        gateway.reload(doctor={"every_seconds": 1.0, "canary_tokens": 64, "canary_seconds": 5.0})
        try:
            yield
        finally:
            gateway.reload()


@asynccontextmanager
async def a_gateway_is_killed(site: Site) -> AsyncIterator[None]:
    await site.fleet.idle.program.end(signal.SIGKILL)
    try:
        yield
    finally:
        await site.fleet.idle.start()


async def _proc(gateway: Gateway, name: str) -> str:
    (process,) = gateway.processes()
    with open(f"/proc/{process}/{name}", encoding="ascii") as file:  # noqa: ASYNC230 the kernel does not wait
        return file.read()


BY_ITSELF: Final = (
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
