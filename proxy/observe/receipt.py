"""What is kept of one request that is over, for whoever looks for the cause of something: its access line, and how each
attempt at it went. No prompt, no completion and no key in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from proxy.observe.outcome import Outcome
    from proxy.observe.record import RequestRecord
    from proxy.observe.timeline import AttemptRecord, Timeline

_MAX_CHARS: Final = 512
# Of one request: what is left out is counted.
_MAX_ATTEMPTS: Final = 16


def receipt(record: RequestRecord, outcome: Outcome, redact: Callable[[str], str]) -> dict[str, Any]:
    """The fields of the access line, the `model` that the client named (null: none), `backend`, which the error came
    from (null: from no instance), and in `history` each attempt at each unit; as JSON.
    """
    history = list(_history(record))
    told: dict[str, Any] = {**record.fields(outcome), "model": _text(record.model)}
    error = record.error
    told["backend"] = error.backend.name if isinstance(error, UpstreamError) else None
    if told["error"] is not None:
        told["error"] = _text(redact(told["error"]))
    told["history"] = history[:_MAX_ATTEMPTS]
    if len(history) > _MAX_ATTEMPTS:
        told["attempts_left_out"] = len(history) - _MAX_ATTEMPTS
    return told


def is_troubled(record: RequestRecord, outcome: Outcome) -> bool:
    """Whether something went wrong behind the gateway: an engine failed, or was too slow, even if another one has made
    up for it; or the answer was cut off. Not what the gateway refused, nor a client that left.
    """
    return outcome.term[0] in "SscK" or any(timeline.past for timeline in record.timelines)


def names_instance(told: Mapping[str, Any], instance: str) -> bool:
    """Whether a request was sent to an instance, `host:port`, by any attempt."""
    return any(instance in (attempt["p"], attempt["d"]) for attempt in told["history"])


def names_engine_id(told: Mapping[str, Any], engine_id: str) -> bool:
    """Whether an engine knows a request by this name, which is made of the id that its leg was sent with: vLLM writes
    `chatcmpl-` in front of it and more behind it.
    """
    return any(
        sent != "-" and sent in engine_id for attempt in told["history"] for sent in (attempt["p_id"], attempt["d_id"])
    )


def _history(record: RequestRecord) -> Iterator[dict[str, Any]]:
    for unit, timeline in enumerate(record.timelines):
        for attempt in _attempts(timeline):
            failure, began = attempt.failure, attempt.marks[0][1] if attempt.marks else None
            yield {
                "unit": unit,
                "began": None if began is None else round(began - record.started, 4),
                "p": attempt.prefiller,
                "d": attempt.decoder,
                "p_id": attempt.prefill_id,
                "d_id": attempt.decode_id,
                "kv": attempt.kv,
                "continues": attempt.continues,
                "stages": {stage.label: round(seconds, 4) for stage, seconds in attempt.seconds.items()},
                "failure": None if failure is None else failure._asdict(),
            }


def _attempts(timeline: Timeline) -> Iterator[AttemptRecord]:
    yield from timeline.past
    if timeline.attempts:
        yield timeline.attempt


def _text(value: object) -> str | None:
    """Text that JSON can hold, not longer than somebody reads; None: it is none."""
    return value[:_MAX_CHARS].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None
