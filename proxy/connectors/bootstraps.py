"""The bootstrap servers of vLLM's MooncakeConnector. One runs beside each prefiller, and lists the prefiller's engines.

Anyone can add an instance, so any program may answer at its address. Answers are limited in size and time and are
validated, requests carry no credentials, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.endpoints import engine_url
from proxy.common.errors import Failure, UpstreamError
from proxy.upstream import EngineClient, EngineRequestError, make_upstream_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from proxy.common.backend import Backend

# A prefiller takes longer than this to start, so a newer answer comes from the process that runs now.
_FRESH_ANSWER_SECONDS: Final = 5.0
# Attempts that waited for the same answer do not repeat the query within this time.
_PROBLEM_MEMORY_SECONDS: Final = 1.0
_QUERY_TIMEOUT_SECONDS: Final = 2.0
_MAX_ANSWER_BYTES: Final = 1024 * 1024
_MAX_RANKS: Final = 4096
_HEALTH_PATH: Final = "/health"


def bootstrap_address(prefiller: Backend, default_port: int) -> str:
    """Return scheme, host and port of a prefiller's bootstrap server. The gateway and the decoders use this address."""
    return engine_url(prefiller.host, prefiller.bootstrap_port or default_port)


EngineIdsByRank = tuple[tuple[int, str], ...]
"""Pairs of data-parallel rank and engine ID, one for each engine behind a prefiller's address, in the order of ranks.
"""


def parse_engines(answer: bytes) -> EngineIdsByRank:
    """Parse a bootstrap server's answer to `/query`: `{"0": {"engine_id": "…", "worker_addr": {…}}, …}`, by rank.

    The result is empty if no engine has registered yet. Raises ValueError for any other answer.
    """
    entries = orjson.loads(answer)
    if not isinstance(entries, dict) or len(entries) > _MAX_RANKS:
        raise ValueError("the value is not an object of engines by rank")
    return tuple(sorted((_read_rank(rank), _read_engine_id(entry)) for rank, entry in entries.items()))


def _read_rank(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 4):
        raise ValueError("the value is not the number of a rank")
    return int(key)


def _read_engine_id(entry: Any) -> str:
    engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
    if not isinstance(engine_id, str) or not 0 < len(engine_id) <= 256:
        raise ValueError("the value is not the id of an engine")
    return engine_id


@dataclass(slots=True)
class BootstrapServer:
    """The state of one prefiller's bootstrap server, by its last answer."""

    prefiller: Backend
    address: str
    engines: EngineIdsByRank = ()
    problem: tuple[Failure, str] | None = None
    """Why the engines of this prefiller are not known; None if there is no problem."""
    next_query_at: float = 0.0
    """The time of the next query, in seconds on the monotonic clock."""
    lists_own_engine: bool = False
    """Whether a decoder has reached this prefiller through this server, so that the server belongs to the prefiller."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class BootstrapServers:
    """One worker's knowledge of the engines behind each prefiller.

    A server is queried again periodically, and after failures that a restart of its prefiller would explain. While it
    does not answer, its last answer stays valid.
    """

    def __init__(
        self,
        client: EngineClient,
        clock: Callable[[], float] = time.monotonic,
        *,
        report: Callable[[Backend, str | None], None] = lambda *_: None,
        engine_id: Callable[[Backend], str | None] = lambda _: None,
        addresses: Callable[[], Mapping[Backend, str]] = dict,
    ) -> None:
        """Create an empty table of bootstrap servers.

        Args:
            client: The session for queries.
            clock: Returns the time in seconds.
            report: Called with a prefiller and the reason why decoders cannot reach it, or None if they can.
            engine_id: Returns the engine id that a prefiller reports itself, which its bootstrap server must list; None
                if it reports none.
            addresses: Returns the addresses of all prefillers' bootstrap servers.
        """
        self._client = client
        self._clock = clock
        self._report = report
        self._engine_id = engine_id
        self._addresses = addresses
        self._servers: dict[int, BootstrapServer] = {}  # by slot, which are as many as there can be backends

    async def query_engines(self, prefiller: Backend, address: str) -> EngineIdsByRank:
        """Return the engines of a prefiller. Raises UpstreamError if the prefiller cannot be used now."""
        known = self._servers.get(prefiller.slot)
        if known is None or known.prefiller != prefiller or known.address != address:
            known = self._servers[prefiller.slot] = BootstrapServer(prefiller, address)
        if known.engines:
            if self._clock() >= known.next_query_at:
                known.next_query_at = (
                    self._clock() + _QUERY_TIMEOUT_SECONDS
                )  # meanwhile other attempts use the last answer
                await self._refresh_engines(known)
        else:
            async with known.lock:  # one attempt queries for all
                if not known.engines and (known.problem is None or self._clock() >= known.next_query_at):
                    await self._refresh_engines(known)
            if not known.engines:
                assert known.problem is not None
                failure, text = known.problem
                raise make_upstream_error(failure, prefiller, text)
        return known.engines

    def forget_engines(self, prefiller: Backend) -> None:
        """Require a new query of a prefiller's bootstrap server before the prefiller is used again."""
        self._servers.pop(prefiller.slot, None)

    @contextmanager
    def forget_on_failure(self, prefiller: Backend) -> Iterator[None]:
        """Forget a prefiller's engines if the block fails. Other engines may have replaced them. Raises UpstreamError.

        If a decoder fails and two prefillers have the same bootstrap server, the failure counts against this prefiller.
        """
        try:
            yield
        except UpstreamError as error:
            known = self._servers.get(prefiller.slot)
            if not (error.is_backpressure or error.is_fault_of_client):
                self.forget_engines(prefiller)
                if (
                    error.backend != prefiller
                    and known is not None
                    and (other := self._prefiller_with_same_server(known)) is not None
                ):
                    text = "its bootstrap server is another prefiller's"
                    self._report_problem(known, f"{text}: prefill instance {other.name} has the same")
                    raise make_upstream_error(Failure.BOOTSTRAP, prefiller, text) from error
            raise

    def mark_reachable(self, prefiller: Backend) -> None:
        """Record that a decoder has reached the prefiller through its bootstrap server."""
        known = self._servers.get(prefiller.slot)
        if known is not None and not known.lists_own_engine:
            known.lists_own_engine = True
            self._report(prefiller, None)

    def _prefiller_with_same_server(self, known: BootstrapServer) -> Backend | None:
        """Return another prefiller with the same bootstrap server or engines.

        None: there is none, or a decoder has reached this prefiller.
        """
        if known.lists_own_engine:
            return None
        same = [backend for backend, address in self._addresses().items() if address == known.address]
        ids = {engine_id for _, engine_id in known.engines}
        same += [
            other.prefiller
            for other in self._servers.values()
            if ids.intersection(engine_id for _, engine_id in other.engines)
        ]
        return next((backend for backend in same if backend != known.prefiller), None)

    async def _refresh_engines(self, known: BootstrapServer) -> None:
        port = known.address.rpartition(":")[2]
        is_certain = True
        no_server = f"what answers at port {port} is not a bootstrap server of vLLM"
        try:
            engines = parse_engines(await self._fetch_engines(known.address))
            problem = None if engines else (Failure.CONNECT, "no engine has registered with its bootstrap server yet")
            if engines and not self._lists_own_engine(known.prefiller, engines):
                problem = (Failure.BOOTSTRAP, f"the bootstrap server at port {port} is another prefiller's")
        except EngineRequestError as error:
            if error.failure_kind is Failure.TIMEOUT:
                problem = (Failure.CONNECT, f"its bootstrap server did not answer within {_QUERY_TIMEOUT_SECONDS:g} s")
                is_certain = False
            elif error.failure_kind is Failure.CONNECT:
                problem = (
                    Failure.CONNECT,
                    f"its bootstrap server at port {port} cannot be reached ({error.error_reason})",
                )
            else:
                problem = (Failure.BAD_ANSWER, no_server)
        except ValueError:
            problem = (Failure.BAD_ANSWER, no_server)
        if problem is None:
            known.engines, known.problem = engines, None
            known.next_query_at = self._clock() + _FRESH_ANSWER_SECONDS
        elif not known.engines:
            if await self._is_engine_healthy(known.prefiller):
                problem = (Failure.BOOTSTRAP, problem[1])
                if is_certain:
                    self._report_problem(known, problem[1])
            known.problem = problem
            known.next_query_at = self._clock() + _PROBLEM_MEMORY_SECONDS

    def _report_problem(self, known: BootstrapServer, problem: str) -> None:
        self._report(
            known.prefiller,
            f"cannot be met by decoders: {problem}. Is the port right (--prefill URL PORT, mooncake.bootstrap_port), "
            "and was it started with MooncakeConnector as kv_producer?",
        )

    def _lists_own_engine(self, prefiller: Backend, engines: EngineIdsByRank) -> bool:
        """Return whether a bootstrap server lists the engine ID that the prefiller reports. True if it reports none."""
        engine_id = self._engine_id(prefiller)
        return engine_id is None or any(listed.partition("_dp")[0] == engine_id for _, listed in engines)

    async def _is_engine_healthy(self, prefiller: Backend) -> bool:
        """Return whether a prefiller's engine answers a health check. Any status counts as an answer."""
        try:
            await self._client.get_status(prefiller.url, _HEALTH_PATH, _QUERY_TIMEOUT_SECONDS)
        except EngineRequestError:
            return False
        return True

    async def _fetch_engines(self, address: str) -> bytes:
        """Send a query to a bootstrap server and return its answer. Raises EngineRequestError, ValueError.

        The query carries no API key.
        """
        answer = await self._client.get_body(address, "/query", _QUERY_TIMEOUT_SECONDS, max_bytes=_MAX_ANSWER_BYTES)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        return answer.body
