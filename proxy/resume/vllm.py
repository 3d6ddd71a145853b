"""How vLLM, and vLLM-Ascend, tell an answer and take it up again. No IO."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import orjson

from proxy.balancer.engines.capabilities import CHAT_STREAM_TOKEN_IDS, TOKEN_IDS
from proxy.resume.call_options import is_structured
from proxy.resume.engine import Engine, Watch
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.call import Call
    from proxy.resume.engine import Has

_GRAMMARS: Final = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
)


# Read off their classes by every request they would take as long as four calls.
_CHAT: Final = Api.CHAT
_IDS: Final = Watch.IDS

# What makes an answer tell its tokens.
_OBSERVED: Final[dict[str, object]] = {
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


class Vllm(Engine):
    """See Engine."""

    def watch(self, call: Call, has: Has) -> Watch:
        """See Engine."""
        if not has(CHAT_STREAM_TOKEN_IDS if call.api is _CHAT else TOKEN_IDS):
            return Watch.NOT
        if call.is_ordinary:
            return _IDS
        values = call.values
        if values.get("prompt_logprobs") is not None or values.get("echo"):
            return Watch.NOT  # it refuses the one with `stream`, the other with `return_token_ids` for a prompt of ids
        if not call.stream and "routed_experts_prompt_start" in values:
            return Watch.NOT  # streams do not have what this asks for (chat_completion/protocol.py)
        # It hides what belongs to reasoning, and which that is only it knows; and without reasoning to be shown a
        # grammar begins at once (vLLM `resolve_reasoning_ended`).
        hides = values.get("include_reasoning") is False
        is_hidden = hides and (call.shows_single_tokens or self.is_structured(call))
        return Watch.NOT if is_hidden else Watch.IDS

    def observed(self, call: Call, watch: Watch = Watch.IDS) -> Call:
        """See Engine. Costs some bytes per token, and the prompt's ids once."""
        values = call.values
        options = values.get("stream_options") if call.include_usage else None
        changes: Mapping[str, object] = _OBSERVED
        if options and len(options) > 1:
            changes = {**changes, "stream_options": {**options, "include_usage": True}}
        if values.get("include_reasoning") is False:
            changes = {**changes, "include_reasoning": REMOVED}  # its ids would be missing
        return call.changed(changes, stream=True)

    def is_reproducible(self, call: Call, *, seeds_repeat: bool) -> bool:
        """See Engine."""
        return call.values.get("temperature") == 0 or (seeds_repeat and isinstance(call.values.get("seed"), int))

    def is_structured(self, call: Call) -> bool:
        """See Engine."""
        return is_structured(call, _GRAMMARS)

    def next_seed(self, seed: int, segment: int) -> int:
        """Another one: the same would repeat the random numbers of the first part. Any other is as good, as where the
        sequence stood cannot be told.
        """
        return (seed + segment * 0x9E3779B97F4A7C15) % 2**63

    def chat_from_ids(self, call: Call, key: str, prompt_ids: bytes, so_far: str) -> Call:
        """See Engine."""
        return replace(call, kv_params={key: orjson.Fragment(prompt_ids)})


VLLM: Final = Vllm()
