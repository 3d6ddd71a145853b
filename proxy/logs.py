"""Logging: one line per event, one per request, with the request's id in every line.

Text for people at a terminal, JSON for everything else. Whatever a client manages to get into a value, a line stays one
line: control characters, line ends and terminal escapes are written as escapes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TextIO

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.settings import Log

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request this task works on; empty outside of requests."""

access: Final = logging.getLogger("proxy.access")

_is_plain: Final = re.compile(r"[!#-<>-\[\]-~]+").fullmatch  # printable ASCII without space, quote, `=` and backslash


def setup(log: Log, stream: TextIO | None = None) -> None:
    """Send the program's own records to `stream` (standard output), and warnings of libraries with them."""
    # What no formatter here shows is not collected for every record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    target = stream or sys.stdout
    is_text = log.format == "text" or (log.format == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("proxy").setLevel(log.level)


def access_line(fields: Mapping[str, object]) -> None:
    """Write the one line of a finished request. Durations are in seconds; as text they are cut to milliseconds."""
    if access.isEnabledFor(logging.INFO):
        # As `access.info` would do it, without looking for the caller.
        record = access.makeRecord(access.name, logging.INFO, "", 0, "request", (), None, extra={"fields": fields})
        access.handle(record)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO proxy.prober message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        parts = [
            f"{_timestamp(record.created)} {record.levelname} {record.name}",
            message if message.isprintable() else _escape(message),
        ]
        parts += [f"{name}={_text_value(value)}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        traceback = _traceback(self, record)
        # Indented, so that no line of an exception's text can be taken for a record.
        return line + "".join(f"\n    {_escape(part)}" for part in traceback.split("\n") if part)


class JsonFormatter(logging.Formatter):
    """One JSON object per line; the fields of a record are members of it."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if traceback := _traceback(self, record):
            entry["traceback"] = traceback
        try:
            line = orjson.dumps(entry, default=str).decode()
        except TypeError:  # orjson refuses lone surrogates, which Python's own encoder escapes
            line = ""
        return line if line.isprintable() and line else json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    current = request_id.get()
    return dict(fields) if "id" in fields or not current else {"id": current, **fields}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


def _text_value(value: object) -> str:
    if isinstance(value, str):
        return value if _is_plain(value) else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value).lower()
    return json.dumps(str(value))


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
