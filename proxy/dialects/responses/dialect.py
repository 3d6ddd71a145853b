"""POST /v1/responses, as Codex, OpenAI's SDKs and agents ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.common.errors import UpstreamError
from proxy.dialects.responses.answer import ResponseEvents, response
from proxy.dialects.responses.request import KeptRequest, chat_of
from proxy.dialects.translated import Translated, words
from proxy.wire.openai import error_type, is_error_body
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.errors import GatewayError
    from proxy.dialects.base import Rendering, Unit
    from proxy.dialects.call import Call
    from proxy.dialects.left_out import LeftOut
    from proxy.dialects.translated import Completion


class Responses(Translated):
    """A response is a chat's answer, and its output items are the parts of that. Nothing is kept."""

    path = "/v1/responses"
    label = "responses"

    def chat(self, values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
        """See Translated."""
        return chat_of(values, left_out)

    def asked(self, values: Mapping[str, Any]) -> KeptRequest:
        """Return the members that the response repeats."""
        return KeptRequest(values)

    def answer(self, call: Call, completion: Completion) -> dict[str, Any]:
        """See Translated."""
        return response(call, call.asked, completion)

    def rendering(self, call: Call, units: Sequence[Unit]) -> Rendering:
        """See Dialect."""
        return ResponseEvents(call, call.asked)

    def error_body(self, error: GatewayError) -> bytes | None:
        """See Dialect. Engines' errors have the form of this API's, but not the pages of proxies in front of them."""
        told = error.body if isinstance(error, UpstreamError) else None
        if told is None or is_error_body(told):
            return None
        said = {"message": words(error), "type": error_type(error.status), "param": None, "code": error.code}
        return dumps({"error": said})
