"""Turn an input into bytes: words of a vocabulary, and pieces as a network delivers them.

The result is the same for the same input, so that failures can be repeated.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from typing import Final

_SIZES: Final = (1, 1, 2, 3, 5, 8, 20, 100)
_FIRST: Final = 0x80
_LARGE: Final = re.compile(rb"[\x80-\xff]")
_REPEATED: Final = re.compile(r"(.+)\*(\d+)")


def words(text: str) -> tuple[bytes, ...]:
    """Return words separated by white space, in Python's escapes. `x*30` is 30 times x."""
    found = []
    for word in text.split():
        spelling, times = repeated.groups() if (repeated := _REPEATED.fullmatch(word)) else (word, 1)
        found.append(ast.literal_eval(f"b'{spelling}'") * int(times))
    return tuple(found)


def spelled(data: bytes, vocabulary: Sequence[bytes]) -> bytes:
    """Replace bytes above 127 by words, which random bytes would hardly form."""
    return _LARGE.sub(lambda found: b"".join(vocabulary[found[0][0] - _FIRST :][:1]) or found[0], data)


def cut(chance: int, whole: bytes) -> list[bytes]:
    """Cut the bytes into pieces. `chance` determines the sizes."""
    sizes = random.Random(chance)
    pieces = []
    begin = 0
    while begin < len(whole):
        end = begin + sizes.choice(_SIZES)
        pieces.append(whole[begin:end])
        begin = end
    return pieces


def singly(data: bytes) -> list[bytes]:
    """Cut the bytes into single ones."""
    return [data[i : i + 1] for i in range(len(data))]
