"""What the gateways of a group tell each other, by Redis or Valkey: one hash for each group, with a field for each
gateway, and a channel of the same name for what is new.

An exchange is one round trip of four commands that every version has (HSET, PEXPIRE, HDEL, HGETALL). The hash expires
by itself when no gateway is left. What is published (PUBLISH, SUBSCRIBE) is kept nowhere.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from proxy.fleet.replicas.port import StoreFailed, StoreRefused

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
    from types import TracebackType

    from proxy.settings import Settings

_KEY: Final = "pdproxy:replicas:{}"
_MOST_SECONDS: Final = 1.0
_EXPIRES_AFTER_SECONDS: Final = 300.0
# Who only listens finds out that the other side is gone by asking the kernel to look.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}


class Store:
    """One connection for exchanges, one for telling and one for listening, each made when it is needed and again when
    it was lost. A StorePort. `async with` it.
    """

    def __init__(self, settings: Settings, me: str) -> None:
        """`me`: the name of this gateway's field."""
        replicas = settings.replicas
        assert replicas.url is not None
        password = replicas.password.get_secret_value() if replicas.password else None
        self._key = _KEY.format(replicas.group)
        self._me = me
        self._sender = f"{me} ".encode()
        # What hangs must not keep what has been told for longer than that counts.
        self._within_seconds = min(_MOST_SECONDS, replicas.ttl_seconds / 2)
        self._expires_ms = round(1000 * max(_EXPIRES_AFTER_SECONDS, 2 * replicas.ttl_seconds))
        watching: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
        # Who calls repeats by itself, and the next message replaces the one that was lost.
        self._client = redis.Redis.from_url(
            replicas.url,
            password=password,
            retry=Retry(NoBackoff(), 0),
            # Ours is around all. Theirs is `wait_for`, which in Python 3.11 may lose a cancellation.
            socket_connect_timeout=None,
            socket_timeout=None,
            max_connections=3,
            protocol=2,  # RESP3 begins with HELLO, which servers before Redis 6 do not know
            **({} if replicas.url.startswith("unix:") else watching),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(self._within_seconds):
                await self._client.aclose()
        except (RedisError, OSError):
            pass  # it is not there any more, as this gateway will not be

    async def exchange(self, message: bytes, lost: Collection[str] = ()) -> dict[str, bytes]:
        """See StorePort."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hset(self._key, self._me, message)
        pipeline.pexpire(self._key, self._expires_ms)
        if lost:
            pipeline.hdel(self._key, *lost)
        pipeline.hgetall(self._key)
        async with self._answering():
            *_, found = await pipeline.execute()
        return {name.decode(errors="replace"): told for name, told in found.items()}

    async def tell(self, news: bytes) -> None:
        """See StorePort."""
        async with self._answering():
            await self._client.publish(self._key, self._sender + news)

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """See StorePort."""
        async with aclosing(self._published()) as published:
            async for message in published:
                if not message.startswith(self._sender):
                    hear(message.partition(b" ")[2])  # what it raises is no failure of the store

    async def leave(self) -> None:
        """See StorePort."""
        async with self._answering():
            await self._client.hdel(self._key, self._me)

    async def _published(self) -> AsyncGenerator[bytes, None]:
        """Whatever any gateway of the group publishes. Raises StoreFailed, and ends by nothing else."""
        async with self._failing(), self._client.pubsub(ignore_subscribe_messages=True) as listener:
            async with self._answering():
                await listener.subscribe(self._key)
            while True:
                message = await listener.get_message(timeout=None)
                if message is not None:
                    yield message["data"]

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        async with self._failing():
            try:
                async with asyncio.timeout(self._within_seconds):
                    yield
            except TimeoutError:
                raise StoreFailed(f"no answer within {self._within_seconds:g} s") from None

    @asynccontextmanager
    async def _failing(self) -> AsyncIterator[None]:
        try:
            yield
        except ResponseError as error:
            raise StoreRefused(str(error)) from None
        except (RedisError, OSError, ValueError) as error:  # the last one: what answers does not speak the protocol
            raise StoreFailed(str(error) or type(error).__name__) from None
