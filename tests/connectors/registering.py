"""A prefiller's bootstrap server, as vLLM's MooncakeConnector has one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tests.canned import LoopbackServer, json_answer


def engines_told(*engine_ids: str) -> bytes:
    """Return the answer to `/query` when engines with these IDs have registered as ranks 0, 1 and so on."""
    addresses = {"0": {"0": "tcp://127.0.0.1:1"}}
    return json_answer(
        {str(rank): {"engine_id": name, "worker_addr": addresses} for rank, name in enumerate(engine_ids)}
    )


@dataclass
class BootstrapServer(LoopbackServer):
    """Says `answer` to everything; None: nothing. `closes`: the connection, after it."""

    answer: bytes | None = field(default_factory=lambda: engines_told("engine-0", "engine-1"))
    closes: bool = False
    asked: list[str] = field(default_factory=list)
    """The paths."""
    headers: list[str] = field(default_factory=list)
    """The heads of the requests, whole."""

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.asked.append(head.split(" ")[1])
        self.headers.append(head)
        if self.answer is None:
            await reader.read()
            return False
        writer.write(self.answer)
        return not self.closes
