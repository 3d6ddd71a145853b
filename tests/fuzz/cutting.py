"""From an input to the bytes that are tried: words, and pieces as a network makes them.

The same for the same input, so that what was found can be found again.
"""

from __future__ import annotations

import ast
import random
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZES: Final = (1, 1, 2, 3, 5, 8, 20, 100)
_FIRST: Final = 0x80
_LARGE: Final = re.compile(rb"[\x80-\xff]")
_REPEATED: Final = re.compile(r"(.+)\*(\d+)")


def words(text: str) -> tuple[bytes, ...]:
    """Words between white space, spelled as in Python; `x*30` is one of 30 times x."""
    found = []
    for word in text.split():
        spelling, times = repeated.groups() if (repeated := _REPEATED.fullmatch(word)) else (word, 1)
        found.append(ast.literal_eval(f"b'{spelling}'") * int(times))
    return tuple(found)


def spelled(data: bytes, vocabulary: Sequence[bytes]) -> bytes:
    """A byte above 127 stands for a word, as long as there are words: single bytes would not come upon it."""
    return _LARGE.sub(lambda found: b"".join(vocabulary[found[0][0] - _FIRST :][:1]) or found[0], data)


def cut(chance: int, whole: bytes) -> list[bytes]:
    """The bytes in pieces; `chance` decides the sizes."""
    sizes = random.Random(chance)
    pieces = []
    begin = 0
    while begin < len(whole):
        end = begin + sizes.choice(_SIZES)
        pieces.append(whole[begin:end])
        begin = end
    return pieces


def singly(data: bytes) -> list[bytes]:
    """Byte by byte."""
    return [data[i : i + 1] for i in range(len(data))]
