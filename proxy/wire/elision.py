"""JSON values with the middles of long strings left out: all that is known of a picture is that it is one.

Reading megabytes of base64 takes milliseconds, to look for a quote in them a tenth of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.wire.python_json import utf8
from proxy.wire.weight import LONG_BYTES, is_within_string, load

if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE_BYTES: Final = 64 * 1024
# Stands for so many bytes. Whoever writes it into a prompt is thought to have a longer one.
_MARK: Final = "~64 KiB: 6f1c9e7a~"
_CONTINUES, _CONTINUED = 0x80, 0xC0  # what bytes of UTF-8 lie between that are not the first of a character


def excerpt(raw: bytes | bytearray, start: int, end: int) -> tuple[Any, Callable[[str], int]]:
    """The value of a part of a valid JSON text, and what tells how many bytes one of its strings has as UTF-8.

    The strings are not complete; names are, up to some kilobytes.
    """
    if end - start <= LONG_BYTES:
        return load(memoryview(raw)[start:end]), text_bytes
    kept: list[bytes | memoryview] = []
    text, mark = memoryview(raw), _MARK.encode()
    for piece in range(start, end - _PIECE_BYTES, _PIECE_BYTES):
        behind = piece + _PIECE_BYTES
        if (
            is_within_string(raw, piece, behind)
            and raw.find(b"\\", piece - 1, behind) < 0
            and not any(_CONTINUES <= raw[position] < _CONTINUED for position in (piece, behind))
        ):
            kept += (text[start:piece], mark)
            start = behind
    kept.append(text[start:end])
    return load(b"".join(kept)), _marked_text_bytes


def text_bytes(text: str) -> int:
    """How many bytes a string has in UTF-8."""
    return len(text) if text.isascii() else len(utf8(text))


def _marked_text_bytes(text: str) -> int:
    return text_bytes(text) + text.count(_MARK) * (_PIECE_BYTES - len(_MARK))
