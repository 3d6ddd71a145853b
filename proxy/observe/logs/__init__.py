"""Logging: one line per event and per request, with the request's id in every line.

Writing never waits for the reader of the log, and too many lines of a kind are left out and counted. So neither an
unread pipe nor a client with bad requests can block the event loop or fill the disk.

A record passes `handler` (its text) and `lines` (limits, masking and output).
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NamedTuple

from proxy.observe.logs.handler import (
    ALWAYS,
    JsonFormatter,
    LineHandler,
    TextFormatter,
    access,
    access_record,
    monotonic_zero,
    request_id,
)
from proxy.observe.logs.lines import FloodLimits, LineWriter, Redaction, format_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proxy.settings import Log

__all__ = [
    "ALWAYS",
    "LostLines",
    "Redaction",
    "access_line",
    "access_lines",
    "call_before_lines",
    "count_lost_lines",
    "flush",
    "format_timestamp",
    "monotonic_zero",
    "request_id",
    "set_level",
    "set_up_logging",
    "silence_log",
]


class LostLines(NamedTuple):
    """Numbers of lines of this process that are not in the log, since `set_up_logging`."""

    dropped: int = 0
    """Lines dropped because the log was not read in time."""
    suppressed: int = 0
    """Lines left out because too many of their kind came at once."""


def set_up_logging(
    log: Log,
    stream: IO[str] | None = None,
    *,
    secrets: Iterable[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send the program's records, and warnings of libraries, to `stream` (None: standard output).

    `secrets` of 8 characters or more are masked in all lines. A forked process calls this again; lines that its parent
    has not written yet stay with the parent.
    """
    # no formatter shows these values, so records do not collect them
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    target = stream or sys.stdout or sys.stderr  # Python sets closed streams to None
    root = logging.getLogger()
    for handler in _line_handlers():
        handler.close()
    root.handlers.clear()
    if target is not None:
        redaction = Redaction(secrets)
        is_text = log.format == "text" or (log.format == "auto" and target.isatty())
        formatter = TextFormatter(redaction) if is_text else JsonFormatter(redaction)
        root.addHandler(LineHandler(LineWriter(target.fileno()), formatter, FloodLimits(clock)))
    root.setLevel(logging.WARNING)
    set_level(log.level)


def set_level(level_name: str) -> None:
    """Set the minimum level of the program's own lines."""
    logging.getLogger("proxy").setLevel(level_name)


@contextmanager
def silence_log() -> Iterator[None]:
    """Write none of the program's own lines inside this context, because a sub-command reports its results itself."""
    logger = logging.getLogger("proxy")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def access_line(line_fields: Mapping[str, object]) -> None:
    """Write the line of a request that has just ended.

    Durations are in seconds, as text with milliseconds. If too many requests come that were sent to no engine, which
    `term` or `instance` shows, some lines are left out.
    """
    for handler in _line_handlers():
        handler.settle_first()
    access_lines([time.monotonic()], [line_fields])


def access_lines(ended_seconds: Iterable[float], fields: Iterable[Mapping[str, object]]) -> None:
    """Write the access log lines of several requests.

    Args:
        ended_seconds: End of each request, in seconds of the monotonic clock.
        fields: Fields of each line; see access_line. An iterator is not read if no line is written.
    """
    if not access.isEnabledFor(logging.INFO):
        return
    entries = list(zip(map(monotonic_zero().__add__, ended_seconds), fields, strict=True))
    # Like `access.handle`, but without a record, a lock and a write for each line, which cost more than the line.
    for handler in _log_handlers(access):
        if isinstance(handler, LineHandler):
            handler.write_requests(entries)
        elif handler.level <= logging.INFO:
            for created, each in entries:
                handler.handle(access_record(created, each))


def call_before_lines(settle: Callable[[], None]) -> None:
    """Call a function before each other line, in the current thread.

    The function writes the lines of finished requests that wait for others, so that lines are in the order of their
    events.
    """
    for handler in _line_handlers():
        handler.call_before_lines(settle)


def flush() -> None:
    """Write delayed lines, and the numbers of lines that were left out. Must be called regularly."""
    for handler in _line_handlers():
        handler.flush()


def count_lost_lines() -> LostLines:
    """Return the numbers of lines that are not in the log."""
    return next(
        (
            LostLines(handler.line_writer.dropped_lines, handler.flood_limits.suppressed_lines)
            for handler in _line_handlers()
        ),
        LostLines(),
    )


def _log_handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Return the handlers that the program's records reach."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


def _line_handlers() -> list[LineHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]
