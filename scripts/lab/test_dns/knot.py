"""A real name server, Knot, with one zone that is written anew."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

ZONE = "fleet.test"

_CONFIGURATION = """\
server:
    rundir: "{directory}"
    listen: [ {address}@{port} ]
database:
    storage: "{directory}/db"
log:
  - target: stderr
    any: warning
zone:
  - domain: {zone}
    storage: "{directory}"
    file: "zone"
    zonefile-load: whole
    journal-content: none
"""
_END_SECONDS = 5.0


class Knot:
    """`async with` it. The zone is empty at first."""

    def __init__(self, directory: Path, address: str, port: int) -> None:
        self._directory = directory
        self._serial = 0
        self._process: asyncio.subprocess.Process | None = None
        text = _CONFIGURATION.format(directory=directory, address=address, port=port, zone=ZONE)
        (directory / "knot.conf").write_text(text)

    async def __aenter__(self) -> Self:
        self._write(())
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def start(self) -> None:
        """Serve what was said last."""
        with (self._directory / "knot.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "knotd", "--config", str(self._directory / "knot.conf"), stdout=log, stderr=log
            )

    async def end(self) -> None:
        """Go at once, without a word to anybody."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()

    def say(self, records: Sequence[str]) -> None:
        """The zone is this from now on: lines of a zone file. They count as soon as the server is there."""
        self._write(records)
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGHUP)

    def _write(self, records: Sequence[str]) -> None:
        self._serial += 1
        head = [
            "$TTL 1",
            f"@ SOA ns.{ZONE}. admin.{ZONE}. {self._serial} 60 60 60 1",
            f"@ NS ns.{ZONE}.",
            "ns A 127.0.0.1",
        ]
        new = self._directory / "zone.new"
        new.write_text("\n".join([*head, *records, ""]))
        new.replace(self._directory / "zone")
