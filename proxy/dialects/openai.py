"""OpenAI's chat completions and completions. Engines serve both APIs, so their answers pass unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from proxy.common.errors import BadRequest, Failure, GatewayError
from proxy.dialects import fanout
from proxy.dialects.base import AnsweredAttempt, CompleteAnswer, Dialect, EngineAnswer, Rendering, Unit, UnitRendering
from proxy.dialects.call import Call, measure_prompt, read_output_limit
from proxy.dialects.requests import FLAG, WHOLE_NUMBER, coerced_members, read_boolean, remove_reserved_members
from proxy.wire import openai
from proxy.wire.document import REMOVED, Document
from proxy.wire.openai import (
    ENGINE_MEMBERS,
    ORDINARY_FIELDS,
    RESERVED_FIELDS,
    Api,
    is_abort_reason,
    replace_prompt_details,
)
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.requests import Reading
    from proxy.settings import Cost


_TOKEN_LIMITS: Final[Mapping[str, Reading]] = dict.fromkeys(("max_tokens", "max_completion_tokens"), WHOLE_NUMBER)
"""How to read the limits of ordinary requests. The gateway uses these members itself."""
_COMMON_READINGS: Final[Mapping[str, Reading]] = {
    **_TOKEN_LIMITS,
    **dict.fromkeys(
        ("min_tokens", "n", "best_of", "seed", "top_logprobs", "prompt_logprobs", "thinking_token_budget"), WHOLE_NUMBER
    ),
    **dict.fromkeys(
        (
            *("echo", "use_beam_search", "return_token_ids", "include_reasoning", "include_stop_str_in_output"),
            "parallel_tool_calls",
        ),
        FLAG,
    ),
}
_SAMPLE_COUNTS: Final = frozenset({"n", "use_beam_search", "best_of"})
"""Names of the members with which a request may ask for several sequences."""
_CHAT_READINGS: Final[Mapping[str, Reading]] = {**_COMMON_READINGS, "logprobs": FLAG}
_COMPLETION_READINGS: Final[Mapping[str, Reading]] = {**_COMMON_READINGS, "logprobs": WHOLE_NUMBER}


class OpenAi(Dialect):
    """The base of both dialects: OpenAI's request and answer formats."""

    uses_engine_format = True
    readings: ClassVar[Mapping[str, Reading]]
    """How to read the members of requests that the gateway uses itself."""

    def parse_request(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        values = document.values
        is_ordinary = values.keys() <= ORDINARY_FIELDS
        stream = read_boolean(values, "stream")
        options = values.get("stream_options")
        if options is not None:
            if not isinstance(options, dict):
                raise BadRequest("stream_options must be an object", param="stream_options")
            if options and not stream:
                raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
        changes = coerced_members(values, _TOKEN_LIMITS if is_ordinary else self.readings)
        if changes:
            values.update(changes)
        if not is_ordinary:
            if values.get("n") is not None and values["n"] < 1:
                raise BadRequest("n must be a positive integer", param="n")
            changes.update(remove_reserved_members(values, RESERVED_FIELDS))
        include_usage = options is not None and read_boolean(options, "include_usage")
        if stream and not include_usage:
            # The gateway counts tokens by the usage chunk, and removes it for clients that did not ask for it. The
            # client's other option (continuous_usage_stats) has no effect without it.
            changes["stream_options"] = {"include_usage": True}
        tokens, prompt = measure_prompt(document, cost)
        limit = read_output_limit(values)
        output_tokens = limit or cost.default_output_tokens
        return Call(  # by position, see Call.copy_with_changes
            *(self.api, document, tokens, output_tokens, stream, include_usage, headers, changes, prompt, limit),
            is_ordinary,
        )

    def split_into_units(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """Return one unit for each sample of each prompt."""
        return fanout.split_into_units(call, cost, max_units)

    def has_single_choice(self, call: Call) -> bool:
        return fanout.has_single_choice(call)

    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Raise UpstreamError if a choice has not ended, or if the engine stopped working on it."""
        choices = values.get("choices")
        if not isinstance(choices, list) or not choices:
            raise response.make_failure(Failure.BAD_ANSWER, "the answer has no choices")
        for choice in choices:
            if not isinstance(choice, dict):
                raise response.make_failure(Failure.BAD_ANSWER, "a choice of the answer is not an object")
            if choice.get("stop_reason") == "recomputed":
                raise response.make_failure(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
            if not choice.get("finish_reason"):
                raise response.make_failure(Failure.BROKEN, "the answer ended without a finish reason")
            if is_abort_reason(choice["finish_reason"]):
                raise response.make_failure(Failure.ABORTED, "aborted the answer")

    def read_usage(self, values: dict[str, Any]) -> Any:
        """Return the member `usage` of an answer."""
        return values.get("usage")

    def correct_members(self, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Remove members that are only for engines, and use the prefiller's count of cached tokens. See Dialect."""
        corrections: dict[str, Any] = {name: REMOVED for name in ENGINE_MEMBERS if name in values}
        usage = values.get("usage")
        if attempt.has_kv_from_prefiller and isinstance(usage, dict):
            corrected = replace_prompt_details(usage, attempt.prompt_tokens_details)
            if corrected is not usage:
                corrections["usage"] = corrected
        return corrections

    def render_complete_body(self, call: Call, units: Sequence[Unit], answers: Sequence[CompleteAnswer]) -> bytes:
        """Return the answer of a single unit, or one answer with the choices of all units."""
        if len(units) > 1:
            return fanout.merge_answers(units, [answer.parsed_body() for answer in answers], call.model_alias)
        (answer,) = answers
        return (
            answer.make_body()
            if call.model_alias is None
            else dumps({**answer.parsed_body(), "model": call.model_alias})
        )

    def make_rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """Return the writer of events. A single stream passes unchanged unless the model has an alias."""
        if len(units) == 1 and call.model_alias is None:
            return _UnchangedRendering()
        return fanout.MergedStreams(units, has_usage_chunk=call.include_usage, alias=call.model_alias)


class ChatCompletions(OpenAi):
    """POST /v1/chat/completions."""

    api = Api.CHAT
    path = Api.CHAT.path
    label = "chat"
    readings = _CHAT_READINGS

    def has_single_choice(self, call: Call) -> bool:
        """Count samples alone, because a chat has one prompt."""
        values = call.values
        if call.is_ordinary or _SAMPLE_COUNTS.isdisjoint(values):
            return True
        return (values.get("n") or 1) == 1 and not (values.get("use_beam_search") or values.get("best_of"))


class Completions(OpenAi):
    """POST /v1/completions."""

    api = Api.COMPLETIONS
    path = Api.COMPLETIONS.path
    label = "completions"
    readings = _COMPLETION_READINGS


class _UnchangedRendering:
    """The rendering of a single stream: the client gets the engine's events byte for byte."""

    def make_unit_rendering(self, unit: Unit) -> UnitRendering | None:
        """Return None: the client gets the engine's own bytes."""
        return None

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return nothing, because the stream has its own usage chunk."""
        return b""

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error, in the form that engines use."""
        return openai.error_event(error)
