"""How SGLang tells an answer and takes it up again, by its sources from 0.5.17 to 0.5.23. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.balancer.engines.capabilities import CHAT_STREAM_TOKEN_IDS, TOKEN_IDS, WHOLE_EVENTS
from proxy.resume.call_options import is_structured
from proxy.resume.engine import Engine, Watch
from proxy.resume.resumption import CannotResume
from proxy.wire import sglang
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.call import Call
    from proxy.resume.engine import Has

_GRAMMARS: Final = ("json_schema", "regex", "ebnf")
# What counts the tokens of an answer, of which those in the prompt are none (`penaltylib`, also the repetition penalty,
# which with vLLM counts the prompt), and the value that does nothing.
_PENALTIES: Final = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
_SAMPLED_BY: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What else would not see what is in the prompt.
_BLIND: Final = ("stop_regex", "custom_logit_processor", "session_params")
# Of /generate likewise, and prompts that are more than text or ids.
_NATIVE: Final = (
    *("image_data", "video_data", "audio_data", "input_embeds", "session_params", "custom_logit_processor"),
    *("return_hidden_states", "return_sampling_mask"),
)
# What comes once, at the end, or is asked for by its place in the sequence.
_OF_THE_WHOLE: Final = ("echo", "return_hidden_states", "return_routed_experts", "return_cached_tokens_details")


class Sglang(Engine):
    """See Engine."""

    stop_member = "matched_stop"
    shows_stop_member = "no_stop_trim"
    names_stop_always = True
    tells_offsets = False  # each is -1 (`to_openai_style_logprobs`)
    reasoning_field = "reasoning_content"
    wants_text = True
    shows_half_tokens = True  # up to the last space (`find_printable_text`)

    def watch(self, call: Call, has: Has) -> Watch:
        """See Engine. Chats tell no ids in their streams, but a greedy one can be replayed."""
        values = call.values
        if any(values.get(name) for name in _OF_THE_WHOLE):
            return Watch.NOT
        if call.api is Api.GENERATE:
            return self._watch_native(call, has)
        if has(TOKEN_IDS if call.api is Api.COMPLETIONS else CHAT_STREAM_TOKEN_IDS):
            return Watch.IDS
        # What is not streamed can begin anew until its end, and log probabilities come with some tokens only.
        if call.api is Api.CHAT and call.stream and not call.shows_single_tokens and values.get("temperature") == 0:
            return Watch.TEXT
        return Watch.NOT

    def _watch_native(self, call: Call, has: Has) -> Watch:
        """Of `/generate`, whose events always have the ids."""
        members = call.members(_NATIVE)
        is_told_in_parts = sglang.wants_prefillers_answer(call.members(sglang.ABOUT_PROMPT))
        if any(members.values()) or is_told_in_parts or not (has(TOKEN_IDS) and has(WHOLE_EVENTS)):
            return Watch.NOT
        prompt = call.members(("text", "input_ids"))
        return Watch.IDS if any(value is not None for value in prompt.values()) else Watch.NOT

    def observed(self, call: Call, watch: Watch) -> Call:
        """See Engine."""
        if watch is Watch.TEXT:
            return call  # the same as ever: it is streamed, and its usage is asked for
        if call.api is Api.GENERATE:
            return call.changed({"stream": True}, stream=True)
        options = call.values.get("stream_options") if call.include_usage else None
        changes: dict[str, object] = {
            "stream": True,
            "return_token_ids": True,
            "stream_options": {**(options or {}), "include_usage": True},
        }
        return call.changed(changes, stream=True)

    def is_reproducible(self, call: Call, *, seeds_repeat: bool) -> bool:
        """See Engine."""
        values = call.sampling
        seed = values.get("sampling_seed" if call.api is Api.GENERATE else "seed")
        return values.get("temperature") == 0 or (seeds_repeat and isinstance(seed, int))

    def is_structured(self, call: Call) -> bool:
        """See Engine."""
        return is_structured(call, _GRAMMARS)

    def inexact(self, call: Call) -> str | None:
        """See Engine."""
        values = call.sampling
        for name, none in _PENALTIES.items():
            if values.get(name) not in (None, none):
                return f"SGLang's {name} would not count the tokens before the break"
        for name in _BLIND:
            if values.get(name):
                return f"SGLang's {name} would not see the tokens before the break"
        return None

    def next_seed(self, seed: int, segment: int) -> int:
        """The same one. Where it counts at all, a random number is made of it and of the position
        (`layers/sampler.py`), so that even a sampled answer goes on as it would have.
        """
        return seed

    def chat_from_ids(self, call: Call, key: str, prompt_ids: bytes, so_far: str) -> Call:
        """See Engine. The messages, which are not rendered then, tell the parser of reasoning where the answer is: it
        looks for markers in that of the assistant (`parser/reasoning_parser.py`).
        """
        changes: dict[str, Any] = {"input_ids": orjson.Fragment(prompt_ids)}
        if so_far:
            changes["messages"] = [*call.values["messages"], {"role": "assistant", "content": so_far}]
            changes["continue_final_message"] = True
        return call.changed(changes)

    def as_completion(self, call: Call, sampling: Mapping[str, float] | None) -> Mapping[str, object]:
        """See Engine. What a chat does not say it takes from the model's `generation_config.json`, and a completion
        from nowhere (`to_sampling_params`, `_build_sampling_params`); null is no number for a completion.
        """
        if sampling is None:
            raise CannotResume("what SGLang samples a chat by is not known")
        unsaid = [name for name in _SAMPLED_BY if call.values.get(name) is None]
        return {name: sampling.get(name, REMOVED) for name in unsaid if name in sampling or name in call.values}

    def whole_choice(self, text: Mapping[str, Any], ending: Mapping[str, Any], prompt_ids: Any) -> dict[str, Any]:
        """See Engine. Ids are told only to who asked for them."""
        ids = {"token_ids": ending["token_ids"], "prompt_token_ids": prompt_ids}
        choice = {"index": 0, **text, **{name: value for name, value in ending.items() if name not in ids}}
        return choice | {name: value for name, value in ids.items() if value is not None}

    def whole_tail(self, fingerprint: str | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """See Engine. `metadata`, the version of the weights, is not told in streams."""
        return {"usage": usage}


SGLANG: Final = Sglang()
