"""What the gateways of a group have told, in Redis or Valkey: one hash for each group, with a field for each gateway.

An exchange is one round trip of four commands that every version has (HSET, PEXPIRE, HDEL, HGETALL). The hash expires
by itself when no gateway is left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from proxy.settings import Settings

_KEY: Final = "pdproxy:replicas:{}"
_MOST_SECONDS: Final = 1.0
_EXPIRES_AFTER_SECONDS: Final = 300.0


class StoreFailed(Exception):
    """It could not be reached, took too long, or said no."""


class Store:
    """One connection, made when it is needed and again when it was lost. `async with` it."""

    def __init__(self, settings: Settings, me: str) -> None:
        """`me`: the name of this gateway's field."""
        replicas = settings.replicas
        assert replicas.url is not None
        password = replicas.password.get_secret_value() if replicas.password else None
        self._key = _KEY.format(replicas.group)
        self._me = me
        # What hangs must not keep what has been told for longer than that counts.
        self._within_seconds = min(_MOST_SECONDS, replicas.ttl_seconds / 2)
        self._expires_ms = round(1000 * max(_EXPIRES_AFTER_SECONDS, 2 * replicas.ttl_seconds))
        # Who calls repeats by itself, and the next message replaces the one that was lost.
        self._client = redis.Redis.from_url(
            replicas.url,
            password=password,
            retry=Retry(NoBackoff(), 0),
            # Ours is around all. Theirs is `wait_for`, which in Python 3.11 may lose a cancellation.
            socket_connect_timeout=None,
            socket_timeout=None,
            max_connections=1,
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
        """Tell this, and hear what all have told, by name. `lost`: names that are deleted. Raises StoreFailed."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hset(self._key, self._me, message)
        pipeline.pexpire(self._key, self._expires_ms)
        if lost:
            pipeline.hdel(self._key, *lost)
        pipeline.hgetall(self._key)
        try:
            async with asyncio.timeout(self._within_seconds):
                *_, found = await pipeline.execute()
        except TimeoutError:
            raise StoreFailed(f"no answer within {self._within_seconds:g} s") from None
        except (RedisError, OSError, ValueError) as error:
            raise StoreFailed(str(error) or type(error).__name__) from None
        return {name.decode(errors="replace"): told for name, told in found.items()}

    async def leave(self) -> None:
        """Nothing of this gateway is to be heard any more. Raises StoreFailed."""
        try:
            async with asyncio.timeout(self._within_seconds):
                await self._client.hdel(self._key, self._me)
        except (RedisError, OSError) as error:
            raise StoreFailed(str(error) or type(error).__name__) from None
