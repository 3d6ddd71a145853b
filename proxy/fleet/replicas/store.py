"""The store between the gateways of a group: Redis or Valkey.

Each group has one hash, with a field per gateway, and a channel of the same name for news. An exchange is one round
trip of four commands that every version knows (HSET, PEXPIRE, HDEL, HGETALL). The hash expires when no gateway is
left. News are published and not stored (PUBLISH, SUBSCRIBE).
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
    from types import TracebackType

    from proxy.settings import Settings

_KEY: Final = "pdproxy:replicas:{}"
_MAX_TIMEOUT_SECONDS: Final = 1.0
_EXPIRES_AFTER_SECONDS: Final = 300.0
# A connection that only receives notices a dead peer by keepalive probes of the kernel.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}


class StoreError(Exception):
    """The store could not be reached, took too long, or refused a command."""


class StoreCommandRefused(StoreError):
    """The store of shared gateway state refused a command."""


class StorePort(Protocol):
    """One gateway's access to a store. All methods raise StoreError."""

    async def exchange_messages(self, message: bytes, lost_gateways: Collection[str] = ()) -> dict[str, bytes]:
        """Store a message and return all messages by name of the gateway.

        `lost_gateways`: names of messages to delete.
        """

    async def publish_news(self, news: bytes) -> None:
        """Send a message about changes to the gateways that listen now."""

    async def listen_for_news(self, on_news: Callable[[bytes], None]) -> None:
        """Call `on_news` with the news of other gateways until the connection is lost. Passes on its exceptions."""

    async def delete_own_message(self) -> None:
        """Delete this gateway's message from the store."""


class Store:
    """A StorePort for Redis or Valkey, inside `async with`.

    It has one connection each for exchanges, publishing and listening. Each is opened when needed, and reopened after a
    loss.
    """

    def __init__(self, settings: Settings, me: str) -> None:
        """Create the client. `me`: name of this gateway's field."""
        replicas = settings.replicas
        assert replicas.url is not None
        password = replicas.password.get_secret_value() if replicas.password else None
        self._hash_key = _KEY.format(replicas.group)
        self._own_name = me
        self._sender_prefix = f"{me} ".encode()
        # A hanging store must not delay messages for longer than they count.
        self._timeout_seconds = min(_MAX_TIMEOUT_SECONDS, replicas.ttl_seconds / 2)
        self._expires_ms = round(1000 * max(_EXPIRES_AFTER_SECONDS, 2 * replicas.ttl_seconds))
        tcp_options: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
        # The client does not retry: callers do, and the next message replaces a lost one.
        self._redis_client = redis.Redis.from_url(
            replicas.url,
            password=password,
            retry=Retry(NoBackoff(), 0),
            # `_require_answer` limits all commands. The client would use `wait_for`, which in Python 3.11 may lose a
            # cancellation.
            socket_connect_timeout=None,
            socket_timeout=None,
            max_connections=3,
            protocol=2,  # RESP3 begins with HELLO, which servers before Redis 6 do not know
            **({} if replicas.url.startswith("unix:") else tcp_options),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._redis_client.aclose()
        except (RedisError, OSError):
            pass  # the store is gone, and this gateway will be

    async def exchange_messages(self, message: bytes, lost_gateways: Collection[str] = ()) -> dict[str, bytes]:
        pipeline = self._redis_client.pipeline(transaction=False)
        pipeline.hset(self._hash_key, self._own_name, message)
        pipeline.pexpire(self._hash_key, self._expires_ms)
        if lost_gateways:
            pipeline.hdel(self._hash_key, *lost_gateways)
        pipeline.hgetall(self._hash_key)
        async with self._require_answer():
            *_, found = await pipeline.execute()
        return {name.decode(errors="replace"): text for name, text in found.items()}

    async def publish_news(self, news: bytes) -> None:
        async with self._require_answer():
            await self._redis_client.publish(self._hash_key, self._sender_prefix + news)

    async def listen_for_news(self, on_news: Callable[[bytes], None]) -> None:
        async with aclosing(self._receive_news()) as published:
            async for message in published:
                if not message.startswith(self._sender_prefix):
                    on_news(message.partition(b" ")[2])  # its exceptions are no failures of the store

    async def delete_own_message(self) -> None:
        async with self._require_answer():
            await self._redis_client.hdel(self._hash_key, self._own_name)

    async def _receive_news(self) -> AsyncGenerator[bytes, None]:
        """Yield the news of all gateways of the group. Ends only by raising StoreError."""
        async with self._translate_errors(), self._redis_client.pubsub(ignore_subscribe_messages=True) as listener:
            async with self._require_answer():
                await listener.subscribe(self._hash_key)
            while True:
                message = await listener.get_message(timeout=None)
                if message is not None:
                    yield message["data"]

    @asynccontextmanager
    async def _require_answer(self) -> AsyncIterator[None]:
        async with self._translate_errors():
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    yield
            except TimeoutError:
                raise StoreError(f"no answer within {self._timeout_seconds:g} s") from None

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except ResponseError as error:
            raise StoreCommandRefused(str(error)) from None
        except (RedisError, OSError, ValueError) as error:  # ValueError: the server does not speak the protocol
            raise StoreError(str(error) or type(error).__name__) from None
