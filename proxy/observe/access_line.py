"""The access line of one request: of what its record knows, as it is kept, what is told by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    Facts = Sequence[Any]
    """What a line is made of, in the order in which `access_line` takes it: plain values, so that a receipt can keep
    them as they are. Times are not rounded, and what is not there is None.
    """

# All that there may be, in the order of the line: to copy them and take some out again takes a third of adding each.
_LINE: Final[dict[str, object]] = dict.fromkeys(
    (
        *("id", "key", "api", "stream", "code", "term", "p", "d", "p_id", "d_id", "kv", "p_why", "d_why"),
        *("units", "attempts", "resumes", "t_queue", "t_encode", "t_prefill", "t_handoff", "t_first_token", "t_stream"),
        *("ttft", "dur", "p_seconds", "p_cached", "tokens_in", "tokens_cached", "tokens_out"),
        *("trace_id", "lost_engines", "error"),
    ),
    0.0,
)
_TIMES: Final = {stage.value: f"t_{stage.label}" for stage in Stage}
_ENCODE: Final = Stage.ENCODE.value
# Times have four digits. A number as large as this one has no room for fractions, so adding it rounds; round() would
# take ten times as long, as it makes text and reads it.
_SCALE: Final = 1e4
_WHOLE: Final = 3.0 * 2**51


def access_line(facts: Facts) -> dict[str, object]:
    """The fields. With several units: the first one's backends, the sum of attempts, the longest stages."""
    # fmt: off
    (
        request_id, key, api, stream, code, term, prefiller, decoder, prefill_id, decode_id, kv, prefill_reason,
        decode_reason, units, attempts, resumes, course, spent, first_token, duration, predicted, predicted_cached,
        prompt, cached, completion, trace_id, lost_engines, error,
    ) = facts
    # fmt: on
    fields = _LINE.copy()
    fields["id"], fields["key"], fields["api"], fields["stream"] = request_id, key, api, stream
    fields["code"], fields["term"] = code, term
    fields["p"], fields["d"], fields["p_id"], fields["d_id"] = prefiller, decoder, prefill_id, decode_id
    fields["kv"] = kv
    fields["units"], fields["attempts"], fields["resumes"] = units, attempts, resumes
    for place, seconds in enumerate(spent):
        fields[_TIMES[course[place]]] = (seconds * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["ttft"] = None if first_token is None else (first_token * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["dur"] = (duration * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["tokens_in"], fields["tokens_cached"], fields["tokens_out"] = prompt, cached, completion
    fields["error"] = error
    if prefill_reason is None:
        del fields["p_why"]
    else:
        fields["p_why"] = prefill_reason
    if decode_reason is None:
        del fields["d_why"]
    else:
        fields["d_why"] = decode_reason
    if _ENCODE not in course:  # few have encoders
        del fields["t_encode"]
    if predicted is None:
        del fields["p_seconds"], fields["p_cached"]
    else:
        # What was thought would come of the prefill; `t_prefill` and `tokens_cached` say what came of it.
        fields["p_seconds"] = (predicted * _SCALE + _WHOLE - _WHOLE) / _SCALE
        fields["p_cached"] = predicted_cached
    if trace_id is None:
        del fields["trace_id"]
    else:
        fields["trace_id"] = trace_id
    if not lost_engines:
        del fields["lost_engines"]
    else:
        fields["lost_engines"] = lost_engines
    return fields
