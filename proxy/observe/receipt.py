"""What is kept of one request that is over, for whoever looks for the cause of something: its access line, and how each
attempt at it went. No prompt, no completion and no key in it.

It is written for every request and read seldom: what is kept is as it comes, and made fit to be looked at when somebody
does.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from proxy.balancer.choice import figures
from proxy.errors import UpstreamError
from proxy.logs import timestamp
from proxy.observe.attempt_record import seconds_of
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.balancer.choice import Pick
    from proxy.observe.attempt_record import AttemptRecord
    from proxy.observe.record import RequestRecord

_MAX_CHARS: Final = 512
# Of one request; what is left out is counted.
_MAX_ATTEMPTS: Final = 16
# Of one choice: those that were nearest to being chosen, and the one that was.
_MAX_CANDIDATES: Final = 8
_DIGITS: Final = 6
_PAST: Final = attrgetter("past")
_NAME: Final = attrgetter("name")


def receipt(record: RequestRecord, worker: int, zero: float, redact: Callable[[str], str]) -> dict[str, Any]:
    """What is kept; see `shown`. `zero`: the system's time when the record's clock was at 0."""
    error = record.error
    history = [
        _attempt(unit, attempt) for unit, timeline in enumerate(record.timelines) for attempt in timeline.history
    ]
    told: dict[str, Any] = {
        **record.fields,
        "model": _text(record.model),
        "backend": error.backend.name if isinstance(error, UpstreamError) else None,
        "worker": worker,
        "started": record.started,
        "ended": zero + record.ended,
        "history": history[:_MAX_ATTEMPTS],
    }
    if len(history) > _MAX_ATTEMPTS:
        told["attempts_left_out"] = len(history) - _MAX_ATTEMPTS
    if told["error"] is not None:
        told["error"] = _text(redact(told["error"]))
    return told


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
    return record.outcome.term[0] in "SscK" or any(map(_PAST, record.timelines))


def names_instance(told: Mapping[str, Any], instance: str) -> bool:
    """Whether a request was sent to an instance, `host:port`, by any attempt."""
    return any(instance in (attempt["p"], attempt["d"], *_left(attempt, "instance")) for attempt in told["history"])


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
    return [leg[what] for leg in attempt.get("left", ())]


# Writing


def _attempt(unit: int, attempt: AttemptRecord) -> dict[str, Any]:
    prefill, decode = attempt.prefill_pick, attempt.decode_pick
    prefill_reason, decode_reason = attempt.reasons
    choices = {}
    if prefill is not None:
        choices["prefill"] = _choice(prefill, prefill_reason)
    if decode is not None:
        choices["decode"] = _choice(decode, decode_reason)
    told: dict[str, Any] = {
        "unit": unit,
        "p": attempt.prefiller,
        "d": attempt.decoder,
        "p_id": attempt.prefill_id,
        "d_id": attempt.decode_id,
        "kv": attempt.kv,
        "continues": attempt.continues,
        "failure": None if attempt.failure is None else attempt.failure._asdict(),
        "marks": attempt.marks,
        "choices": choices,
    }
    if attempt.left:
        told["left"] = [leg._asdict() for leg in attempt.left]
    return told


def _choice(pick: Pick, reason: str | None) -> dict[str, Any]:
    known = figures(pick)
    if known is None:
        return {"reason": reason}
    columns = known.columns
    names = [*map(_NAME, known.backends)]
    if len(names) <= _MAX_CANDIDATES:
        return {"reason": reason, "policy": known.policy, "candidates": names, **columns}
    nearest = sorted(range(len(names)), key=known.order.__getitem__)[:_MAX_CANDIDATES]
    if (chosen := names.index(pick[0].name)) not in nearest:
        nearest[-1] = chosen
    return {
        "reason": reason,
        "policy": known.policy,
        "candidates": [names[place] for place in nearest],
        **{name: [column[place] for place in nearest] for name, column in columns.items()},
        "candidates_left_out": len(names) - _MAX_CANDIDATES,
    }


def _text(value: object) -> str | None:
    """Text that JSON can hold, not longer than somebody reads; None: it is none."""
    return value[:_MAX_CHARS].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None


# Showing


def _shown_attempt(attempt: Mapping[str, Any], started: float) -> dict[str, Any]:
    rest = {name: value for name, value in attempt.items() if name not in ("unit", "marks", "choices", "left")}
    marks = [(None if stage is None else Stage(stage), at) for stage, at in attempt["marks"]]
    return {
        "unit": attempt["unit"],
        "began": _rounded(marks[0][1] - started) if marks else None,
        **rest,
        "stages": {stage.label: _rounded(seconds) for stage, seconds in seconds_of(marks, {}).items()},
        "choices": {role: _shown_choice(choice) for role, choice in attempt["choices"].items()},
        "left": attempt.get("left", []),
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


def _rounded(number: float | None) -> float | None:
    return round(number, _DIGITS) if isinstance(number, float) else number
