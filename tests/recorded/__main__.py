"""Writes recordings again: of all conversations, or of those that are named."""

from __future__ import annotations

import sys

import uvloop

from tests.recorded.recording import DIRECTORY, file, recording
from tests.recorded.table import CONVERSATIONS


async def main(names: list[str]) -> None:
    for conversation in CONVERSATIONS:
        if not names or conversation.name in names:
            file(conversation).write_text(await recording(conversation), encoding="utf-8")
    for path in set(DIRECTORY.glob("*.txt")) - set(map(file, CONVERSATIONS)):
        path.unlink()


uvloop.run(main(sys.argv[1:]))
