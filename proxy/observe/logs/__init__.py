"""Logging: one line per event, one per request, with the request's id in every line.

Writing a line never waits for the reader of the log, and too many lines of a kind are left out and counted: neither a
pipe that is not read nor a client that sends nonsense can hold the event loop up or fill the disk. From record to
line: `floods` (is it one too many?), `formats` and `redaction` (what does it look like?), `writer` (who takes it?).
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NamedTuple

from proxy.observe.logs.floods import Floods
from proxy.observe.logs.formats import JsonFormatter, TextFormatter, request_id
from proxy.observe.logs.handler import ALWAYS, LineHandler, access, access_record, monotonic_zero
from proxy.observe.logs.redaction import Redaction
from proxy.observe.logs.request_line import timestamp
from proxy.observe.logs.writer import LineWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proxy.settings import Log

__all__ = [
    "ALWAYS",
    "Lost",
    "Redaction",
    "access_line",
    "access_lines",
    "configure",
    "flush",
    "lost",
    "monotonic_zero",
    "precede",
    "request_id",
    "setup",
    "silenced",
    "timestamp",
]


class Lost(NamedTuple):
    """Lines of this process that are not in the log, since `setup`."""

    dropped: int = 0
    """Nobody took them in time."""
    suppressed: int = 0
    """Too many like them came at once."""


def setup(
    log: Log,
    stream: IO[str] | None = None,
    *,
    secrets: Iterable[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send the program's own records to `stream` (standard output), and warnings of libraries with them.

    `secrets` are masked wherever they turn up, if they have 8 characters or more. A forked process calls this again:
    what the other one could not write yet is left to that one.
    """
    # What no formatter here shows is not collected for every record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    target = stream or sys.stdout or sys.stderr  # Python has None for one that was closed
    root = logging.getLogger()
    for handler in _line_handlers():
        handler.close()
    root.handlers[:] = [] if target is None else [_line_handler(log, target, secrets, clock)]
    root.setLevel(logging.WARNING)
    configure(log.level)


def configure(level: str) -> None:
    """Write no line of the program's own that is less severe than this."""
    logging.getLogger("proxy").setLevel(level)


@contextmanager
def silenced() -> Iterator[None]:
    """In the block the program's own parts write no line: what a sub-command finds it tells in its own way."""
    logger = logging.getLogger("proxy")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def access_line(fields: Mapping[str, object]) -> None:
    """Write the one line of a request that is over now. Durations are in seconds; as text they are cut to milliseconds.

    Of requests that no engine was asked about, which `term` or `instance` tells, too many at once are left out.
    """
    for handler in _line_handlers():
        handler.settle_first()
    access_lines([time.monotonic()], [fields])


def access_lines(ended: Iterable[float], fields: Iterable[Mapping[str, object]]) -> None:
    """Write the lines of several requests at once: when each was over, in seconds of the monotonic clock, and its
    fields, which are not asked for where nobody wants them; see access_line.
    """
    if not access.isEnabledFor(logging.INFO):
        return
    entries = list(zip(map(monotonic_zero().__add__, ended), fields, strict=True))
    # As `access.handle` does it, but for our own handler: a record, a lock and a write for each cost more than it.
    for handler in _handlers(access):
        if isinstance(handler, LineHandler):
            handler.write_requests(entries)
        elif handler.level <= logging.INFO:
            for created, each in entries:
                handler.handle(access_record(created, each))


def precede(settle: Callable[[], None]) -> None:
    """From now on this is called, on the thread of now, before any other line is written: it has those of requests
    written that are over already, which may wait for others, so that lines are in the order of what they tell.
    """
    for handler in _line_handlers():
        handler.precede(settle)


def flush() -> None:
    """Write what had to be kept, and tell of what was left out. To be called now and then."""
    for handler in _line_handlers():
        handler.flush()


def lost() -> Lost:
    """What is not in the log."""
    return next((Lost(handler.dropped, handler.suppressed) for handler in _line_handlers()), Lost())


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Those that its records reach."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


def _line_handlers() -> list[LineHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]


def _line_handler(log: Log, target: IO[str], secrets: Iterable[str], clock: Callable[[], float]) -> LineHandler:
    is_text = log.format == "text" or (log.format == "auto" and target.isatty())
    redaction = Redaction(secrets)
    formatter = TextFormatter(redaction) if is_text else JsonFormatter(redaction)
    return LineHandler(LineWriter(target.fileno()), formatter, Floods(clock))
