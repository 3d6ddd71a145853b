"""Opens, reuses, checks and closes the connections of one worker to all backends."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from proxy.balancer.stalls import StallDetector
from proxy.common.errors import Failure, UpstreamError
from proxy.upstream.connection import EngineConnection, make_upstream_error
from proxy.upstream.dialing import Dialer
from proxy.upstream.engine_client import EngineRequestError
from proxy.upstream.gathering import TokenGathering, next_round_seconds
from proxy.upstream.names import HostNames, describe_connect_error
from proxy.upstream.pump import NativePump, is_built
from proxy.upstream.response import Response
from proxy.upstream.silences import SilenceChecks, SilenceMonitor, StreamProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import TracebackType

    from proxy.balancer.engines import EngineKeys
    from proxy.common.backend import Backend, Role
    from proxy.settings import Streaming, Timeouts
    from proxy.settings.tls import EngineTls
    from proxy.wire.document import Body

# Engines close an idle connection after 5 s (vLLM VLLM_HTTP_TIMEOUT_KEEP_ALIVE, SGLang SGLANG_TIMEOUT_KEEP_ALIVE). An
# engine whose event loop is late does so even if a request has arrived. This time is shorter, so a reused
# connection which closes without an answer indicates an unhealthy engine. A new connection costs little.
_KEEP_ALIVE_SECONDS: Final = 2.0
# A connection that was opened in advance must last for the time in which most prompts are computed.
_UNUSED_SECONDS: Final = 10.0
_TLS_SHUTDOWN_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UpstreamOptions:
    """The limits and callbacks of an Upstream."""

    stall_seconds: float = 30.0
    """The silence in seconds after which a backend counts as stalled, if other backends of its role send something."""
    on_stall: Callable[[Backend], bool] | None = None
    """Called with a stalled backend. Its streams fail if the call returns True. None: no backend is stalled."""
    silence_seconds: float = 10.0
    """Silence of an answer after which its backend is checked; see settings.HealthChecks."""
    silence_checks: SilenceChecks | None = None
    """Checks why an answer is silent; None: silent answers are not checked."""
    on_backend_output: Callable[[Backend], None] = lambda backend: None
    """Called at each check of silence with each backend that has sent a part of a stream."""
    is_news: Callable[[str, str], bool] = lambda subject, word: True
    """Returns whether a log message about a subject differs from the last one that any worker has logged about it."""
    uses_pump: Callable[[], bool] = lambda: True
    """Returns whether new connections forward tokens in C, if the extension module is built."""
    engine_tls: EngineTls | None = None
    """TLS to engines; None: engines with TLS cannot be reached."""
    sweep_seconds: float | None = None
    """Time between two checks of all connections; None: a quarter of the shortest limit, at most 1 s."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""


class Upstream:
    """One worker's connections to all backends. `async with` it; leaving closes every connection."""

    def __init__(
        self,
        timeouts: Timeouts,
        keys: EngineKeys,
        names: HostNames | None = None,
        options: UpstreamOptions | None = None,
    ) -> None:
        """Create an Upstream without connections.

        Args:
            timeouts: Limits for connecting and for answers.
            keys: Credentials for engines.
            names: Addresses of names; None: each connect asks the system, and any address is accepted.
            options: None: the defaults.
        """
        options = options or UpstreamOptions()
        checks, silence_seconds = options.silence_checks, options.silence_seconds
        self._timeouts = timeouts
        self._request_heads = RequestHeads(keys)
        self._mask_key = keys.mask_key
        self._host_names = names
        self._stall_detector = StallDetector(options.stall_seconds)
        self.paces_by_name: dict[str, tuple[int, float]] = {}
        """Parts of streams since the start by the backend's name, and the total time between them in seconds."""
        self.streamed_parts_by_name: dict[str, int] = {}
        """Parts of streams since the start by the backend's name, with the first ones, which are not timed."""
        self._on_stall = options.on_stall
        self._on_backend_output = options.on_backend_output
        self._silences = None if checks is None else SilenceMonitor(checks, lambda: self._busy)
        self._silence_seconds = silence_seconds
        self._sweep_seconds = options.sweep_seconds or _sweep_seconds(timeouts, options.stall_seconds, silence_seconds)
        self._tls = options.engine_tls
        self._clock = options.clock
        self._uses_pump = options.uses_pump
        self._dialer = Dialer(options.clock, options.is_news)
        self._idle: dict[str, list[EngineConnection]] = {}
        """Idle connections by the key of the backend."""
        self._busy: set[EngineConnection] = set()
        self._distrusted: dict[Role, float] = {}
        """Clock time until which no connection of a role is reused, because the engine had closed a reused one."""
        self._preconnecting: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        """The event loop, set by `__aenter__`."""
        self._pump: NativePump | None = None
        """Forwards tokens in C; None if the module is not built."""
        self._gathering: TokenGathering
        """Reads streams in rounds under load, set by `__aenter__`."""
        self._swept_at = options.clock()
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._swept_at = self._clock()
        self._schedule_sweep()
        if is_built():
            self._pump = NativePump(self._loop)
        self._gathering = TokenGathering(self._loop, self._pump)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._preconnecting:
            task.cancel()
        await asyncio.gather(*self._preconnecting, return_exceptions=True)
        if self._silences is not None:
            await self._silences.cancel_checks()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.abort_connection()
        self._idle.clear()
        self._gathering.set_round_seconds(0.0)
        if self._pump is not None:
            self._pump.close_pump()
        await self._dialer.cancel_attempts()

    def set_limits(self, timeouts: Timeouts, stall_seconds: float, silence_seconds: float = 10.0) -> None:
        """Change the limits for new connections and later checks."""
        self._timeouts = timeouts
        self._stall_detector.stall_seconds = stall_seconds
        self._silence_seconds = silence_seconds
        self._sweep_seconds = _sweep_seconds(timeouts, stall_seconds, silence_seconds)

    def set_gathering(self, busy_share: float, times: Streaming) -> float:
        """Decide how long tokens wait, and return it in seconds. Must be called regularly.

        Args:
            busy_share: The CPU time of the event loop since the last call, as a share of a core.
            times: The settings.
        """
        gathering = self._gathering
        before, seconds = gathering.round_seconds, next_round_seconds(gathering.round_seconds, busy_share, times)
        if seconds != before:
            gathering.set_round_seconds(seconds)
            if not before:
                for connection in self._busy:
                    connection.begin_gathering()
        return seconds

    @property
    def busy_connections(self) -> int:
        """The number of requests to engines that are under way."""
        return len(self._busy)

    async def post_and_await_head(
        self,
        backend: Backend,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        *,
        answer_seconds: float,
        resend_if_stale: bool = False,
    ) -> Response:
        """POST a JSON body, and return the answer after its headers have arrived. Raises UpstreamError.

        Args:
            backend: The engine.
            path: Path of the request.
            body: The JSON body.
            headers: Headers with lower-case names. An `authorization` is that of the client.
            answer_seconds: Limit for the whole answer, or for the headers of a stream; see Response.limit_silence.
            resend_if_stale: Send the request again on a new connection if a *reused* one closes without an answer,
                because the engine may have closed it while it was idle. Must be False for a leg that is not
                repeatable: KV may have been pinned or fetched, so a new attempt with another ID is needed.
        """
        connection = self.take_idle_connection(backend) or await self.open_connection(backend)
        while True:
            arrival: asyncio.Future[None] = connection.loop.create_future()
            response = Response(connection, partial(_resolve_arrival, arrival))
            try:
                connection.begin_exchange(response, path, body, headers, answer_seconds=answer_seconds)
                await arrival
                return response
            except BaseException as error:
                self.return_connection(connection)
                # A new connection is never stale, so the loop ends.
                if not isinstance(error, UpstreamError) or not error.is_stale_connection:
                    raise
                self.stop_reuse_briefly(backend)
                if not resend_if_stale:
                    raise
                stale = error
            try:
                connection = await self.open_connection(backend)
            except UpstreamError:
                raise stale from None  # not CONNECT: the engine may have received the request, and crashed on it

    async def post_and_read_body(
        self,
        backend: Backend,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        *,
        answer_seconds: float,
        resend_if_stale: bool = False,
    ) -> tuple[Response, bytes]:
        """POST a JSON body and return the answer with its whole body.

        See `post_and_await_head`. Raises UpstreamError.
        """
        with await self.post_and_await_head(
            backend, path, body, headers, answer_seconds=answer_seconds, resend_if_stale=resend_if_stale
        ) as response:
            return response, await response.read_body()

    async def get_status(self, backend: Backend, path: str, timeout_seconds: float) -> int:
        """GET a path and return the status of the answer. Raises EngineRequestError.

        A connection that a request has just used carries it, if there is one. A new one is closed afterwards: the next
        request would otherwise take a failure on it for that of an old connection, and be sent again. The connection
        does not count as busy: no client waits for the answer, and an engine with nothing else to do is not silent.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                connection = self.take_idle_connection(backend)
                if connection is not None:
                    try:
                        return await self._ask_status(connection, path)
                    except UpstreamError as error:
                        if not error.is_stale_connection:
                            raise
                    finally:
                        self.return_connection(connection)
                connection = await self.open_connection(backend, timeout_seconds)
                try:
                    return await self._ask_status(connection, path)
                finally:
                    connection.abort_connection()
        except TimeoutError:
            text = f"{path} did not answer within {timeout_seconds:g} s"
            raise EngineRequestError(Failure.TIMEOUT, text) from None
        except UpstreamError as error:
            text = error.message.removeprefix(f"{backend.role.value} instance: ")
            if error.failure is not Failure.CONNECT:
                text = f"{path} failed: {text}"
            raise EngineRequestError(error.failure, text) from None

    async def _ask_status(self, connection: EngineConnection, path: str) -> int:
        self._busy.discard(connection)
        whole: asyncio.Future[None] = self._loop.create_future()
        response = Response(connection)
        response.collect_body(lambda body, error: _resolve_arrival(whole, error))
        connection.begin_get(response, self._request_heads.render_get(connection.backend, path))
        await whole
        return response.status

    # For callers that begin an Exchange. Their connection counts as busy until they return it with `return_connection`.

    async def open_connection(self, backend: Backend, connect_seconds: float | None = None) -> EngineConnection:
        """Open a connection, which the caller must return with `return_connection`. Raises UpstreamError.

        `connect_seconds`: time limit. None: the limit for legs.
        """
        names, host = self._host_names, backend.host
        seconds = self._timeouts.connect_seconds if connect_seconds is None else connect_seconds
        try:
            async with asyncio.timeout(seconds):
                addresses = (
                    (host,) if names is None else names.known_addresses(host) or await names.find_addresses(host)
                )
                if len(addresses) == 1:
                    connection = await self._connect_to(backend, addresses[0])
                else:
                    connect = partial(self._connect_to, backend)
                    connection = await self._dialer.connect_to_first(host, backend.port, addresses, connect, seconds)
                self._busy.add(connection)
                return connection
        except OSError as error:  # TimeoutError is one
            problem = describe_connect_error(error)
        except ValueError:  # an invalid host name
            problem = "not a host name"
        raise make_upstream_error(Failure.CONNECT, backend, f"cannot connect ({problem})")

    def take_idle_connection(self, backend: Backend) -> EngineConnection | None:
        """Take an idle connection, which the caller must return with `return_connection`.

        Return None without a usable one.
        """
        idle = self._idle.get(backend.key)
        if not idle:
            return None
        now = self._clock()
        # The cause that closed one connection, such as a late host or a middlebox, may have closed others. So the next
        # attempt gets a new connection.
        is_distrusted = bool(self._distrusted) and self._distrusted.get(backend.role, now) > now
        while idle:
            connection = idle.pop()
            if (
                not connection.transport.is_closing()
                and connection.usable_until > now
                and connection.backend.tls is backend.tls
                and not (is_distrusted and connection.is_reused)
                and (
                    connection.address is None
                    or self._host_names is None
                    or not self._host_names.is_former_address(backend.host, connection.address)
                )
            ):
                connection.backend = backend  # it may have been added again, with other rights
                self._busy.add(connection)
                return connection
            connection.abort_connection()
        return None

    def return_connection(self, connection: EngineConnection) -> None:
        """Take back a connection. An exchange that has not ended is given up, without further calls to it."""
        self._busy.discard(connection)
        if not connection.is_exchange_complete or connection.is_closed or connection.is_reading_paused:
            connection.release_exchange()
            if connection.is_closed:
                return
        connection.is_reused = True
        connection.usable_until = self._clock() + _KEEP_ALIVE_SECONDS
        self._idle.setdefault(connection.backend.key, []).append(connection)

    def open_in_advance(self, backend: Backend) -> None:
        """Open a connection in advance, unless one is idle. If this fails, the next exchange handles the failure."""
        idle = self._idle.get(backend.key)
        if not idle or idle[-1].usable_until <= self._clock():
            task = self._loop.create_task(self._preconnect(backend))
            self._preconnecting.add(task)
            task.add_done_callback(self._preconnecting.discard)

    def stop_reuse_briefly(self, backend: Backend) -> None:
        """Stop reusing connections of the role briefly, because one was stale (UpstreamError.is_stale_connection)."""
        self._distrusted[backend.role] = self._clock() + _KEEP_ALIVE_SECONDS

    async def _preconnect(self, backend: Backend) -> None:
        with suppress(UpstreamError):
            connection = await self.open_connection(backend)
            self._busy.discard(connection)
            connection.usable_until = self._clock() + _UNUSED_SECONDS
            self._idle.setdefault(connection.backend.key, []).append(connection)

    async def _connect_to(self, backend: Backend, address: str) -> EngineConnection:
        make = partial(self._new_connection, backend, None if address == backend.host else address)
        if backend.tls:
            connection = await self._connect_by_tls(backend, address, make)
        else:
            connection = (await self._loop.create_connection(make, address, backend.port))[1]
        connection.mask_key = self._mask_key
        connection.token_gathering = self._gathering
        if self._pump is not None and self._uses_pump():
            connection.set_pump(self._pump)
        return connection

    async def _connect_by_tls(
        self, backend: Backend, address: str, make: Callable[[], EngineConnection]
    ) -> EngineConnection:
        if self._tls is None:
            raise ConnectionError
        made = await self._loop.create_connection(
            make,
            address,
            backend.port,
            ssl=self._tls.current_context,
            server_hostname=self._tls.server_name or backend.host,
            ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS,
        )
        return made[1]

    def _new_connection(self, backend: Backend, address: str | None) -> EngineConnection:
        return EngineConnection(
            backend, self._loop, self.return_connection, self._request_heads.render_head, self._clock, address
        )

    def count_exchanges(self, backend: Backend) -> int:
        """Return the number of exchanges with a backend that are under way."""
        return sum(connection.backend == backend and not connection.is_closed for connection in self._busy)

    def fail_exchanges(self, backend: Backend, max_exchanges: int, *, spares_inexact: bool = False) -> None:
        """Fail at most `max_exchanges` exchanges of a backend with REMOVED, so that they continue on other backends.

        `spares_inexact`: whether exchanges stay that no other backend could continue exactly.
        """
        under_way = [
            connection
            for connection in self._busy
            if connection.backend == backend
            and not connection.is_closed
            and (not spares_inexact or connection.can_move())
        ]
        for connection in under_way[: max(0, max_exchanges)]:
            connection.abort_connection(make_upstream_error(Failure.REMOVED, backend, "was removed"))

    # One timer checks all exchanges, because a timer per token would cost as much as the token.

    def _schedule_sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(self._sweep_seconds, self._sweep_and_schedule)

    def _sweep_and_schedule(self) -> None:
        self._schedule_sweep()
        self.check_connections()

    def check_connections(self) -> None:
        """Check all connections: fail silent exchanges, and close connections that were idle too long."""
        now = self._clock()
        late_seconds = now - self._swept_at - self._sweep_seconds
        self._swept_at = now
        # If this process was stopped or blocked, data of engines may be waiting unread.
        lost_seconds = late_seconds if late_seconds > 2 * self._sweep_seconds else 0.0
        moves: dict[str, StreamProgress] = {}
        silent: list[EngineConnection] = []
        for connection in list(self._busy):
            parts = connection.check_silence(now, lost_seconds)
            if parts < 0:
                continue
            if not parts:
                silent.append(connection)
            if connection.is_stream:
                backend = connection.backend
                moved = moves.get(backend.key)
                if moved is None:
                    moved = moves[backend.key] = StreamProgress(backend)
                moved.answer_parts += parts
                if parts and connection.moved_seconds:
                    moved.timed_parts += parts
                    moved.timed_seconds += connection.moved_seconds
        for moved in moves.values():
            name = moved.backend.name
            self.streamed_parts_by_name[name] = self.streamed_parts_by_name.get(name, 0) + moved.answer_parts
            if moved.timed_parts:
                total_parts, total_seconds = self.paces_by_name.get(name, (0, 0.0))
                self.paces_by_name[name] = (
                    total_parts + moved.timed_parts,
                    total_seconds + moved.timed_seconds,
                )
        moving = {moved.backend: moved.answer_parts > 0 for moved in moves.values()}
        for backend, is_moving in moving.items():
            if is_moving:
                self._on_backend_output(backend)
        for backend in self._stall_detector.find_stalled_backends(now, moving, lost_seconds=lost_seconds):
            if self._on_stall is not None and self._on_stall(backend):
                self._end_streams(backend)
        if self._silences is not None and self._silence_seconds and not lost_seconds:
            self._silences.check_silences(now, self._sweep_seconds, self._silence_seconds, moves.values(), silent)
        self._close_idle_connections(now)

    def keep_paces(self, names: Collection[str]) -> None:
        """Drop the paces of all backends but these, because the others were removed."""
        for counts in (self.paces_by_name, self.streamed_parts_by_name):
            for name in [name for name in counts if name not in names]:
                del counts[name]

    def quiet_seconds_by_backend(self) -> dict[Backend, tuple[bool, list[float]]]:
        """Return for each backend the time in which nothing of each running exchange had arrived at the last sweep.

        The flag shows whether any answer has begun. Then the list contains only answers that have begun.
        """
        found: dict[Backend, tuple[bool, list[float]]] = {}
        for connection in self._busy:
            if connection.is_over:
                continue
            has_begun = connection.has_begun
            entry = found.get(connection.backend)
            if entry is None or has_begun > entry[0]:
                entry = found[connection.backend] = has_begun, []
            if has_begun == entry[0]:
                # Not until now: after a pause of this process, answers of engines may wait unread.
                entry[1].append(connection.quiet_seconds(self._swept_at))
        return found

    def _end_streams(self, backend: Backend) -> None:
        for connection in list(self._busy):
            if connection.backend == backend and connection.is_stream:
                connection.abort_connection(
                    make_upstream_error(Failure.STALLED, backend, "sends nothing while others do")
                )

    def _close_idle_connections(self, now: float) -> None:
        for key, idle in list(self._idle.items()):
            kept = [c for c in idle if c.is_reusable and now < c.usable_until]
            for connection in set(idle).difference(kept):
                connection.abort_connection()
            if kept:
                self._idle[key] = kept
            else:
                del self._idle[key]


def _resolve_arrival(head_arrival: asyncio.Future[None], error: UpstreamError | None) -> None:
    if not head_arrival.done():
        head_arrival.set_result(None) if error is None else head_arrival.set_exception(error)


def _sweep_seconds(timeouts: Timeouts, stall_seconds: float, silence_seconds: float) -> float:
    shortest: float = min(
        timeouts.prefill_seconds,
        timeouts.handoff_seconds,
        timeouts.first_token_seconds,
        timeouts.answer_seconds,
        timeouts.idle_seconds,
        stall_seconds,
        silence_seconds or stall_seconds,
    )
    return max(0.01, min(1.0, shortest / 4))


# Limits the memory for backends that come and go.
_MAX_KNOWN: Final = 1000


class RequestHeads:
    """Renders the heads of requests to engines, which are mostly the same each time."""

    def __init__(self, keys: EngineKeys) -> None:
        """Store the credentials for engines."""
        self._engine_keys = keys
        self._rendered_beginnings: dict[tuple[str, str, str | None], str] = {}
        """The constant beginnings of heads, by everything on which they depend, so that they never need an update."""

    def render_head(self, backend: Backend, path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
        """Return the head of a POST with a JSON body. `headers`: see Upstream.post_and_await_head."""
        key = self._engine_keys.authorization  # as EngineKeys.credential_headers does
        sent = (key if backend.is_trusted else "") if key else None
        of = backend.name, path, sent
        head = f"{self._rendered_beginnings.get(of) or self._render_beginning(*of)}Content-Length: {body_bytes}\r\n"
        for name, value in headers.items():
            if name != "authorization":
                head += f"{name}: {value}\r\n"
            elif value and sent is None:
                head += f"Authorization: {value}\r\n"
        return (head + "\r\n").encode("utf-8", "surrogateescape")  # as aiohttp decoded the headers of the client

    def render_get(self, backend: Backend, path: str) -> bytes:
        """Return the head of a GET without a body, with the credentials of the gateway."""
        head = f"GET {path} HTTP/1.1\r\nHost: {backend.name}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        for name, value in self._engine_keys.credential_headers(backend).items():
            head += f"{name}: {value}\r\n"
        return (head + "\r\n").encode()

    def _render_beginning(self, host: str, path: str, authorization: str | None) -> str:
        """Render the beginning of a head. `authorization` None: the client's is sent; empty: none is sent."""
        if len(self._rendered_beginnings) >= _MAX_KNOWN:
            self._rendered_beginnings.clear()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
        )
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        self._rendered_beginnings[host, path, authorization] = head
        return head
