"""OpenAI's chat completions and completions: what the engines speak themselves, so answers pass as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from proxy.common.errors import BadRequest, Failure
from proxy.dialects import fanout
from proxy.dialects.base import Dialect
from proxy.dialects.call import Call, measured_prompt, output_limit
from proxy.dialects.requests import FLAG, WHOLE_NUMBER, boolean, spelled_otherwise, without_reserved
from proxy.wire import openai
from proxy.wire.document import REMOVED
from proxy.wire.engine_members import ENGINE_MEMBERS
from proxy.wire.finish import is_given_up
from proxy.wire.openai import ORDINARY_FIELDS, RESERVED_FIELDS, Api, with_prompt_details
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.errors import GatewayError
    from proxy.dialects.base import AnsweredAttempt, EngineAnswer, Rendering, Unit, UnitRendering, Whole
    from proxy.dialects.requests import Reading
    from proxy.settings import Cost
    from proxy.wire.document import Document


_LIMITS: Final[Mapping[str, Reading]] = dict.fromkeys(("max_tokens", "max_completion_tokens"), WHOLE_NUMBER)
"""All that is acted on of ordinary requests."""
_READINGS: Final[Mapping[str, Reading]] = {
    **_LIMITS,
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
_SEVERAL: Final = frozenset({"n", "use_beam_search", "best_of"})
"""What may ask for several sequences."""
_CHAT_READINGS: Final[Mapping[str, Reading]] = {**_READINGS, "logprobs": FLAG}
_COMPLETION_READINGS: Final[Mapping[str, Reading]] = {**_READINGS, "logprobs": WHOLE_NUMBER}


class OpenAi(Dialect):
    """What both have in common."""

    speaks_as_engines = True
    readings: ClassVar[Mapping[str, Reading]]
    """Of the fields that the gateway acts on."""

    def parse(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """See Dialect."""
        values = document.values
        is_ordinary = values.keys() <= ORDINARY_FIELDS
        stream = boolean(values, "stream")
        options = values.get("stream_options")
        if options is not None:
            if not isinstance(options, dict):
                raise BadRequest("stream_options must be an object", param="stream_options")
            if options and not stream:
                raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
        changes = spelled_otherwise(values, _LIMITS if is_ordinary else self.readings)
        if changes:
            values.update(changes)
        if not is_ordinary:
            if values.get("n") is not None and values["n"] < 1:
                raise BadRequest("n must be a positive integer", param="n")
            changes.update(without_reserved(values, RESERVED_FIELDS))
        include_usage = options is not None and boolean(options, "include_usage")
        if stream and not include_usage:
            # The gateway counts tokens by the usage chunk, and takes it out again for clients that did not ask for it.
            # What else stands in their options (continuous_usage_stats) means nothing without it.
            changes["stream_options"] = {"include_usage": True}
        tokens, prompt = measured_prompt(document, cost)
        limit = output_limit(values)
        output_tokens = limit or cost.default_output_tokens
        return Call(  # by position, see Call.changed
            *(self.api, document, tokens, output_tokens, stream, include_usage, headers, changes, prompt, limit),
            is_ordinary,
        )

    def split(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """A unit for each prompt and sample."""
        return fanout.split(call, cost, max_units)

    def is_single(self, call: Call) -> bool:
        """See Dialect."""
        return fanout.is_single(call)

    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Each choice must have ended, and not because the engine gave it up."""
        choices = values.get("choices")
        if not isinstance(choices, list) or not choices:
            raise response.fail(Failure.BAD_ANSWER, "the answer has no choices")
        for choice in choices:
            if not isinstance(choice, dict):
                raise response.fail(Failure.BAD_ANSWER, "a choice of the answer is no object")
            if choice.get("stop_reason") == "recomputed":
                raise response.fail(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
            if not choice.get("finish_reason"):
                raise response.fail(Failure.BROKEN, "the answer ended without a finish reason")
            if is_given_up(choice["finish_reason"]):
                raise response.fail(Failure.ABORTED, "stopped working on the answer")

    def usage(self, values: dict[str, Any]) -> Any:
        """As it stands there."""
        return values.get("usage")

    def corrected(self, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Leave out members for engines, and take the prompt's cached tokens from the prefiller. See Dialect."""
        corrections: dict[str, Any] = {name: REMOVED for name in ENGINE_MEMBERS if name in values}
        usage = values.get("usage")
        if attempt.kv_handed_over and isinstance(usage, dict):
            corrected = with_prompt_details(usage, attempt.prompt_details)
            if corrected is not usage:
                corrections["usage"] = corrected
        return corrections

    def whole(self, call: Call, units: Sequence[Unit], answers: Sequence[Whole]) -> bytes:
        """A single unit's own, or one answer with the choices of all."""
        if len(units) > 1:
            return fanout.merge_answers(units, [answer.values() for answer in answers], call.alias)
        (answer,) = answers
        return answer.body() if call.alias is None else dumps({**answer.values(), "model": call.alias})

    def rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """A single stream passes as it is, unless the client calls the model otherwise."""
        if len(units) == 1 and call.alias is None:
            return _AsItIs()
        return fanout.MergedStreams(units, tells_usage=call.include_usage, alias=call.alias)


class ChatCompletions(OpenAi):
    """POST /v1/chat/completions."""

    api = Api.CHAT
    path = Api.CHAT.path
    label = "chat"
    readings = _CHAT_READINGS

    def is_single(self, call: Call) -> bool:
        """See Dialect. A chat has one prompt."""
        values = call.values
        if call.is_ordinary or _SEVERAL.isdisjoint(values):
            return True
        return (values.get("n") or 1) == 1 and not (values.get("use_beam_search") or values.get("best_of"))


class Completions(OpenAi):
    """POST /v1/completions."""

    api = Api.COMPLETIONS
    path = Api.COMPLETIONS.path
    label = "completions"
    readings = _COMPLETION_READINGS


class _AsItIs:
    """The rendering of a single stream."""

    def unit(self, unit: Unit) -> UnitRendering | None:
        """The engine's own bytes."""
        return None

    def ending(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """The stream has it."""
        return b""

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error, in the form that engines use."""
        return openai.error_event(error)
