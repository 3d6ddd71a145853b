"""What a line looks like: text for people at a terminal, JSON for everything else.

Whatever a client manages to get into a value, a line stays one line of bounded length without secrets in it: control
characters, line ends and terminal escapes are written as escapes, and what is too long is cut.
"""

from __future__ import annotations

import json
import logging
import re
import time
from abc import abstractmethod
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import orjson

from proxy.logs.redaction import Redaction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request this task works on; empty outside of requests."""

MAX_VALUE_CHARS: Final = 2048
"""A longer message or value is cut."""
MAX_TRACEBACK_CHARS: Final = 8192
"""Of a longer traceback its first and its last part are shown: where it was called from, and what it was."""

_is_plain: Final = re.compile(r"[!#-<>-\[\]-~]+").fullmatch  # printable ASCII without space, quote, `=` and backslash


class LineFormatter(logging.Formatter):
    """What both formats have in common."""

    def __init__(self, redact: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self._redact = redact or Redaction()

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record)
        # The line of a request that did not fail has only names, numbers and its id.
        is_served = record.name == "proxy.access" and record.fields.get("error") is None  # type: ignore[attr-defined]
        return line if is_served else self._redact(line)

    @abstractmethod
    def _line(self, record: logging.LogRecord) -> str: ...

    def _cut(self, text: str) -> str:
        if len(text) <= MAX_VALUE_CHARS:
            return text
        # A secret is masked before the cut, which could leave a part of it that is not recognised.
        return self._redact(text[: 2 * MAX_VALUE_CHARS])[:MAX_VALUE_CHARS] + "…"

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info:
            return ""
        text = self._redact(self.formatException(record.exc_info))
        half = MAX_TRACEBACK_CHARS // 2
        return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


class TextFormatter(LineFormatter):
    """`2026-01-31T12:00:00.000Z INFO proxy.discovery.prober message key=value`."""

    def _line(self, record: logging.LogRecord) -> str:
        message = self._cut(record.getMessage())
        parts = [
            f"{_timestamp(record.created)} {record.levelname} {record.name}",
            message if message.isprintable() else _escape(message),
        ]
        parts += [f"{name}={self._value(value)}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        # Indented, so that no line of an exception's text can be taken for a record.
        return line + "".join(f"\n    {_escape(part)}" for part in self._traceback(record).split("\n") if part)

    def _value(self, value: object) -> str:
        if isinstance(value, str):
            if len(value) > MAX_VALUE_CHARS:
                value = self._cut(value)
            return value if _is_plain(value) else json.dumps(value)
        if isinstance(value, float):
            return f"{value:.3f}"
        if value is None:
            return "-"
        if isinstance(value, int):
            return str(value).lower()
        return json.dumps(self._cut(str(value)))


class JsonFormatter(LineFormatter):
    """One JSON object per line; the fields of a record are members of it."""

    def _line(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        line = self._dumps(entry)
        if len(line) > MAX_VALUE_CHARS:
            cut = {k: v if isinstance(v, int | float | None) else self._cut(str(v)) for k, v in entry.items()}
            line = self._dumps(cut)
        if traceback := self._traceback(record):
            line = f'{line[:-1]},"traceback":{json.dumps(traceback)}}}'
        return line

    def _dumps(self, entry: Mapping[str, object]) -> str:
        try:
            line = orjson.dumps(entry, default=self._other).decode()
        except TypeError:  # orjson refuses lone surrogates, which Python's own encoder escapes
            line = ""
        return line if line.isprintable() and line else json.dumps(entry, default=self._other)

    def _other(self, value: object) -> str:
        return self._cut(str(value))


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    current = request_id.get()
    return fields if "id" in fields or not current else {"id": current, **fields}


def _escape(text: str) -> str:
    """Everything a terminal or a line-based tool could take for more than a character becomes `\\n`, `\\x1b` …"""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


_second = (0, "")


def _timestamp(created: float) -> str:
    """UTC with milliseconds; the date is formatted once a second."""
    global _second
    whole = int(created)
    if _second[0] != whole:
        _second = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
    return f"{_second[1]}.{int((created - whole) * 1000):03d}Z"
