"""Formats of log lines: text for a terminal, and JSON otherwise.

Whatever a client puts into a value, a line stays one line of bounded length without secrets. Control characters, line
ends and terminal escapes are written as escapes, and long values are cut.
"""

from __future__ import annotations

import json
import logging
import re
from abc import abstractmethod
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import orjson

from proxy.observe.logs.redaction import Redaction
from proxy.observe.logs.request_line import MAX_VALUE_CHARS, REQUEST, plain_request_line, timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task works on; empty outside of requests."""

MAX_TRACEBACK_CHARS: Final = 8192
"""Maximum length of a traceback. The first part of a longer one shows the callers, and the last part the error."""

_is_plain: Final = re.compile(r"[!#-<>-\[\]-~]+").fullmatch  # printable ASCII without space, quote, `=` and backslash


class LineFormatter(logging.Formatter):
    """The common part of both formats."""

    def __init__(self, redact: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self._redact = redact or Redaction()

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record.created, record.levelname, record.name, record.getMessage(), _fields(record))
        return self._redact(self._with_traceback(line, self._traceback(record)))

    def request(self, created: float, fields: Mapping[str, object]) -> bytes:
        """Return the line of a finished request, with its line end. `created`: system time of the end."""
        line = self._line(created, **REQUEST, fields=fields)
        # the fields of a request without an error are names, numbers and ids
        return encoded(line if fields.get("error") is None else self._redact(line))

    @abstractmethod
    def _line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str: ...

    @abstractmethod
    def _with_traceback(self, line: str, traceback: str) -> str:
        """Return the line with a traceback, if `traceback` is not empty."""

    def _cut(self, text: str) -> str:
        if len(text) <= MAX_VALUE_CHARS:
            return text
        # Secrets are masked before the text is cut, because a part of a secret would not be recognised.
        return self._redact(text[: 2 * MAX_VALUE_CHARS])[:MAX_VALUE_CHARS] + "…"

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info:
            return ""
        text = self._redact(self.formatException(record.exc_info))
        half = MAX_TRACEBACK_CHARS // 2
        return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


class TextFormatter(LineFormatter):
    """`2026-01-31T12:00:00.000Z INFO proxy.discovery.prober message key=value`."""

    def _line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        message = self._cut(message)
        parts = [
            f"{timestamp(created)} {level} {logger}",
            message if message.isprintable() else _escape(message),
        ]
        parts += [f"{name}={self._value(value)}" for name, value in fields.items()]
        return " ".join(parts)

    def _with_traceback(self, line: str, traceback: str) -> str:
        # indented, so that no line of an exception looks like a record
        return line + "".join(f"\n    {_escape(part)}" for part in traceback.split("\n") if part)

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
    """One JSON object per line, with the fields of the record as members."""

    def _line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        entry: dict[str, object] = {
            "time": timestamp(created),
            "level": level,
            "logger": logger,
            "message": message,
            **fields,
        }
        line = self._dumps(entry)
        if len(line) > MAX_VALUE_CHARS:
            cut = {k: v if isinstance(v, int | float | None) else self._cut(str(v)) for k, v in entry.items()}
            line = self._dumps(cut)
        return line

    def request(self, created: float, fields: Mapping[str, object]) -> bytes:
        return plain_request_line(created, fields) or super().request(created, fields)

    def _with_traceback(self, line: str, traceback: str) -> str:
        return f'{line[:-1]},"traceback":{json.dumps(traceback)}}}' if traceback else line

    def _dumps(self, entry: Mapping[str, object]) -> str:
        try:
            line = orjson.dumps(entry, default=self._other).decode()
        except TypeError:  # orjson refuses lone surrogates, and Python's encoder escapes them
            line = ""
        return line if line.isprintable() and line else json.dumps(entry, default=self._other)

    def _other(self, value: object) -> str:
        return self._cut(str(value))


def encoded(line: str) -> bytes:
    """Return a line with its line end, as bytes."""
    return f"{line}\n".encode(errors="backslashreplace")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    current = request_id.get()
    return fields if "id" in fields or not current else {"id": current, **fields}


def _escape(text: str) -> str:
    r"""Return the text with escapes such as `\n` and `\x1b` for characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
