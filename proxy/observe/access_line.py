"""The facts about a finished request, and its line in the access log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from proxy.common.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class AccessFacts:
    """Facts about one finished request, for the access line, the receipt, the metrics and the spans.

    All values are plain, so that a receipt can keep them. A request with several units has the backends of its first
    unit, the sums of attempts, resumes and tokens, and the longest time in each stage.
    """

    request_id: str
    key: str
    """Name of the client's key; `-` if clients need no key."""
    api: str
    """Label of the dialect."""
    stream: bool
    code: int
    """HTTP status; 499 if the client left before there was one."""
    term: str
    """Termination state; see Outcome.term."""
    prefiller: str
    """`host:port`; `-` if no prefiller was asked. The next three fields use `-` in the same way."""
    decoder: str
    prefill_id: str
    """Id of the request at the prefiller."""
    decode_id: str
    kv: str
    """See AttemptRecord."""
    prefill_reason: str | None
    """Reason for choosing the prefiller, one of pick.REASONS; None if none was chosen."""
    decode_reason: str | None
    units: int
    attempts: int
    resumes: int
    course: str
    """Letters of the stages that the request was in."""
    stage_seconds: Sequence[float]
    """Seconds in each stage of `course`."""
    first_token_seconds: float | None
    """Time from the request to the first part of a streamed answer; None if no part was sent."""
    duration_seconds: float
    predicted_seconds: float | None
    """Predicted time of the prefill; None if there was no prediction."""
    predicted_cached_tokens: float | None
    prompt_tokens: int
    """Tokens of the prompt. Like the next two fields, as far as engines reported them."""
    cached_tokens: int
    completion_tokens: int
    trace_id: str | None
    """None if the request is not sampled."""
    lost_engines: int
    """Number of engines that went down while serving the request."""
    error: str | None
    """Message of the error that ended the request; None if there was none."""

    def values(self) -> list[Any]:
        """Return the values in the order of the fields. The constructor takes them by name, see FACTS."""
        return [
            self.request_id,
            self.key,
            self.api,
            self.stream,
            self.code,
            self.term,
            self.prefiller,
            self.decoder,
            self.prefill_id,
            self.decode_id,
            self.kv,
            self.prefill_reason,
            self.decode_reason,
            self.units,
            self.attempts,
            self.resumes,
            self.course,
            self.stage_seconds,
            self.first_token_seconds,
            self.duration_seconds,
            self.predicted_seconds,
            self.predicted_cached_tokens,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.trace_id,
            self.lost_engines,
            self.error,
        ]


FACTS: Final = tuple(AccessFacts.__dataclass_fields__)
"""The names of the facts, in the order of `AccessFacts.values`."""

# All fields in the order of the line. To copy them and delete a few takes a third of the time of adding each.
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
# Times have four digits. Adding a number of this size rounds, because it has no room for fractions. round() would take
# ten times as long, because it formats and parses text.
_SCALE: Final = 1e4
_WHOLE: Final = 3.0 * 2**51


def access_line(facts: AccessFacts) -> dict[str, object]:
    """Return the fields of the line. Times are rounded to four digits."""
    fields = _LINE.copy()
    fields["id"], fields["key"], fields["api"], fields["stream"] = facts.request_id, facts.key, facts.api, facts.stream
    fields["code"], fields["term"] = facts.code, facts.term
    fields["p"], fields["d"], fields["p_id"], fields["d_id"] = (
        facts.prefiller,
        facts.decoder,
        facts.prefill_id,
        facts.decode_id,
    )
    fields["kv"] = facts.kv
    fields["units"], fields["attempts"], fields["resumes"] = facts.units, facts.attempts, facts.resumes
    course = facts.course
    for place, seconds in enumerate(facts.stage_seconds):
        fields[_TIMES[course[place]]] = (seconds * _SCALE + _WHOLE - _WHOLE) / _SCALE
    first_token = facts.first_token_seconds
    fields["ttft"] = None if first_token is None else (first_token * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["dur"] = (facts.duration_seconds * _SCALE + _WHOLE - _WHOLE) / _SCALE
    fields["tokens_in"], fields["tokens_cached"], fields["tokens_out"] = (
        facts.prompt_tokens,
        facts.cached_tokens,
        facts.completion_tokens,
    )
    fields["error"] = facts.error
    if facts.prefill_reason is None:
        del fields["p_why"]
    else:
        fields["p_why"] = facts.prefill_reason
    if facts.decode_reason is None:
        del fields["d_why"]
    else:
        fields["d_why"] = facts.decode_reason
    if _ENCODE not in course:  # few fleets have encoders
        del fields["t_encode"]
    predicted = facts.predicted_seconds
    if predicted is None:
        del fields["p_seconds"], fields["p_cached"]
    else:
        # The prediction; `t_prefill` and `tokens_cached` have the real values.
        fields["p_seconds"] = (predicted * _SCALE + _WHOLE - _WHOLE) / _SCALE
        fields["p_cached"] = facts.predicted_cached_tokens
    if facts.trace_id is None:
        del fields["trace_id"]
    else:
        fields["trace_id"] = facts.trace_id
    if not facts.lost_engines:
        del fields["lost_engines"]
    else:
        fields["lost_engines"] = facts.lost_engines
    return fields
