"""The handler of all log lines, and their formats: text for a terminal, and JSON otherwise.

Whatever a client puts into a value, a line stays one line of bounded length without secrets. Control characters, line
ends and terminal escapes are written as escapes, and long values are cut.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from abc import abstractmethod
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.observe.logs.lines import MAX_VALUE_CHARS, REQUEST, LineKind, Redaction, format_timestamp, plain_request_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proxy.observe.logs.lines import FloodLimits, LineWriter

    Requests = Iterable[tuple[float, Mapping[str, object]]]
    """Times and fields of access lines."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task works on; empty outside of requests."""

MAX_TRACEBACK_CHARS: Final = 8192
"""Maximum length of a traceback. The first part of a longer one shows the callers, and the last part the error."""

_is_plain: Final = re.compile(r"[!#-<>-\[\]-~]+").fullmatch  # printable ASCII without space, quote, `=` and backslash


class LineFormatter(logging.Formatter):
    """The common part of the log formats text and JSON."""

    def __init__(self, redact: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self._redact_text = redact or Redaction()

    def format(self, record: logging.LogRecord) -> str:
        line = self._format_line(
            record.created, record.levelname, record.name, record.getMessage(), _record_fields(record)
        )
        return self._redact_text(self._with_traceback(line, self._format_traceback(record)))

    def format_request(self, created: float, fields: Mapping[str, object]) -> bytes:
        """Return the line of a finished request, with its line end. `created`: system time of the end."""
        line = self._format_line(created, **REQUEST, fields=fields)
        # the fields of a request without an error are names, numbers and ids
        return encode_line(line if fields.get("error") is None else self._redact_text(line))

    @abstractmethod
    def _format_line(
        self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]
    ) -> str: ...

    @abstractmethod
    def _with_traceback(self, line: str, traceback: str) -> str:
        """Return the line with a traceback, if `traceback` is not empty."""

    def _shorten_text(self, text: str) -> str:
        if len(text) <= MAX_VALUE_CHARS:
            return text
        # Secrets are masked before the text is cut, because a part of a secret would not be recognised.
        return self._redact_text(text[: 2 * MAX_VALUE_CHARS])[:MAX_VALUE_CHARS] + "…"

    def _format_traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info:
            return ""
        text = self._redact_text(self.formatException(record.exc_info))
        half = MAX_TRACEBACK_CHARS // 2
        return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


class TextFormatter(LineFormatter):
    """`2026-01-31T12:00:00.000Z INFO proxy.discovery.prober message key=value`."""

    def _format_line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        message = self._shorten_text(message)
        parts = [
            f"{format_timestamp(created)} {level} {logger}",
            message if message.isprintable() else _escape(message),
        ]
        parts += [f"{name}={self._format_value(value)}" for name, value in fields.items()]
        return " ".join(parts)

    def _with_traceback(self, line: str, traceback: str) -> str:
        # indented, so that no line of an exception looks like a record
        return line + "".join(f"\n    {_escape(part)}" for part in traceback.split("\n") if part)

    def _format_value(self, value: object) -> str:
        if isinstance(value, str):
            if len(value) > MAX_VALUE_CHARS:
                value = self._shorten_text(value)
            return value if _is_plain(value) else json.dumps(value)
        if isinstance(value, float):
            return f"{value:.3f}"
        if value is None:
            return "-"
        if isinstance(value, int):
            return str(value).lower()
        return json.dumps(self._shorten_text(str(value)))


class JsonFormatter(LineFormatter):
    """One JSON object per line, with the fields of the record as members."""

    def _format_line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> str:
        entry: dict[str, object] = {
            "time": format_timestamp(created),
            "level": level,
            "logger": logger,
            "message": message,
            **fields,
        }
        line = self._dump_json(entry)
        if len(line) > MAX_VALUE_CHARS:
            cut = {k: v if isinstance(v, int | float | None) else self._shorten_text(str(v)) for k, v in entry.items()}
            line = self._dump_json(cut)
        return line

    def format_request(self, created: float, fields: Mapping[str, object]) -> bytes:
        return plain_request_line(created, fields) or super().format_request(created, fields)

    def _with_traceback(self, line: str, traceback: str) -> str:
        return f'{line[:-1]},"traceback":{json.dumps(traceback)}}}' if traceback else line

    def _dump_json(self, entry: Mapping[str, object]) -> str:
        try:
            line = orjson.dumps(entry, default=self._format_other).decode()
        except TypeError:  # orjson refuses lone surrogates, and Python's encoder escapes them
            line = ""
        return line if line.isprintable() and line else json.dumps(entry, default=self._format_other)

    def _format_other(self, value: object) -> str:
        return self._shorten_text(str(value))


def encode_line(line: str) -> bytes:
    """Return a log line with its line end, as bytes."""
    return f"{line}\n".encode(errors="backslashreplace")


def _record_fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    current = request_id.get()
    return fields if "id" in fields or not current else {"id": current, **fields}


def _escape(text: str) -> str:
    r"""Return the text with escapes such as `\n` and `\x1b` for characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


access: Final = logging.getLogger("proxy.access")

ALWAYS: Final = {"is_always_written": True}
"""`extra` of log calls whose line is never left out."""


def monotonic_zero() -> float:
    """Return the system time at 0 of the monotonic clock."""
    return time.time() - time.monotonic()


def access_record(created: float, fields: Mapping[str, object]) -> logging.LogRecord:
    """Return the record of a request for other handlers.

    It equals the record of `access.info("request")`, without the search for the caller and the process.
    """
    return logging.makeLogRecord({**_ALIKE, "created": created, "msecs": created % 1 * 1000, "fields": fields})


_ALIKE: Final = vars(logging.LogRecord(access.name, logging.INFO, "", 0, "request", (), None))


class LineHandler(logging.Handler):
    """The only handler of the program. The holder of its lock, which is logging's, never waits."""

    def __init__(self, writer: LineWriter, formatter: LineFormatter, floods: FloodLimits) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._line_formatter = formatter
        self.line_writer = writer
        self.flood_limits = floods
        self._reported_dropped = 0
        self._settle_callback: Callable[[], None] | None = None
        self._settle_thread_id = 0  # id of the thread

    def call_before_lines(self, settle: Callable[[], None]) -> None:
        self._settle_callback, self._settle_thread_id = settle, threading.get_ident()

    def settle_first(self) -> None:
        """Write the delayed lines that come before the next one."""
        # lines of other threads have no order relative to these
        if self._settle_callback is not None and threading.get_ident() == self._settle_thread_id:
            self._settle_callback()

    def write_requests(self, requests: Requests) -> None:
        """Write the lines of finished requests together."""
        self.acquire()
        try:
            self.line_writer.keep_lines(self._request_lines(requests))
            if self.line_writer.flush_kept():
                self._report_dropped()
        finally:
            self.release()

    def _request_lines(self, requests: Requests) -> Iterator[bytes]:
        for created, fields in requests:
            if fields.get("term") != "--" and (kind := _kind_of_request(fields)) is not None:
                if not self.flood_limits.admits_line(kind):
                    continue
                if suppressed := self.flood_limits.take_suppressed(kind):
                    fields = {**fields, "suppressed": suppressed}
            try:
                line = self._line_formatter.format_request(created, fields)
            except Exception:
                self._add_own_line("proxy.logs", logging.ERROR, "bad line of a request", {})
            else:
                yield line

    def emit(self, record: logging.LogRecord) -> None:
        kind = _kind_of_record(record)
        if kind is not None:
            if not self.flood_limits.admits_line(kind):
                return
            if suppressed := self.flood_limits.take_suppressed(kind):
                record.fields = {**getattr(record, "fields", {}), "suppressed": suppressed}
        try:
            line = self.format(record)
        except Exception:
            # like all logging handlers, because a mistake in a log call must not fail the caller
            self._add_own_line("proxy.logs", logging.ERROR, f"bad log call in {record.filename}:{record.lineno}", {})
        else:
            self.settle_first()
            self._write_line(line)

    def flush(self) -> None:
        """Write delayed lines, and the numbers of lines that were left out. Must be called regularly."""
        self.acquire()
        try:
            for kind in list(self.flood_limits.overdue_kinds()):
                known: dict[str, object] = {
                    "term": kind.term,
                    "code": kind.code,
                    "suppressed": self.flood_limits.take_suppressed(kind),
                }
                fields = {name: value for name, value in known.items() if value}
                self._add_own_line(kind.logger, kind.level, f"left out: {kind.message}", fields)
            if self.line_writer.flush_kept():
                self._report_dropped()
        finally:
            self.release()

    def close(self) -> None:
        # The descriptor may be closed before the last lines of the program.
        logging.getLogger().removeHandler(self)
        super().close()
        self.line_writer.close()

    def _write_line(self, line: str) -> None:
        if self.line_writer.write(encode_line(line)):
            self._report_dropped()

    def _report_dropped(self) -> None:
        dropped = self.line_writer.dropped_lines - self._reported_dropped
        if dropped:
            self._reported_dropped += dropped
            self._add_own_line(
                "proxy.logs", logging.WARNING, "lines were dropped: the log was not read in time", {"dropped": dropped}
            )

    def _add_own_line(self, name: str, level: int, message: str, fields: dict[str, object]) -> None:
        """Write a log line of the handler itself."""
        record = logging.LogRecord(name, level, "", 0, message, None, None)
        record.fields = fields
        # in an empty context, because the line does not belong to the current request
        self._write_line(Context().run(self.format, record))


def _kind_of_record(record: logging.LogRecord) -> LineKind | None:
    """Return the kind of a record for the limits, or None if it is never left out."""
    if getattr(record, "is_always_written", False):
        return None
    name = record.name
    is_ours = name.startswith("proxy.") and isinstance(record.msg, str)
    return LineKind(name, record.levelno, record.msg if is_ours else f"{record.filename}:{record.lineno}")


def _kind_of_request(fields: Mapping[str, Any]) -> LineKind | None:
    """Return the kind of an access line for the limits, or None if it is never left out."""
    term = fields.get("term", "")
    # P: the gateway refused the request. R, Q: the client was still sending, or the request was queued.
    has_asked = not term.startswith("P") and not term.endswith(("R", "Q")) and fields.get("instance") != "-"
    return None if has_asked else LineKind(access.name, logging.INFO, "request", term, fields.get("code"))
