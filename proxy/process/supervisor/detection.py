"""Connector `auto`: engines are asked once, before any request, so that all workers agree.

One answer of each role suffices, because an engine that is down must not prevent the start. Until then engines are
asked again, as often as instances that are added at run time.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from proxy.balancer.engines import EngineIdentity, EngineKeys, parse_kind, parse_setup
from proxy.balancer.recognition import EngineReport, recognise_connector
from proxy.common.backend import Backend, Role
from proxy.fleet.discovery.sources import configured_instances
from proxy.settings import LoadedSettings, Settings, SettingsError
from proxy.settings.tls import EngineTls, TlsFiles
from proxy.upstream import BufferedResponse, EngineClient, EngineRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


logger = logging.getLogger("proxy.supervisor.detection")

_MODELS_PATH: Final = "/v1/models"
_INFO_PATHS: Final = ("/server_info?config_format=json", "/get_server_info")
# vLLM searches for compilers, drivers and packages at the first question, which takes seconds.
_INFO_TIMEOUT_SECONDS: Final = 30.0


def detect_connector(loaded: LoadedSettings) -> str:
    """Return the configured connector, or for `auto` that of the engines, and log the reason.

    Raises SettingsError if no connector fits all engines, and ConnectionError, in one sentence, if no engine of a role
    has answered.
    """
    settings = loaded.settings
    if settings.connector != "auto":
        return settings.connector
    if not settings.instances_of(Role.PREFILL):
        logger.info("connector: auto selects plain: there are no prefillers")
        return "plain"
    engines, silent = asyncio.run(_query_all_engines(settings, loaded.tls))
    finding = recognise_connector(engines)
    left_out = "".join(f"; {name} did not say ({problem})" for name, problem in silent.items())
    logger.info("connector: auto selects %s: %s%s", finding.connector_name, finding.recognition_reason, left_out)
    return finding.connector_name


def replace_connector(loaded: LoadedSettings, connector: str) -> LoadedSettings:
    """Return the settings with the detected connector, which cannot change later.

    Raises SettingsError if other options do not fit this connector.
    """
    if loaded.settings.connector != "auto":
        return loaded
    try:
        settings = Settings.model_validate(dict(loaded.settings) | {"connector": connector})
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SettingsError(f"connector auto is {connector}: {problem}") from None
    return replace(loaded, settings=settings)


async def _query_all_engines(settings: Settings, files: TlsFiles) -> tuple[list[EngineReport], Mapping[str, str]]:
    """Return the reports of engines, and the problems of engines without an answer. Raises ConnectionError."""
    engines = [backend for backend in configured_instances(settings) if backend.role is not Role.ENCODE]
    key = settings.auth.engine_api_key
    client = EngineClient(tls=EngineTls(lambda: (settings.engines, files)))
    asker = EngineQuerier(client, EngineKeys(key.get_secret_value() if key else None), settings.health.timeout_seconds)
    async with asker:
        for attempt in range(settings.joining.max_attempts):
            if attempt:
                await asyncio.sleep(settings.joining.interval_seconds)
            answers = await asyncio.gather(*map(asker.query_engine, engines))
            reports = [answer for answer in answers if isinstance(answer, EngineReport)]
            silent = {engine.name: a for engine, a in zip(engines, answers, strict=True) if isinstance(a, str)}
            missing = next((engine for engine in engines if engine.role not in {a.role for a in reports}), None)
            if missing is None:
                return reports, silent
            problem = f"no {missing.role} instance says what it is; {missing.name}: {silent[missing.name]}"
            if not attempt:
                logger.info("connector: auto waits for an engine: %s", problem)
    raise ConnectionError(
        f"connector auto: {problem}. To start without asking the engines, set the option connector to a name"
    )


class EngineQuerier:
    """Asks engines, inside `async with`."""

    def __init__(self, client: EngineClient, keys: EngineKeys, timeout_seconds: float) -> None:
        self._keys = keys
        self._timeout_seconds = timeout_seconds
        self._client = client

    async def __aenter__(self) -> None:
        await self._client.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def query_engine(self, engine: Backend) -> EngineReport | str:
        """Return the report of an engine, or the reason why there is none."""
        try:
            answer = await self._get_path(engine, _MODELS_PATH, self._timeout_seconds)
            if answer.status != 200:
                return f"{_MODELS_PATH} answered with status {answer.status}"
            models = answer.parsed_json
        except EngineRequestError as error:
            return str(error)
        except ValueError as error:
            return f"{_MODELS_PATH} failed ({type(error).__name__})"
        setup = parse_setup(await self._query_server_info(engine))
        identity = EngineIdentity(parse_kind(models), engine_setup=setup)
        return EngineReport(engine.role, engine.name, identity, engine.is_elastic)

    async def _query_server_info(self, engine: Backend) -> Any:
        """Return the engine's configuration, or None if it reports none."""
        for path in _INFO_PATHS:
            try:
                answer = await self._get_path(engine, path, _INFO_TIMEOUT_SECONDS)
            except EngineRequestError:
                return None
            if answer.status != 404:
                return answer.parsed_json_or_none if answer.status == 200 else None
        return None

    async def _get_path(self, engine: Backend, path: str, timeout_seconds: float) -> BufferedResponse:
        """Return an engine's answer. Raises EngineRequestError."""
        return await self._client.get_body(engine.url, path, timeout_seconds, self._keys.credential_headers(engine))
