"""Errors in the configuration: one sentence with the place and the expectation, and without values of secrets."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pydantic import ValidationError

_SHOWN_CHARACTERS = 80


class SettingsError(Exception):
    """An error in the configuration, in one sentence for the operator."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises SettingsError for an invalid command line."""

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with the message of argparse."""
        raise SettingsError(message.removeprefix("argument "))


def explain_mistakes(error: ValidationError, name_of: Callable[[str], str], secrets: Iterable[str]) -> str:
    """Return pydantic's first error as a sentence. `name_of` returns the origin of a dotted option."""
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
    value = "" if option in secrets else f", not {printable_value(first['input'])}"
    return f"{name_of(option)} {text}{value}"


def printable_value(value: object) -> str:
    """Return a value as the operator wrote it, on one line, and not too long."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def printable_word(word: str) -> str:
    """Return a single word of the operator as it is, and nothing for other texts, which may contain secrets."""
    return word if word.isprintable() and len(word) <= _SHOWN_CHARACTERS else printable_value(word)


def suggest_known_word(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)` for a misspelt word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def join_alternatives(words: Sequence[str]) -> str:
    """Return words as text: `a`, `a or b`, `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
