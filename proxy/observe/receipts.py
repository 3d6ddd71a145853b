"""The latest requests of all workers, as long as there is room for them, in shared memory: what each worker has written
any other can read, also when the first one has died.

Those that something went wrong with behind the gateway have room of their own, so that they are still there when many
others have come since.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proxy.balancer.pick import figures
from proxy.balancer.shared.journal import Journal
from proxy.common.errors import UpstreamError
from proxy.common.terms import Stage
from proxy.observe.access_line import FACTS, AccessFacts, access_line
from proxy.observe.logs import monotonic_zero, timestamp
from proxy.observe.observers import RequestListener
from proxy.observe.timeline import NO_STAGE, course_of, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proxy.balancer.pick import Pick
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import AttemptRecord


_MAX_CHARS: Final = 512
# Of one request; what is left out is counted.
_MAX_ATTEMPTS: Final = 16
# Of one choice: those that were nearest to being chosen, and the one that was.
_MAX_CANDIDATES: Final = 8
_DIGITS: Final = 6
# Of an attempt, by the names of the access line.
_NAMES: Final = ("p", "d", "p_id", "d_id", "kv")


def receipt(record: RequestRecord, worker: int, zero: float, redact: Callable[[str], str]) -> list[Any]:
    """What is kept, of plain values; see `told`. `zero`: the system's time when the record's clock was at 0."""
    facts, error, model = record.facts, record.error, record.model
    if error is not None and facts.error is not None:
        facts = replace(facts, error=_text(redact(str(facts.error))))
    history: list[list[Any]] = []
    for unit, timeline in enumerate(record.timelines):
        if timeline.past:
            history += [_attempt(unit, attempt, is_in_line=False) for attempt in timeline.past]
        if timeline.attempts:
            history.append(_attempt(unit, timeline, is_in_line=not unit))
    left_out = max(0, len(history) - _MAX_ATTEMPTS)
    return [
        facts.values(),
        model if type(model) is str and len(model) <= _MAX_CHARS and model.isascii() else _text(model),
        error.backend.name if isinstance(error, UpstreamError) else None,
        worker,
        record.started,
        zero + record.ended,
        history[:_MAX_ATTEMPTS] if left_out else history,
        left_out,
    ]


def told(row: Sequence[Any]) -> dict[str, Any]:
    """What was kept of a request, by its names; see `shown`."""
    facts, model, backend, worker, started, ended, history, left_out = row
    fields = access_line(AccessFacts(**dict(zip(FACTS, facts, strict=True))))
    found = {
        **fields,
        "model": model,
        "backend": backend,
        "worker": worker,
        "started": started,
        "ended": ended,
        "history": [_told_attempt(attempt, fields) for attempt in history],
    }
    return {**found, "attempts_left_out": left_out} if left_out else found


def shown(told: Mapping[str, Any]) -> dict[str, Any]:
    """What operators see of what was kept: the `time` of its end, its `worker`, the fields of the access line, the
    `model` that the client named (null: none), `backend`, which the error came from (null: from no instance), and in
    `history` each attempt at each unit.
    """
    rest = {name: value for name, value in told.items() if name not in ("started", "ended", "history")}
    history = [_shown_attempt(attempt, told["started"]) for attempt in told["history"]]
    return {"time": timestamp(told["ended"]), **rest, "history": history}


def is_troubled(record: RequestRecord) -> bool:
    """Whether something went wrong behind the gateway: an engine failed, or was too slow, even if another one has made
    up for it; or the answer was cut off. Not what the gateway refused, nor a client that left.
    """
    if record.error is not None and record.outcome.term[0] in "SscK":
        return True
    for timeline in record.timelines:  # noqa: SIM110 - a generator takes longer
        if timeline.past:
            return True
    return False


def names_instance(told: Mapping[str, Any], instance: str) -> bool:
    """Whether a request was sent to an instance, `host:port`, by any attempt."""
    return any(instance in {attempt["p"], attempt["d"], *_left(attempt, "instance")} for attempt in told["history"])


def names_engine_id(told: Mapping[str, Any], engine_id: str) -> bool:
    """Whether an engine knows a request by this name, which is made of the id that its leg was sent with: vLLM writes
    `chatcmpl-` in front of it and more behind it.
    """
    return any(
        sent != "-" and sent in engine_id
        for attempt in told["history"]
        for sent in (attempt["p_id"], attempt["d_id"], *_left(attempt, "id"))
    )


def _left(attempt: Mapping[str, Any], what: str) -> list[str]:
    """The instances, or ids, of the legs that others took the place of."""
    return [leg[what] for leg in attempt["left"]]


# Writing


def _attempt(unit: int, attempt: AttemptRecord, *, is_in_line: bool) -> list[Any]:
    """`is_in_line`: the access line has its names."""
    prefill, decode = attempt.prefill_pick, attempt.decode_pick
    prefill_reason, decode_reason = attempt.reasons
    course, _ = course_of(tuple(attempt.stages))
    row: list[Any] = [
        unit,
        attempt.continues,
        None if attempt.failure is None else attempt.failure._asdict(),
        course,
        attempt.times,
        None if prefill is None else _choice(prefill, prefill_reason),
        None if decode is None else _choice(decode, decode_reason),
        [leg._asdict() for leg in attempt.left] if attempt.left else None,
    ]
    if not is_in_line:
        row += attempt.prefiller, attempt.decoder, attempt.prefill_id, attempt.decode_id, str(attempt.kv)
    return row


def _choice(pick: Pick, reason: str | None) -> list[Any]:
    """The reason, and of what was looked at the policy, the candidates, what it knew of them, and how many are left
    out.
    """
    known = figures(pick)
    if known is None:
        return [reason]
    policy, candidates, columns, order = known
    names = [candidate.backend.name for candidate in candidates]
    if len(names) <= _MAX_CANDIDATES:
        return [reason, policy, names, columns, 0]
    nearest = sorted(range(len(names)), key=order.__getitem__)[:_MAX_CANDIDATES]
    if (chosen := names.index(pick[0].name)) not in nearest:
        nearest[-1] = chosen
    return [
        reason,
        policy,
        [names[place] for place in nearest],
        {name: [column[place] for place in nearest] for name, column in columns.items()},
        len(names) - _MAX_CANDIDATES,
    ]


def _text(value: object) -> str | None:
    """Text that JSON can hold, not longer than somebody reads; None: it is none."""
    return value[:_MAX_CHARS].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None


# Reading and showing


def _told_attempt(row: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields`: the access line, which has the names of the last attempt at the first unit."""
    unit, continues, failure, course, times, prefill, decode, left, *names = row
    stages = [None if letter == NO_STAGE else letter for letter in course]
    return {
        "unit": unit,
        **dict(zip(_NAMES, names or [fields[name] for name in _NAMES], strict=True)),
        "continues": continues,
        "failure": failure,
        "marks": [*zip(stages, times, strict=True)],
        "choices": {
            role: _told_choice(choice) for role, choice in (("prefill", prefill), ("decode", decode)) if choice
        },
        "left": left or [],
    }


def _told_choice(row: Sequence[Any]) -> dict[str, Any]:
    reason, *looked = row
    if not looked:
        return {"reason": reason}
    policy, candidates, columns, left_out = looked
    told = {"reason": reason, "policy": policy, "candidates": candidates, **columns}
    return {**told, "candidates_left_out": left_out} if left_out else told


def _shown_attempt(attempt: Mapping[str, Any], started: float) -> dict[str, Any]:
    rest = {name: value for name, value in attempt.items() if name not in ("unit", "marks", "choices", "left")}
    marks = [(None if stage is None else Stage(stage), at) for stage, at in attempt["marks"]]
    return {
        "unit": attempt["unit"],
        "began": _rounded(marks[0][1] - started) if marks else None,
        **rest,
        "stages": {stage.label: _rounded(seconds) for stage, seconds in seconds_of(marks, {}).items()},
        "choices": {role: _shown_choice(choice) for role, choice in attempt["choices"].items()},
        "left": attempt["left"],
    }


def _shown_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """With a row for each candidate instead of columns."""
    columns = {name: column for name, column in choice.items() if isinstance(column, list)}
    names = columns.pop("candidates", [])
    rows = [
        {"instance": name, **{column: _rounded(numbers[place]) for column, numbers in columns.items()}}
        for place, name in enumerate(names)
    ]
    rest = {name: value for name, value in choice.items() if not isinstance(value, list)}
    return {**rest, "candidates": rows}


def _rounded(number: Any) -> Any:
    """A float to as many digits as are told; what is none as it is."""
    return round(number, _DIGITS) if isinstance(number, float) else number


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
        troubled, others = (journal.writer(worker).write for journal in self._journals)
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
