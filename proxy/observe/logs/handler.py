"""From record to line: what is left out, what is written, and word of what got lost."""

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
    """When the line of each was created, and its fields."""

access: Final = logging.getLogger("proxy.access")

ALWAYS: Final = {"is_always_written": True}
"""As `extra` of a log call: such a line is never left out, however many like it come at once."""


def monotonic_zero() -> float:
    """The system's time when the monotonic clock was at 0."""
    return time.time() - time.monotonic()


def access_record(created: float, fields: Mapping[str, object]) -> logging.LogRecord:
    """Return the record of a request for handlers that are not ours.

    It is what `access.info("request")` would make, without a look for the caller and into the process.
    """
    return logging.makeLogRecord({**_ALIKE, "created": created, "msecs": created % 1 * 1000, "fields": fields})


_ALIKE: Final = vars(logging.LogRecord(access.name, logging.INFO, "", 0, "request", (), None))


class LineHandler(logging.Handler):
    """The program's only handler. Its lock, which is logging's, is never held for long: its holder never waits."""

    def __init__(self, writer: LineWriter, formatter: LineFormatter, floods: Floods) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lines = formatter
        self._writer = writer
        self._floods = floods
        self._told_dropped = 0
        self._settle: Callable[[], None] | None = None
        self._settles_on = 0  # the thread

    @property
    def dropped(self) -> int:
        """Lines that were not taken in time."""
        return self._writer.dropped

    @property
    def suppressed(self) -> int:
        """Lines left out because too many like them came at once."""
        return self._floods.suppressed

    def precede(self, settle: Callable[[], None]) -> None:
        """See logs.precede."""
        self._settle, self._settles_on = settle, threading.get_ident()

    def settle_first(self) -> None:
        """Have the lines written that come before the next one."""
        # What another thread has to say stands in no order to them.
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
            # As with every logging handler, a mistake in a log call does not fail what the line is about.
            self._add("proxy.logs", logging.ERROR, f"bad log call in {record.filename}:{record.lineno}", {})
        else:
            self.settle_first()
            self._write(line)

    def flush(self) -> None:
        """Write what had to be kept, and tell of what was left out. To be called now and then."""
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
        # A line at the very end must not be written to a descriptor that is closed.
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
        """Write a line of our own."""
        record = logging.LogRecord(name, level, "", 0, message, None, None)
        record.fields = fields
        # In an empty context, because it is no line of the request that is being worked on.
        self._write(Context().run(self.format, record))


def _kind(record: logging.LogRecord) -> LineKind | None:
    """What a record is counted as, None for one that is never left out."""
    if getattr(record, "is_always_written", False):
        return None
    name = record.name
    is_ours = name.startswith("proxy.") and isinstance(record.msg, str)
    return LineKind(name, record.levelno, record.msg if is_ours else f"{record.filename}:{record.lineno}")


def _kind_of_request(fields: Mapping[str, Any]) -> LineKind | None:
    """The same for the line of a request."""
    term = fields.get("term", "")
    # P: the gateway refused it. R, Q: its client was still sending, or was waiting for its turn.
    has_asked = not term.startswith("P") and not term.endswith(("R", "Q")) and fields.get("instance") != "-"
    return None if has_asked else LineKind(access.name, logging.INFO, "request", term, fields.get("code"))
