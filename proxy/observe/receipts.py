"""The latest requests of all workers, as long as there is room for them, in shared memory: what each worker has written
any other can read, also when the first one has died.

Those that something went wrong with behind the gateway have room of their own, so that they are still there when many
others have come since.
"""

from __future__ import annotations

from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proxy.balancer.shared.journal import Journal
from proxy.logs import monotonic_zero
from proxy.observe.observers import RequestListener
from proxy.observe.receipt import is_troubled, receipt, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.observe.record import RequestRecord

# Numbers take no time to be written in this form. What it does not know, such as a subclass of str, is text.
_encode: Final = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode: Final = msgspec.msgpack.Decoder().decode
# The part of the memory for those in trouble.
_TROUBLED_PART: Final = 4
# So many requests are stored as one piece, which costs less than one by one.
_AT_ONCE: Final = 16


class Receipts:
    """The memory, made before forking. Each worker writes its own part."""

    def __init__(self, workers: int = 1, bytes_per_worker: int = 0) -> None:
        """`bytes_per_worker`: 0: nothing is kept."""
        self.workers = workers
        self.is_kept = bytes_per_worker > 0
        troubled = bytes_per_worker // _TROUBLED_PART
        self._journals = Journal(workers, troubled), Journal(workers, bytes_per_worker - troubled)

    def seat(self, worker: int, redact: Callable[[str], str]) -> ReceiptWriter:
        """What one worker writes with. `redact` masks secrets in what engines say."""
        troubled, others = (journal.seat(worker).write for journal in self._journals)
        return ReceiptWriter(troubled, others, worker, redact)

    def latest(
        self, wants: Callable[[Mapping[str, Any]], bool], limit: int, *, containing: bytes = b""
    ) -> list[dict[str, Any]]:
        """Of the requests that are kept those that are wanted, those that ended last first. `containing`: no other
        piece is looked into; the caller says which text all that are wanted have, in UTF-8.

        Takes milliseconds for each MiB that is looked through, and may be called on any thread.
        """
        rings = [
            self._from(journal, worker, wants, containing)
            for journal in self._journals
            for worker in range(self.workers)
        ]
        return list(islice(merge(*rings, key=lambda told: -told["ended"]), limit))

    def _from(
        self, journal: Journal, worker: int, wants: Callable[[Mapping[str, Any]], bool], containing: bytes
    ) -> Iterator[dict[str, Any]]:
        for piece in journal.latest(worker):
            if containing in piece:
                yield from filter(wants, map(told, reversed(_decode(piece))))


class ReceiptWriter(RequestListener):
    """Keeps what one worker has served."""

    def __init__(
        self,
        write_troubled: Callable[[bytes], None],
        write_others: Callable[[bytes], None],
        worker: int,
        redact: Callable[[str], str],
    ) -> None:
        self._write_troubled = write_troubled
        self._write_others = write_others
        self._worker = worker
        self._redact = redact

    def settle(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        """See RequestListener."""
        zero = monotonic_zero()
        troubled: list[list[Any]] = []
        others: list[list[Any]] = []
        for record in ended:
            row = receipt(record, self._worker, zero, self._redact)
            (troubled if is_troubled(record) else others).append(row)
        for write, rows in ((self._write_troubled, troubled), (self._write_others, others)):
            for first in range(0, len(rows), _AT_ONCE):
                write(_encode(rows[first : first + _AT_ONCE]))
