"""A prefiller's bootstrap server, as vLLM's MooncakeConnector has one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tests.canned import json_answer

if TYPE_CHECKING:
    from types import TracebackType


def engines_told(*engine_ids: str) -> bytes:
    """Return the answer to `/query` when engines with these IDs have registered as ranks 0, 1 and so on."""
    addresses = {"0": {"0": "tcp://127.0.0.1:1"}}
    return json_answer(
        {str(rank): {"engine_id": name, "worker_addr": addresses} for rank, name in enumerate(engine_ids)}
    )


@dataclass
class BootstrapServer:
    """Says `answer` to everything; None: nothing. `closes`: the connection, after it."""

    answer: bytes | None = field(default_factory=lambda: engines_told("engine-0", "engine-1"))
    closes: bool = False
    port: int = 0
    asked: list[str] = field(default_factory=list)
    """The paths."""
    headers: list[str] = field(default_factory=list)
    """The heads of the requests, whole."""
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.asked.append(head.split(" ")[1])
                self.headers.append(head)
                if self.answer is None:
                    await reader.read()
                    break
                writer.write(self.answer)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
