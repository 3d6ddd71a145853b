"""The handler of all log lines: it leaves out floods, formats lines, and reports lost ones."""

from __future__ import annotations

import logging
import threading
import time
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from proxy.observe.logs.floods import LineKind
from proxy.observe.logs.formats import encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proxy.observe.logs.floods import Floods
    from proxy.observe.logs.formats import LineFormatter
    from proxy.observe.logs.writer import LineWriter

    Requests = Iterable[tuple[float, Mapping[str, object]]]
    """Times and fields of access lines."""

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

    def __init__(self, writer: LineWriter, formatter: LineFormatter, floods: Floods) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lines = formatter
        self._writer = writer
        self._floods = floods
        self._told_dropped = 0
        self._settle: Callable[[], None] | None = None
        self._settles_on = 0  # id of the thread

    @property
    def dropped(self) -> int:
        """Return the number of lines that were not written in time."""
        return self._writer.dropped

    @property
    def suppressed(self) -> int:
        """Return the number of lines left out because too many of their kind came at once."""
        return self._floods.suppressed

    def call_before_lines(self, settle: Callable[[], None]) -> None:
        """See logs.call_before_lines."""
        self._settle, self._settles_on = settle, threading.get_ident()

    def settle_first(self) -> None:
        """Write the delayed lines that come before the next one."""
        # lines of other threads have no order relative to these
        if self._settle is not None and threading.get_ident() == self._settles_on:
            self._settle()

    def write_requests(self, requests: Requests) -> None:
        """Write the lines of finished requests together."""
        self.acquire()
        try:
            self._writer.keep(self._request_lines(requests))
            if self._writer.flush():
                self._tell_dropped()
        finally:
            self.release()

    def _request_lines(self, requests: Requests) -> Iterator[bytes]:
        for created, fields in requests:
            if fields.get("term") != "--" and (kind := _kind_of_request(fields)) is not None:
                if not self._floods.admits(kind):
                    continue
                if suppressed := self._floods.tell(kind):
                    fields = {**fields, "suppressed": suppressed}
            try:
                line = self._lines.request(created, fields)
            except Exception:
                self._add("proxy.logs", logging.ERROR, "bad line of a request", {})
            else:
                yield line

    def emit(self, record: logging.LogRecord) -> None:
        kind = _kind(record)
        if kind is not None:
            if not self._floods.admits(kind):
                return
            if suppressed := self._floods.tell(kind):
                record.fields = {**getattr(record, "fields", {}), "suppressed": suppressed}
        try:
            line = self.format(record)
        except Exception:
            # like all logging handlers, because a mistake in a log call must not fail the caller
            self._add("proxy.logs", logging.ERROR, f"bad log call in {record.filename}:{record.lineno}", {})
        else:
            self.settle_first()
            self._write(line)

    def flush(self) -> None:
        """Write delayed lines, and the numbers of lines that were left out. Must be called regularly."""
        self.acquire()
        try:
            for kind in list(self._floods.overdue()):
                known: dict[str, object] = {"term": kind.term, "code": kind.code, "suppressed": self._floods.tell(kind)}
                fields = {name: value for name, value in known.items() if value}
                self._add(kind.logger, kind.level, f"left out: {kind.message}", fields)
            if self._writer.flush():
                self._tell_dropped()
        finally:
            self.release()

    def close(self) -> None:
        # The descriptor may be closed before the last lines of the program.
        logging.getLogger().removeHandler(self)
        super().close()
        self._writer.close()

    def _write(self, line: str) -> None:
        if self._writer.write(encoded(line)):
            self._tell_dropped()

    def _tell_dropped(self) -> None:
        dropped = self._writer.dropped - self._told_dropped
        if dropped:
            self._told_dropped += dropped
            self._add(
                "proxy.logs", logging.WARNING, "lines were dropped: the log was not read in time", {"dropped": dropped}
            )

    def _add(self, name: str, level: int, message: str, fields: dict[str, object]) -> None:
        """Write a line of the handler itself."""
        record = logging.LogRecord(name, level, "", 0, message, None, None)
        record.fields = fields
        # in an empty context, because the line does not belong to the current request
        self._write(Context().run(self.format, record))


def _kind(record: logging.LogRecord) -> LineKind | None:
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
