"""Queries engines for the data that the checks need."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from proxy.common.backend import Role
from proxy.fleet.discovery.facts import (
    MODELS_PATH,
    SERVER_INFO_PATH,
    SERVER_INFO_TIMEOUT_SECONDS,
    VERSION_PATH,
    facts_of,
    with_setup,
)
from proxy.fleet.inspector import scrape
from proxy.tools.doctor.told import Examined
from proxy.upstream import AddressProblem, EngineClient, EngineRequestError, connect_problem
from proxy.wire.exposition import parse_prompt_tokens

if TYPE_CHECKING:
    from proxy.balancer.engines import EngineKeys
    from proxy.common.backend import Backend
    from proxy.settings import Settings
    from proxy.upstream import BufferedResponse, Names


class Asker:
    """Queries engines. `idle_seconds`: idle time of a connection before the keep-alive check reuses it."""

    def __init__(
        self,
        names: Names,
        client: EngineClient,
        keys: EngineKeys,
        settings: Settings,
        idle_seconds: float,
    ) -> None:
        self._names = names
        self._client = client
        self._keys = keys
        self._settings = settings
        self._idle_seconds = idle_seconds

    async def examine(self, backend: Backend) -> Examined:
        """Query one engine for all that the checks need."""
        examined = Examined(backend=backend)
        try:
            addresses = await self._names.find(backend.host)
        except (AddressProblem, ValueError) as error:
            return replace(examined, name_problem=str(error) or "not a host name")
        connects = await asyncio.gather(*(self._connect(address, backend.port) for address in addresses))
        examined = replace(examined, addresses=addresses, connects=dict(zip(addresses, connects, strict=True)))
        if not examined.is_reached:
            return examined
        examined = await self._ask_health(examined)
        if isinstance(examined.health, str):
            return examined
        (version, models), exposition, keeps_alive = await asyncio.gather(
            self._ask_identity(backend), scrape(self._client, self._keys, backend), self._keeps_alive(backend)
        )
        info = _answer(await self._get(backend, SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS))
        facts = with_setup(facts_of(version, _answer(models)), info)
        return replace(
            examined,
            version=_reported_version(version, info),
            models=models if isinstance(models, str) else models.status,
            facts=facts,
            keeps_alive=keeps_alive,
            has_metrics=exposition is not None,
            counts_prompts=exposition is not None and parse_prompt_tokens(exposition) is not None,
        )

    async def connect_problem(self, host: str, port: int) -> str:
        """Return why a connection fails; empty if it succeeds."""
        try:
            addresses = await self._names.find(host)
        except (AddressProblem, ValueError) as error:
            return str(error) or "not a host name"
        told = [await self._connect(address, port) for address in addresses]
        return "" if any(isinstance(seconds, float) for seconds in told) else str(told[0])

    async def _connect(self, address: str, port: int) -> float | str:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeouts.connect_seconds):
                _, writer = await asyncio.open_connection(address, port)
        except OSError as error:  # TimeoutError is one
            return connect_problem(error)
        writer.close()
        return time.monotonic() - began

    async def _ask_health(self, examined: Examined) -> Examined:
        told = await self._get(examined.backend, self._settings.health.path)
        if isinstance(told, str):
            return replace(examined, health=told)
        return replace(examined, health=told.status, ahead_seconds=_ahead(told))

    async def _ask_identity(self, backend: Backend) -> tuple[BufferedResponse | None, BufferedResponse | str]:
        version, models = await asyncio.gather(self._get(backend, VERSION_PATH), self._get(backend, MODELS_PATH))
        return _answer(version), models

    async def _keeps_alive(self, backend: Backend) -> bool | None:
        """Return whether a connection can be reused; None if unknown. Uses a separate client."""
        reused = asyncio.Event()

        async with EngineClient(self._names, on_reuse=reused.set) as client:
            for pause_seconds in (0.0, self._idle_seconds):
                await asyncio.sleep(pause_seconds)
                if isinstance(await self._get(backend, self._settings.health.path, client=client), str):
                    return None
        return reused.is_set()

    async def _get(
        self,
        backend: Backend,
        path: str,
        timeout_seconds: float | None = None,
        client: EngineClient | None = None,
    ) -> BufferedResponse | str:
        """Return the response, or the reason why there is none."""
        seconds = timeout_seconds or self._settings.health.timeout_seconds
        try:
            headers = self._keys.headers(backend)
            return await (client or self._client).get(backend.url, path, seconds, headers)
        except EngineRequestError as error:
            return str(error)


def bootstrap_place(examined: Examined, settings: Settings) -> tuple[str, int] | None:
    """Return host and port of a prefiller's bootstrap server; None if decoders use none."""
    backend, traits = examined.backend, settings.connector_traits
    if backend.role is not Role.PREFILL or not traits.meets_at_bootstrap:
        return None
    told = examined.facts.identity.setup
    port = backend.bootstrap_port or (told and told.bootstrap_port) or settings.mooncake.bootstrap_port
    return backend.host, port


def _answer(told: BufferedResponse | str) -> BufferedResponse | None:
    return None if isinstance(told, str) else told


def _ahead(answer: BufferedResponse) -> float | None:
    """Return how many seconds the engine's clock is ahead; None without a valid `Date` header."""
    try:
        return parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()  # noqa: TID251 the time of day
    except (KeyError, ValueError, TypeError):
        return None


def _reported_version(version: BufferedResponse | None, info: BufferedResponse | None) -> str | None:
    """Return the version: vLLM reports it at /version, SGLang at /server_info."""
    for answer in (version, info):
        told = answer.json_or_none if answer is not None else None
        found = told.get("version") if isinstance(told, dict) else None
        if isinstance(found, str) and found.isascii() and found.isprintable():
            return found[:40]
    return None
