"""What whole chunks of HTTP/1.1 begin with, by their length: so one is recognised by looking at its first bytes."""

from __future__ import annotations

from typing import Final

MAX_CHUNK_BYTES: Final = 4096
NO_LINE: Final = bytes(MAX_CHUNK_BYTES + 1)
"""Nothing that is no longer than a chunk of this size begins with it."""


def _size_lines() -> list[bytes]:
    lines = [NO_LINE] * (MAX_CHUNK_BYTES + 1)
    for size in range(1, MAX_CHUNK_BYTES - len(b"fff\r\n\r\n")):
        line = b"%x\r\n" % size
        lines[len(line) + size + len(b"\r\n")] = line
    return lines


SIZE_LINES: Final = _size_lines()
"""By the length of a whole chunk, up to MAX_CHUNK_BYTES, what it begins with, such as `a\\r\\n` at 15."""
