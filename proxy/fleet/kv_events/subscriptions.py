"""Which instances' KV events are heard, and what all workers and the operator are told of them.

One worker does that for all: it keeps the process that subscribes, says to what, and writes what it tells into the
journal, where the policies of all workers hear it. What is wrong is said once for each instance, and once that it is
over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import proxy
from proxy.balancer.policies.prefiller import write_count
from proxy.balancer.policies.prefixes import CacheCount
from proxy.common.background import Background, BackgroundOwner
from proxy.common.terms import KV_EVENT_GAPS, KV_EVENTS
from proxy.fleet.kv_events import sources
from proxy.fleet.kv_events.messages import InstanceReport, SubscribeTo
from proxy.observe import logs
from proxy.settings.kv_events import ASK
from proxy.upstream import EngineRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from proxy.balancer.engines import EngineKeys
    from proxy.balancer.health import Health
    from proxy.balancer.pool import Pool
    from proxy.balancer.shared.journal import JournalWriter
    from proxy.common.backend import Backend
    from proxy.fleet.kv_events.messages import EventSource
    from proxy.observe.metrics import Metrics
    from proxy.settings.kv_events import KvEvents
    from proxy.upstream import EngineClient, Names
    from proxy.wire import kv_events as wire


_END_SECONDS: Final = 2.0
_LINE_BYTES: Final = 1024 * 1024
_read_told: Final = msgspec.json.Decoder(InstanceReport).decode
_encode: Final = msgspec.json.Encoder().encode


class Process:
    """One that runs; see `started`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._wanted: list[EventSource] | None = None

    def want(self, sources: list[EventSource]) -> None:
        """Have it subscribe to these, and to no others any more."""
        if sources != self._wanted:
            self._wanted = sources
            assert self._process.stdin is not None
            self._process.stdin.write(_encode(SubscribeTo(sources)) + b"\n")

    async def told(self) -> AsyncIterator[InstanceReport]:
        """What it tells, until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield _read_told(line)

    async def ended(self) -> int:
        """Wait for its end, and return its exit code, negative for a signal."""
        return await self._process.wait()


@asynccontextmanager
async def started() -> AsyncIterator[Process]:
    """Leaving ends it. Raises OSError if it cannot be started."""
    # Its own directory comes first, whatever is called `proxy` in the working directory.
    path = os.pathsep.join(filter(None, (str(Path(proxy.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "proxy.fleet.kv_events.subscriber"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield Process(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


logger = logging.getLogger("proxy.kv_events.subscriptions")

_LOOK_SECONDS: Final = 0.25
_RESTART_SECONDS: Final = (0.5, 60.0)
_ASK_AGAIN_SECONDS: Final = 5.0
# An engine that has worked at so many looks and published nothing does not publish, or not there.
_SILENT_LOOKS: Final = 120

_NOT_TOLD: Final = (
    "does not tell where it publishes KV events, as vLLM from 0.32 on does at /kv_event_sources and SGLang at "
    "/server_info: was it started with --kv-events-config and publisher zmq? Of older vLLM, name the port by "
    "kv_events.endpoint"
)
_NO_ANSWER: Final = "does not tell yet where it publishes KV events, and is asked again: %s"
_NOWHERE: Final = "cannot publish KV events where it should: %s"
_UNOPENED: Final = "publishes KV events that cannot be heard, at %s"
_UNREADABLE: Final = "publishes KV events that cannot be read: %s"
_SILENT: Final = (
    "has worked and published no KV events at %s: was it started with --kv-events-config and publisher zmq, with "
    "prefix caching, is that its endpoint, with * for the host (with another it does not listen there, but connects), "
    "and does its topic begin with %r?"
)


@dataclass(slots=True)
class _Heard:
    """What is known of one instance since it came up."""

    sources: Sequence[wire.EventPublisher] = ()
    """None of them: it is not known yet, or there are none."""
    address: str | None = None
    """Where they are heard."""
    looks: int = 0
    """At which it was seen to work, and nothing had been heard."""
    has_published: bool = False
    said: set[str] = field(default_factory=set)
    """What was wrong and is in the log."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubscriptionParts:
    """What subscriptions are made of."""

    pools: Sequence[Pool]
    """Of the instances whose caches matter."""
    health: Health
    journal: JournalWriter
    """Written here and nowhere else."""
    names: Names
    client: EngineClient
    keys: EngineKeys
    settings: KvEvents
    metrics: Metrics


class Subscriptions(BackgroundOwner):
    """`async with` it: leaving ends the process."""

    def __init__(self, parts: SubscriptionParts) -> None:
        self._pools = parts.pools
        self._health = parts.health
        self._journal = parts.journal
        self._names = parts.names
        self._client = parts.client
        self._keys = parts.keys
        self._settings = parts.settings
        self._metrics = parts.metrics
        self._heard: dict[Backend, _Heard] = {}
        self._background = Background(logger, "the subscription to KV events")

    def _begin(self) -> None:
        self._background.keep(self._keep_subscribing, "kv_events", self._metrics.background_restarts_total)

    async def _keep_subscribing(self) -> None:
        pause, most = _RESTART_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            why = await self._subscribe()
            if asyncio.get_running_loop().time() - began > most:
                pause = _RESTART_SECONDS[0]
            logger.warning("KV events: the process that subscribes %s, and is started again in %g s", why, pause)
            await asyncio.sleep(pause)
            pause = min(most, 2 * pause)

    async def _subscribe(self) -> str:
        """Until the process ends; returns why."""
        try:
            async with started() as process, Background(logger, "a look at KV events") as background:
                background.start(self._keep_looking(process))
                async for told in process.told():
                    self._hear(told)
                return f"has ended with code {await process.ended()}"
        except OSError as error:
            return f"cannot be started: {error}"

    # To whom

    async def _keep_looking(self, process: Process) -> None:
        while True:
            process.want(list(self._sources()))
            await asyncio.sleep(_LOOK_SECONDS)

    def _sources(self) -> Iterator[EventSource]:
        """Of the instances that are up: one that was away publishes something new."""
        up = [
            backend for pool in self._pools for backend in pool.backends() if self._health.of(backend).facts is not None
        ]
        for gone in self._heard.keys() - set(up):
            del self._heard[gone]
        for backend in up:
            heard = self._heard.get(backend)
            if heard is None:
                heard = self._heard[backend] = _Heard()
                if self._settings.endpoint == ASK:
                    self._background.start(self._ask(backend, heard))
                else:
                    self._look_up(backend, heard)
            heard.address = sources.address(self._names, backend.host, heard.address)
            if heard.sources and heard.address is not None:
                found = sources.at_address(heard.address, backend, heard.sources)
                self._notice_silence(backend, heard, found)
                yield from found

    def _look_up(self, backend: Backend, heard: _Heard) -> None:
        try:
            heard.sources = sources.configured(self._settings, backend)
        except ValueError as error:
            self._warn(backend, heard, _NOWHERE, error)

    async def _ask(self, backend: Backend, heard: _Heard) -> None:
        """Until it has answered, or is gone."""
        while self._heard.get(backend) is heard:
            try:
                heard.sources = await sources.asked(self._client, self._keys, backend)
                if not heard.sources:
                    self._warn(backend, heard, _NOT_TOLD)
                return
            except ValueError as error:
                self._warn(backend, heard, _NOWHERE, error)
                return
            except EngineRequestError as error:
                self._warn(backend, heard, _NO_ANSWER, error)
            await asyncio.sleep(_ASK_AGAIN_SECONDS)

    def _notice_silence(self, backend: Backend, heard: _Heard, found: Sequence[EventSource]) -> None:
        if heard.has_published or heard.said & {_UNOPENED, _UNREADABLE, _SILENT}:
            return
        heard.looks += any(pool.scoreboard.requests(backend.slot) for pool in self._pools)
        if heard.looks >= _SILENT_LOOKS:
            endpoints = ", ".join(source.endpoint for source in found)
            self._warn(backend, heard, _SILENT, endpoints, found[0].topic)

    # What they say

    def _hear(self, told: InstanceReport) -> None:
        found = next((each for each in self._heard.items() if each[0].key == told.instance), None)
        if found is None:
            return  # it has gone meanwhile
        backend, heard = found
        for kind in KV_EVENTS:
            if count := told.events.get(kind):
                self._metrics.kv_events_total.labels(backend.role.value, backend.name, kind).inc(count)
        for gap in KV_EVENT_GAPS:
            if count := told.words.get(gap):
                self._metrics.kv_event_gaps_total.labels(backend.role.value, backend.name, gap).inc(count)
        write_count(self._journal, backend.slot, CacheCount(*told.count))
        if told.unopened:
            self._warn(backend, heard, _UNOPENED, told.unopened)
        if told.events.get("unreadable"):
            self._warn(backend, heard, _UNREADABLE, told.why)
        if not heard.has_published and sum(told.events.values()) > told.events.get("unreadable", 0):
            heard.has_published = True
            logger.info("%s instance %s: its KV events are heard", backend.role, backend.name, extra=logs.ALWAYS)

    def _warn(self, backend: Backend, heard: _Heard, words: str, *arguments: object) -> None:
        """Once, and not of one that is gone."""
        if words not in heard.said and self._heard.get(backend) is heard:
            heard.said.add(words)
            logger.warning(f"%s instance %s {words}", backend.role, backend.name, *arguments, extra=logs.ALWAYS)
