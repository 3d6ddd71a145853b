"""A recording: the courses of one conversation with `listen.fast_path` on and off, in one file."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.recorded.conversation import Conversation
from tests.recorded.course import course

DIRECTORY: Final = Path(__file__).parent / "conversations"
COMMAND: Final = ".venv/bin/python -m tests.recorded"


def file(conversation: Conversation) -> Path:
    return DIRECTORY / f"{conversation.name}.txt"


async def recording(conversation: Conversation) -> str:
    """Have the conversation with and without the fast path, and return both courses as one text."""
    with TemporaryDirectory() as directory:
        store = cache(lambda: Path(directory))
        other, fast = [await course(conversation, fast_path, store) for fast_path in (False, True)]
    return "".join(_merged(other.splitlines(), fast.splitlines()))


def _merged(other: list[str], fast: list[str]) -> Iterator[str]:
    for kind, from_other, to_other, from_fast, to_fast in SequenceMatcher(None, other, fast, False).get_opcodes():
        if kind == "equal":
            yield from (f" {line}\n" for line in fast[from_fast:to_fast])
        else:
            yield from (f"-{line}\n" for line in other[from_other:to_other])
            yield from (f"+{line}\n" for line in fast[from_fast:to_fast])
