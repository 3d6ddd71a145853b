"""OpenAI's chat completions and completions: what the engines speak themselves, so answers pass as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy import call as calls
from proxy.dialects import fanout
from proxy.dialects.base import Dialect
from proxy.errors import Failure
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api, with_prompt_details

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.call import Call
    from proxy.connectors.base import Attempt
    from proxy.dialects.base import Rendering, Unit, UnitRendering, Whole
    from proxy.settings import Cost
    from proxy.upstream import Response
    from proxy.wire.document import Document


class OpenAi(Dialect):
    """What both have in common."""

    def parse(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """See Dialect."""
        return calls.understand(self.api, document, cost, headers)

    def split(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """A unit for each prompt and sample."""
        return fanout.split(call, cost, max_units)

    def is_single(self, call: Call) -> bool:
        """See Dialect."""
        return fanout.is_single(call)

    def check_answer(self, response: Response, values: dict[str, Any]) -> None:
        """Each choice must have ended, and not for recomputation."""
        choices = values.get("choices")
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise response.fail(Failure.BAD_ANSWER, "the answer has no choices")
        for choice in choices:
            if choice.get("stop_reason") == "recomputed":
                raise response.fail(Failure.RECOMPUTED, "gave up the request for lack of KV memory")
            if choice.get("finish_reason") is None:
                raise response.fail(Failure.BROKEN, "the answer ended without a finish reason")

    def usage(self, values: dict[str, Any]) -> Any:
        """As it stands there."""
        return values.get("usage")

    async def corrections(self, call: Call, values: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
        """KV parameters are not for clients, and of the prompt's cached tokens only the prefiller knows."""
        corrections: dict[str, Any] = {}
        if "kv_transfer_params" in values:
            corrections["kv_transfer_params"] = REMOVED
        usage = values.get("usage")
        if attempt.kv_handed_over and isinstance(usage, dict):
            corrected = with_prompt_details(usage, attempt.journey.usage.prompt_details)
            if corrected is not usage:
                corrections["usage"] = corrected
        return corrections

    def merge(self, units: Sequence[Unit], answers: Sequence[Whole]) -> bytes:
        """One answer with the choices of all."""
        return fanout.merge_answers(units, [answer.values() for answer in answers])

    def rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """A single stream passes as it is."""
        return _AsItIs() if len(units) == 1 else fanout.MergedStreams(units, tells_usage=call.include_usage)


class ChatCompletions(OpenAi):
    """POST /v1/chat/completions."""

    api = Api.CHAT


class Completions(OpenAi):
    """POST /v1/completions."""

    api = Api.COMPLETIONS


class _AsItIs:
    """The rendering of a single stream."""

    def unit(self, unit: Unit) -> UnitRendering | None:
        """The engine's own bytes."""
        return None

    def ending(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """The stream has it."""
        return b""
