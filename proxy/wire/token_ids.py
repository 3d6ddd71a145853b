"""Prompts that are lists of token ids, told by their bytes: to read a hundred thousand numbers takes milliseconds."""

from __future__ import annotations

import re
from typing import Final

_FIRST_ID: Final = re.compile(rb"\[\s*-?[0-9]+\s*[,\]]")


def are_token_ids(value: memoryview) -> bool:
    """Whether a JSON value is a list that begins with a whole number."""
    return _FIRST_ID.match(value) is not None


def count_token_ids(value: memoryview) -> int | None:
    """How many elements a list has that begins with a whole number; None for any other value, and for a list with
    strings, arrays or objects in it.
    """
    if not are_token_ids(value):
        return None
    text = bytes(value)
    if text.find(b"[", 1) >= 0 or b'"' in text or b"{" in text:
        return None
    return text.count(b",") + 1
