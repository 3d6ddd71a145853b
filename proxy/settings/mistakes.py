"""A mistake in the configuration, told in one sentence that names where it was made and what is expected there.

Values of secrets never appear in a sentence.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic import ValidationError

_SHOWN_CHARACTERS = 80


class SettingsError(Exception):
    """The text is one sentence for the operator."""


def explain(error: ValidationError, name_of: Callable[[str], str], secrets: Iterable[str]) -> str:
    """The first of pydantic's complaints as a sentence. `name_of` says where the value of a dotted option came from."""
    first = error.errors(include_url=False)[0]
    option = ".".join(part for part in first["loc"] if isinstance(part, str))
    text = str(first.get("ctx", {}).get("error") or first["msg"])
    if first["type"] in ("int_parsing", "int_from_float", "float_parsing"):
        text = text.partition(",")[0]  # "…, unable to parse string as an integer" repeats the first half
    if not option:
        return text
    text = text.replace("Input should ", "must ", 1)
    if not text.startswith("must "):
        return f"{name_of(option)}: {text}"
    value = "" if option in secrets else f", not {shown(first['input'])}"
    return f"{name_of(option)} {text}{value}"


def shown(value: object) -> str:
    """A value as the operator wrote it, on one line and not too long."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def told(word: str) -> str:
    """A word of the operator's as it is, if that is one word; what is not may hold anything."""
    return word if word.isprintable() and len(word) <= _SHOWN_CHARACTERS else shown(word)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` for a misspelt word, otherwise nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""
