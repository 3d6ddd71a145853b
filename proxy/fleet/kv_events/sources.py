"""Where an instance publishes KV events: at its own address, at ports that the settings name or that it tells.

ZeroMQ would look names up itself, and ask nobody whether an instance may be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import Failure
from proxy.fleet.discovery.facts import SERVER_INFO_PATH, SERVER_INFO_TIMEOUT_SECONDS
from proxy.fleet.kv_events.messages import EventSource
from proxy.settings.kv_events import port_at
from proxy.upstream import AddressProblem, EngineRequestError
from proxy.wire.kv_events import configured_sources, of_ranks, parse_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.balancer.engines import EngineKeys
    from proxy.common.backend import Backend
    from proxy.settings.kv_events import KvEvents
    from proxy.upstream import EngineClient, Names
    from proxy.wire import kv_events as wire

_SOURCES_PATH: Final = "/kv_event_sources"


def configured(settings: KvEvents, backend: Backend) -> list[wire.EventPublisher]:
    """As `settings` say, which name an endpoint. Raises ValueError where nobody can publish."""
    assert settings.endpoint is not None
    replay = None if settings.replay_endpoint is None else port_at(settings.replay_endpoint, backend.port)
    return of_ranks(settings.ranks, port_at(settings.endpoint, backend.port), replay, settings.topic)


async def asked(client: EngineClient, keys: EngineKeys, backend: Backend) -> list[wire.EventPublisher]:
    """Return the publishers that the engine reports; empty if it reports none.

    Raises EngineRequestError, and ValueError for an address at which no engine can publish.
    """
    told = parse_sources(await _answer(client, keys, backend, _SOURCES_PATH))
    if told is None:
        told = configured_sources(await _answer(client, keys, backend, SERVER_INFO_PATH))
    return told or []


def address(names: Names, host: str, last: str | None) -> str | None:
    """One that the host has, the `last` one as long as that is so; None: none is known yet, or it must not be there.

    Publishers that are told to listen at `*` do so at IPv4 addresses alone.
    """
    try:
        known = names.known(host)
    except AddressProblem:
        return None
    return last if last in known else min(known, key=lambda each: ":" in each, default=None)


def at_address(address: str, backend: Backend, sources: Sequence[wire.EventPublisher]) -> list[EventSource]:
    """The same as endpoints. Whatever host an engine tells, it is the instance's own."""

    host = f"[{address}]" if ":" in address else address
    return [
        EventSource(
            backend.key,
            f"tcp://{host}:{source.port}",
            None if source.replay_port is None else f"tcp://{host}:{source.replay_port}",
            source.topic,
        )
        for source in sources
    ]


async def _answer(client: EngineClient, keys: EngineKeys, backend: Backend, path: str) -> Any:
    """Return the JSON of an engine's answer, or None if it is not JSON.

    Raises EngineRequestError, also for a status that says that the engine has no answer now.
    """
    headers = keys.headers(backend)
    answer = await client.get(backend.url, path, SERVER_INFO_TIMEOUT_SECONDS, headers)
    if answer.status >= 500:
        raise EngineRequestError(Failure.BAD_ANSWER, f"{path} answered {answer.status}")
    return answer.json_or_none
