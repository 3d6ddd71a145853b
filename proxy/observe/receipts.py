"""Receipts of the latest requests of all workers, in shared memory.

Every worker can read the receipts of all others, also of a worker that has died. Requests with a problem behind the
gateway have a separate part of the memory, so that later requests do not replace them soon.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proxy.balancer.pick import pick_figures
from proxy.balancer.shared.journal import Journal
from proxy.common.errors import UpstreamError
from proxy.common.terms import Stage
from proxy.observe.logs import format_timestamp, monotonic_zero
from proxy.observe.observers import RequestListener
from proxy.observe.record import FACTS, AccessFacts, access_line, fact_values_of
from proxy.observe.timeline import NO_STAGE, stage_letters, stage_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.balancer.pick import Pick
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import AttemptFailure, AttemptRecord


_MAX_CHARS: Final = 512
# Limits for one request. The number of omitted attempts is kept.
_MAX_ATTEMPTS: Final = 16
# Limit for one choice: the best candidates, including the chosen one.
_MAX_CANDIDATES: Final = 8
_DIGITS: Final = 6
# Names of an attempt's fields, as in the access line.
_NAMES: Final = ("p", "d", "p_id", "d_id", "kv")


def make_receipt(
    record: RequestRecord, worker_number: int, clock_zero: float, redact: Callable[[str], str]
) -> list[Any]:
    """Return the receipt of a request, of plain values; see `receipt_fields`.

    `clock_zero`: system time at 0 of the record's clock.
    """
    facts, error, model = record.facts, record.error, record.model
    if error is not None and facts.error is not None:
        facts = replace(facts, error=_readable_text(redact(str(facts.error))))
    history: list[list[Any]] = []
    for unit, timeline in enumerate(record.timelines):
        if timeline.past_attempts:
            history += [_attempt_row(unit, attempt, redact, is_in_line=False) for attempt in timeline.past_attempts]
        if timeline.attempts:
            history.append(_attempt_row(unit, timeline, redact, is_in_line=not unit))
    left_out = max(0, len(history) - _MAX_ATTEMPTS)
    return [
        fact_values_of(facts),
        model if type(model) is str and len(model) <= _MAX_CHARS and model.isascii() else _readable_text(model),
        error.backend.name if isinstance(error, UpstreamError) else None,
        worker_number,
        record.started,
        clock_zero + record.ended,
        history[:_MAX_ATTEMPTS] if left_out else history,
        left_out,
    ]


def receipt_fields(receipt_row: Sequence[Any]) -> dict[str, Any]:
    """Return the receipt's values by name; see `receipt_for_operators`."""
    facts, model, backend, worker, started, ended, history, left_out = receipt_row
    fields = access_line(AccessFacts(**dict(zip(FACTS, facts, strict=True))))
    receipt_values = {
        **fields,
        "model": model,
        "backend": backend,
        "worker": worker,
        "started": started,
        "ended": ended,
        "history": [_attempt_fields(attempt, fields) for attempt in history],
    }
    return {**receipt_values, "attempts_left_out": left_out} if left_out else receipt_values


def receipt_for_operators(receipt_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a receipt in the form that operators see.

    It has the `time` of the end, the `worker`, and the fields of the access line. `model` is the client's name of the
    model (null: none). `backend` is the instance that caused the error (null: none). `history` has each attempt of each
    unit.
    """
    rest = {name: value for name, value in receipt_values.items() if name not in ("started", "ended", "history")}
    history = [_display_attempt(attempt, receipt_values["started"]) for attempt in receipt_values["history"]]
    return {"time": format_timestamp(receipt_values["ended"]), **rest, "history": history}


def is_troubled(record: RequestRecord) -> bool:
    """Return whether there was a problem behind the gateway.

    An engine failed or was too slow, even if another engine served the request, or the answer was cut. Refusals of the
    gateway and clients that left do not count.
    """
    if record.error is not None and record.outcome.termination_code[0] in "SscK":
        return True
    for timeline in record.timelines:  # noqa: SIM110 - a generator takes longer
        if timeline.past_attempts:
            return True
    return False


def names_instance(receipt_values: Mapping[str, Any], instance: str) -> bool:
    """Return whether any attempt sent the request to an instance, given as `host:port`."""
    return any(
        instance in {attempt["p"], attempt["d"], *_replaced_legs(attempt, "instance")}
        for attempt in receipt_values["history"]
    )


def was_saved(receipt_values: Mapping[str, Any]) -> bool:
    """Return whether the request was answered although an instance failed it before."""
    return receipt_values["term"] == "--" and any(
        attempt["failure"] is not None for attempt in receipt_values["history"]
    )


def names_engine_id(receipt_values: Mapping[str, Any], engine_id: str) -> bool:
    """Return whether an engine knows a request by this id.

    Engines add to the id that a leg was sent with: vLLM writes `chatcmpl-` before it, and more after it.
    """
    return any(
        sent != "-" and sent in engine_id
        for attempt in receipt_values["history"]
        for sent in (attempt["p_id"], attempt["d_id"], *_replaced_legs(attempt, "id"))
    )


def _replaced_legs(attempt: Mapping[str, Any], name: str) -> list[str]:
    """Return the instances (`name` "instance") or ids (`name` "id") of legs that were replaced by others."""
    return [leg[name] for leg in attempt["left"]]


# Writing


def _failure_fields(failure: AttemptFailure, redact: Callable[[str], str]) -> dict[str, str | None]:
    return {**failure._asdict(), "message": _readable_text(redact(failure.message))}


def _attempt_row(unit: int, attempt: AttemptRecord, redact: Callable[[str], str], *, is_in_line: bool) -> list[Any]:
    """Return the row of an attempt. `is_in_line`: the access line has its instances and ids."""
    prefill, decode = attempt.prefill_pick, attempt.decode_pick
    prefill_reason, decode_reason = attempt.reasons
    course, _ = stage_letters(tuple(attempt.entered_stages))
    row: list[Any] = [
        unit,
        attempt.continues_answer,
        None if attempt.failure is None else _failure_fields(attempt.failure, redact),
        course,
        attempt.stage_times,
        None if prefill is None else _choice_row(prefill, prefill_reason),
        None if decode is None else _choice_row(decode, decode_reason),
        [leg._asdict() for leg in attempt.replaced_legs] if attempt.replaced_legs else None,
    ]
    if not is_in_line:
        row += attempt.prefiller, attempt.decoder, attempt.prefill_id, attempt.decode_id, str(attempt.kv)
    return row


def _choice_row(backend_pick: Pick, reason: str | None) -> list[Any]:
    """Return the reason of a choice and its candidates.

    The result has the policy, the policy's figures by candidate, and the number of omitted candidates.
    """
    examined = pick_figures(backend_pick)
    if examined is None:
        return [reason]
    policy, candidates, columns, order, left_out = examined
    if len(candidates) <= _MAX_CANDIDATES:
        return [reason, policy, [candidate.backend.name for candidate in candidates], columns, left_out]
    # Sorting the places by their numbers would take three times as long as sorting the numbers alone.
    most = sorted(order)[_MAX_CANDIDATES - 1]
    nearest = sorted([place for place, number in enumerate(order) if number < most], key=order.__getitem__)
    nearest += [place for place, number in enumerate(order) if number == most][: _MAX_CANDIDATES - len(nearest)]
    chosen = backend_pick[0]
    if all(candidates[place].backend is not chosen for place in nearest):
        nearest[-1] = next(place for place, candidate in enumerate(candidates) if candidate.backend is chosen)
    return [
        reason,
        policy,
        [candidates[place].backend.name for place in nearest],
        {name: [column[place] for place in nearest] for name, column in columns.items()},
        len(candidates) - _MAX_CANDIDATES + left_out,
    ]


def _readable_text(value: object) -> str | None:
    """Return a text that JSON can hold, cut to a readable length, or None for other values."""
    return value[:_MAX_CHARS].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None


# Reading and showing


def _attempt_fields(row: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an attempt. `fields`: the access line, which has those of the first unit's last attempt."""
    unit, continues, failure, course, times, prefill, decode, left, *names = row
    stages = [None if letter == NO_STAGE else letter for letter in course]
    return {
        "unit": unit,
        **dict(zip(_NAMES, names or [fields[name] for name in _NAMES], strict=True)),
        "continues": continues,
        "failure": failure,
        "marks": [*zip(stages, times, strict=True)],
        "choices": {
            role: _choice_fields(choice) for role, choice in (("prefill", prefill), ("decode", decode)) if choice
        },
        "left": left or [],
    }


def _choice_fields(row: Sequence[Any]) -> dict[str, Any]:
    reason, *rest = row
    if not rest:
        return {"reason": reason}
    policy, candidates, columns, left_out = rest
    fields = {"reason": reason, "policy": policy, "candidates": candidates, **columns}
    return {**fields, "candidates_left_out": left_out} if left_out else fields


def _display_attempt(attempt: Mapping[str, Any], started: float) -> dict[str, Any]:
    rest = {name: value for name, value in attempt.items() if name not in ("unit", "marks", "choices", "left")}
    marks = [(None if stage is None else Stage(stage), at) for stage, at in attempt["marks"]]
    return {
        "unit": attempt["unit"],
        "began": _round_number(marks[0][1] - started) if marks else None,
        **rest,
        "stages": {stage.label: _round_number(seconds) for stage, seconds in stage_seconds(marks, {}).items()},
        "choices": {role: _display_choice(choice) for role, choice in attempt["choices"].items()},
        "left": attempt["left"],
    }


def _display_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice with a row per candidate instead of columns."""
    columns = {name: column for name, column in choice.items() if isinstance(column, list)}
    names = columns.pop("candidates", [])
    rows = [
        {"instance": name, **{column: _round_number(numbers[place]) for column, numbers in columns.items()}}
        for place, name in enumerate(names)
    ]
    rest = {name: value for name, value in choice.items() if not isinstance(value, list)}
    return {**rest, "candidates": rows}


def _round_number(number: Any) -> Any:
    """Return a float with the shown number of digits, and other values unchanged."""
    return round(number, _DIGITS) if isinstance(number, float) else number


# MessagePack writes numbers fastest. Values that it does not know, such as a subclass of str, become text.
_encode: Final = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode: Final = msgspec.msgpack.Decoder().decode
# Requests with a problem have this part of the memory: one divided by it.
_TROUBLED_DIVISOR: Final = 4
# Number of requests that are stored as one block, which costs less than one by one.
_AT_ONCE: Final = 16


class Receipts:
    """The shared memory, created before forking. Each worker writes its own part."""

    def __init__(self, workers: int = 1, bytes_per_worker: int = 0) -> None:
        """Create the memory. `bytes_per_worker` 0: no receipts are kept."""
        self.worker_count = workers
        self.is_kept = bytes_per_worker > 0
        troubled = bytes_per_worker // _TROUBLED_DIVISOR
        self._receipt_journals = Journal(workers, troubled), Journal(workers, bytes_per_worker - troubled)

    def writer_for(self, worker: int, redact: Callable[[str], str]) -> ReceiptWriter:
        """Return the writer of one worker. `redact` masks secrets in texts of engines."""
        troubled, others = (journal.writer_for(worker).write_record for journal in self._receipt_journals)
        return ReceiptWriter(troubled, others, worker, redact)

    def latest_receipts(
        self, is_wanted: Callable[[Mapping[str, Any]], bool], limit: int, *, contained_bytes: bytes = b""
    ) -> list[dict[str, Any]]:
        """Return the wanted receipts, the latest end first.

        Args:
            is_wanted: Returns whether a receipt is wanted.
            limit: Maximum number.
            contained_bytes: Text in UTF-8 that all wanted receipts have. Blocks without it are skipped.

        Takes milliseconds per MiB of memory, and may be called in any thread.
        """
        rings = [
            self._latest_of_worker(journal, worker, is_wanted, contained_bytes)
            for journal in self._receipt_journals
            for worker in range(self.worker_count)
        ]
        return list(islice(merge(*rings, key=lambda fields: -fields["ended"]), limit))

    def _latest_of_worker(
        self, journal: Journal, worker: int, wants: Callable[[Mapping[str, Any]], bool], containing: bytes
    ) -> Iterator[dict[str, Any]]:
        for piece in journal.latest_records(worker):
            if containing in piece:
                yield from filter(wants, map(receipt_fields, reversed(_decode(piece))))


class ReceiptWriter(RequestListener):
    """Writes the receipts of one worker."""

    def __init__(
        self,
        write_troubled: Callable[[bytes], None],
        write_others: Callable[[bytes], None],
        worker: int,
        redact: Callable[[str], str],
    ) -> None:
        self._write_troubled = write_troubled
        self._write_others = write_others
        self._worker_number = worker
        self._redact_text = redact

    def handle_batch(self, began: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> None:
        zero = monotonic_zero()
        troubled: list[list[Any]] = []
        others: list[list[Any]] = []
        for record in ended:
            row = make_receipt(record, self._worker_number, zero, self._redact_text)
            (troubled if is_troubled(record) else others).append(row)
        for write, rows in ((self._write_troubled, troubled), (self._write_others, others)):
            for first in range(0, len(rows), _AT_ONCE):
                write(_encode(rows[first : first + _AT_ONCE]))
