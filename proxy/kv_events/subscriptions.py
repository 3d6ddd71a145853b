"""Which instances' KV events are heard, and what all workers and the operator are told of them.

One worker does that for all: it keeps the process that subscribes, says to what, and writes what it tells into the
journal, where the policies of all workers hear it. What is wrong is said once for each instance, and once that it is
over.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy import logs
from proxy.background import Background, BackgroundOwner
from proxy.balancer.cache_count import CacheCount
from proxy.balancer.prefiller import write_count
from proxy.discovery.facts import SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS
from proxy.kv_events.messages import Source
from proxy.kv_events.process import started
from proxy.settings.kv_events import ASK, port_at
from proxy.terms import KV_EVENT_GAPS, KV_EVENTS
from proxy.upstream import engine_json
from proxy.wire.kv_events import configured_sources, parse_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import aiohttp

    from proxy.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys
    from proxy.balancer.health import Health
    from proxy.balancer.journal import Seat
    from proxy.balancer.pool import Pool
    from proxy.kv_events.messages import Told
    from proxy.kv_events.process import Process
    from proxy.observe.metrics import Metrics
    from proxy.settings.kv_events import KvEvents

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_RESTART_SECONDS: Final = (0.5, 60.0)
_MOST_PORT: Final = 65535
_SOURCES_PATH: Final = "/kv_event_sources"
# An engine that has worked at so many looks and published nothing does not publish, or not there.
_SILENT_LOOKS: Final = 120

_NOT_TOLD: Final = (
    "does not tell where it publishes KV events, as vLLM from 0.33 on does at /kv_event_sources and SGLang at "
    "/server_info: was it started with --kv-events-config and publisher zmq? Of older vLLM, name the port by "
    "kv_events.endpoint"
)
_SILENT: Final = (
    "has worked and published no KV events at %s: was it started with --kv-events-config and publisher zmq, with "
    "prefix caching, is that its endpoint, and does its topic begin with %r?"
)


@dataclass(slots=True)
class _Heard:
    """What is known of one instance since it came up."""

    sources: Sequence[Source] | None = None
    """None: it is not known yet, or does not tell."""
    looks: int = 0
    """At which it was seen to work, and nothing had been heard."""
    has_published: bool = False
    is_told_silent: bool = False
    is_told_unreadable: bool = False


class Subscriptions(BackgroundOwner):
    """`async with` it: leaving ends the process."""

    def __init__(
        self,
        *,
        pools: Sequence[Pool],
        health: Health,
        journal: Seat,
        session: aiohttp.ClientSession,
        keys: EngineKeys,
        settings: KvEvents,
        metrics: Metrics,
    ) -> None:
        """`pools`: of the instances whose caches matter. `journal`: the seat that is written here and nowhere else."""
        self._pools = pools
        self._health = health
        self._journal = journal
        self._session = session
        self._keys = keys
        self._settings = settings
        self._metrics = metrics
        self._heard: dict[Backend, _Heard] = {}
        self._background = Background(logger, "the subscription to KV events")

    def _begin(self) -> None:
        self._background.start(self._keep_subscribing())

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
            process.want([source for sources in self._sources() for source in sources])
            await asyncio.sleep(_LOOK_SECONDS)

    def _sources(self) -> Iterator[Sequence[Source]]:
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
                    heard.sources = list(self._configured(backend))
            if heard.sources:
                self._notice_silence(backend, heard)
                yield heard.sources

    def _configured(self, backend: Backend) -> Iterator[Source]:
        settings = self._settings
        assert settings.endpoint is not None
        for rank in range(settings.ranks):
            replay = None
            if settings.replay_endpoint is not None:
                replay = _tcp(backend, port_at(settings.replay_endpoint, backend.port) + rank)
            endpoint = _tcp(backend, port_at(settings.endpoint, backend.port) + rank)
            yield Source(backend.key, endpoint, replay, settings.topic)

    async def _ask(self, backend: Backend, heard: _Heard) -> None:
        """Only ports and topics are taken from what it tells: the host is the instance's own."""
        told = parse_sources(await self._answer(backend, _SOURCES_PATH))
        if told is None:
            told = configured_sources(await self._answer(backend, SERVER_INFO_PATH))
        if self._heard.get(backend) is not heard:
            return
        if not told:
            self._warn(backend, _NOT_TOLD)
            return
        heard.sources = [
            Source(
                backend.key,
                _tcp(backend, source.port),
                None if source.replay_port is None else _tcp(backend, source.replay_port),
                source.topic,
            )
            for source in told
        ]

    async def _answer(self, backend: Backend, path: str) -> Any:
        """None: there is none, or it is no JSON."""
        headers = self._keys.headers(backend)
        try:
            answer = await engine_json.get(self._session, backend.url, path, SERVER_INFO_TIMEOUT_SECONDS, headers)
        except engine_json.NoAnswer:
            return None
        return answer.json_or_none

    def _notice_silence(self, backend: Backend, heard: _Heard) -> None:
        if heard.has_published or heard.is_told_silent:
            return
        heard.looks += any(pool.in_flight(backend) for pool in self._pools)
        if heard.looks >= _SILENT_LOOKS:
            heard.is_told_silent = True
            assert heard.sources is not None
            self._warn(backend, _SILENT, ", ".join(source.endpoint for source in heard.sources), heard.sources[0].topic)

    # What they say

    def _hear(self, told: Told) -> None:
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
        if "unreadable" in told.words and not heard.is_told_unreadable:
            heard.is_told_unreadable = True
            self._warn(backend, "publishes KV events that cannot be read: %s", told.why)
        if not heard.has_published and sum(told.events.values()) > told.events.get("unreadable", 0):
            heard.has_published = True
            logger.info("%s instance %s: its KV events are heard", backend.role, backend.name, extra=logs.ALWAYS)

    def _warn(self, backend: Backend, words: str, *arguments: object) -> None:
        logger.warning(f"%s instance %s {words}", backend.role, backend.name, *arguments, extra=logs.ALWAYS)


def _tcp(backend: Backend, port: int) -> str:
    host = f"[{backend.host}]" if ":" in backend.host else backend.host
    return f"tcp://{host}:{min(port, _MOST_PORT)}"
