"""How each engine software reports answers and continues them: the Engine interface, vLLM and SGLang. No IO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson

from proxy.balancer.engines import CHAT_STREAM_TOKEN_IDS, TOKEN_IDS, WHOLE_EVENTS, Capability
from proxy.wire import sglang
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from proxy.dialects.call import Call

    Has = Callable[[Capability], bool]
    """Returns whether all engines that may serve an answer have a capability."""


class CannotResume(Exception):
    """The answer cannot be continued exactly. The text of the exception gives the reason."""


class WatchLevel(Enum):
    """How closely a stream is watched. The level decides how its answer can be continued."""

    __hash__ = object.__hash__  # that of an Enum is written in Python, and every request looks one up

    REPEAT_UNSEEN = auto()  # the request is repeated, as long as the client has no part of the answer
    REPEAT_AND_COMPARE = auto()  # the request is repeated, and its answer compared with the part that the client has
    CONTINUE_FROM_IDS = auto()  # the answer is continued from its token ids


class AnswerWatch:
    """The level at which the gateway watches one answer, and the engine software that serves it."""

    def __init__(self, engine: Engine, watch: WatchLevel) -> None:
        self.engine = engine
        self.level = watch
        self.is_watched = watch is not WatchLevel.REPEAT_UNSEEN
        """Whether the answer is watched."""

    def make_observable_call(self, call: Call) -> Call:
        """Return the call that engines get. If the answer is watched, it asks for the token ids that are needed."""
        return self.engine.make_observable_call(call, self.level) if self.is_watched else call


class Engine(ABC):
    """The way in which one engine software answers and resumes. The default methods are those of vLLM."""

    stop_member: ClassVar[str] = "stop_reason"
    """Name of the member of a choice that holds the stop string or the token id at which the engine stopped."""
    shows_stop_member: ClassVar[str] = "include_stop_str_in_output"
    """Name of the request member that makes the stop string a part of the answer."""
    always_reports_stop: ClassVar[bool] = False
    """Whether every chunk has `stop_member`. Otherwise only the last chunk has it."""
    reports_offsets: ClassVar[bool] = True
    """Whether the log probabilities of a completion report the offset in the text at which each token begins."""
    reasoning_field: ClassVar[str] = "reasoning"
    """Name of the delta member that holds reasoning, unless an answer uses another name."""
    sends_chats_as_text: ClassVar[bool] = False
    """Whether a chat that continues from token ids needs the text of its answer so far."""
    shows_half_tokens: ClassVar[bool] = False
    """Whether a token that ends with an incomplete character already shows its text before that character."""

    def __init__(self) -> None:
        self.watching = {watch: AnswerWatch(self, watch) for watch in WatchLevel}
        """One Watching for each level. They are made once, because every request uses one."""

    # Watching

    @abstractmethod
    def watch_level(self, call: Call, has: Has) -> WatchLevel:
        """Return the level at which a call's answer can be watched without changing it."""

    @abstractmethod
    def make_observable_call(self, call: Call, level: WatchLevel) -> Call:
        """Return the call that engines get. Its answer is observable: it is streamed, with all generated token ids."""

    # Going on

    @abstractmethod
    def is_reproducible(self, call: Call, *, seeds_repeat: bool) -> bool:
        """Return whether repeating the request gives the same answer. The two answers are compared in any case."""

    @abstractmethod
    def is_structured(self, call: Call) -> bool:
        """Return whether a grammar restricts the answer. The grammar would start again if the answer is continued."""

    def why_inexact(self, call: Call) -> str | None:
        """Return why the answer would change if a part of it became prompt; None if it would not change."""
        return None

    @abstractmethod
    def next_seed(self, seed: int, segment: int) -> int:
        """Return the seed with which the next decoder continues.

        `segment`: how many decoders have worked on the answer.
        """

    @abstractmethod
    def make_chat_call_from_ids(self, call: Call, key: str, prompt_ids: bytes, so_far: str) -> Call:
        """Return the chat with its prompt as token ids.

        Args:
            call: The chat.
            key: The name of the ids in the KV parameters of vLLM.
            prompt_ids: A JSON array, which ends in the ids of the answer so far.
            so_far: The text of that answer, with special tokens.
        """

    def completion_members(self, call: Call, sampling: Mapping[str, float] | None) -> Mapping[str, object]:
        """Return the sampling options that a completion needs to have the same answer as the chat.

        `sampling`: the engine's default options for chats; None: they are not known. Raises CannotResume.
        """
        return {}

    # Answers

    def shows_stop_strings(self, call: Call) -> bool:
        """Return whether the stop string of a call is a part of its answer."""
        return bool(call.sampling_members.get(self.shows_stop_member))

    def make_complete_choice(
        self, text: Mapping[str, Any], ending: Mapping[str, Any], prompt_ids: Any
    ) -> dict[str, Any]:
        """Return the only choice of a completion that is not streamed. Its members are in the engine's order.

        `ending`: its log probabilities, finish reason and token ids.
        """
        return {"index": 0, **text, **ending, "prompt_logprobs": None, "prompt_token_ids": prompt_ids}

    def make_final_members(self, fingerprint: str | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the members that follow the choices of an answer that is not streamed."""
        return {"service_tier": None, "system_fingerprint": fingerprint, "usage": usage}


# Members of a request that bind the answer of vLLM to a grammar.
_VLLM_GRAMMARS: Final = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
)
# Read off their classes by every request they would take as long as four calls.
_CHAT_API: Final = Api.CHAT
_TOKEN_ID_LEVEL: Final = WatchLevel.CONTINUE_FROM_IDS
# Members by which a stream has token ids and usage.
_OBSERVABLE_MEMBERS: Final[dict[str, object]] = {
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


class VllmEngine(Engine):
    """How vLLM and vLLM-Ascend answer and resume."""

    def watch_level(self, call: Call, has: Has) -> WatchLevel:
        if not has(CHAT_STREAM_TOKEN_IDS if call.api is _CHAT_API else TOKEN_IDS):
            return WatchLevel.REPEAT_UNSEEN
        if call.is_ordinary:
            return _TOKEN_ID_LEVEL
        values = call.values
        if values.get("prompt_logprobs") is not None or values.get("echo"):
            # vLLM rejects the first with `stream`, and the second with `return_token_ids` for a prompt of ids.
            return WatchLevel.REPEAT_UNSEEN
        if not call.stream and "routed_experts_prompt_start" in values:
            return WatchLevel.REPEAT_UNSEEN  # streams do not have what this asks for (chat_completion/protocol.py)
        # The engine hides reasoning, and only it knows which tokens belong to it. A grammar then begins at once (vLLM
        # `resolve_reasoning_ended`).
        hides = values.get("include_reasoning") is False
        is_hidden = hides and (call.shows_token_details or self.is_structured(call))
        return WatchLevel.REPEAT_UNSEEN if is_hidden else WatchLevel.CONTINUE_FROM_IDS

    def make_observable_call(self, call: Call, level: WatchLevel = WatchLevel.CONTINUE_FROM_IDS) -> Call:
        """Return a call whose answer is some bytes larger for each token, and once by the ids of the prompt."""
        values = call.values
        options = values.get("stream_options") if call.include_usage else None
        changes: Mapping[str, object] = _OBSERVABLE_MEMBERS
        if options and len(options) > 1:
            changes = {**changes, "stream_options": {**options, "include_usage": True}}
        if values.get("include_reasoning") is False:
            changes = {**changes, "include_reasoning": REMOVED}  # the ids of reasoning would be missing
        return call.copy_with_changes(changes, stream=True)

    def is_reproducible(self, call: Call, *, seeds_repeat: bool) -> bool:
        return call.values.get("temperature") == 0 or (seeds_repeat and isinstance(call.values.get("seed"), int))

    def is_structured(self, call: Call) -> bool:
        return has_structured_output(call, _VLLM_GRAMMARS)

    def next_seed(self, seed: int, segment: int) -> int:
        """Return the seed with which the next decoder continues: a different one for each decoder.

        The same seed would repeat the random numbers of the first part. The state of that sequence is unknown, so any
        other seed is equally good.
        """
        return (seed + segment * 0x9E3779B97F4A7C15) % 2**63

    def make_chat_call_from_ids(self, call: Call, key: str, prompt_ids: bytes, so_far: str) -> Call:
        return replace(call, kv_params={key: orjson.Fragment(prompt_ids)})


VLLM: Final = VllmEngine()

# The same of SGLang.
_SGLANG_GRAMMARS: Final = ("json_schema", "regex", "ebnf")
# Penalties count the tokens of an answer, but not those in the prompt (`penaltylib`; with vLLM the repetition penalty
# counts the prompt, too). Each with the value that has no effect.
_PENALTY_MEMBERS: Final = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
_SAMPLING_MEMBER_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Other members that ignore the tokens in the prompt.
_MEMBERS_IGNORING_PROMPT: Final = ("stop_regex", "custom_logit_processor", "session_params")
# The same of /generate, and prompts that are more than text or ids.
_NATIVE_MEMBERS: Final = (
    *("image_data", "video_data", "audio_data", "input_embeds", "session_params", "custom_logit_processor"),
    *("return_hidden_states", "return_sampling_mask"),
)
# Members whose results come once, at the end, or depend on a position in the sequence.
_MEMBERS_NEEDING_ONE_ENGINE: Final = (
    "echo",
    "return_hidden_states",
    "return_routed_experts",
    "return_cached_tokens_details",
)


class SglangEngine(Engine):
    """How SGLang answers and resumes. Written from its sources from 0.5.17 to 0.5.23."""

    stop_member = "matched_stop"
    shows_stop_member = "no_stop_trim"
    always_reports_stop = True
    reports_offsets = False  # each is -1 (`to_openai_style_logprobs`)
    reasoning_field = "reasoning_content"
    sends_chats_as_text = True
    shows_half_tokens = True  # up to the last space (`find_printable_text`)

    def watch_level(self, call: Call, has: Has) -> WatchLevel:
        """Return a level also for streams of chats, which have no ids: a greedy chat can be replayed."""
        values = call.values
        if any(values.get(name) for name in _MEMBERS_NEEDING_ONE_ENGINE):
            return WatchLevel.REPEAT_UNSEEN
        if call.api is Api.GENERATE:
            return self._watch_native(call, has)
        if has(TOKEN_IDS if call.api is Api.COMPLETIONS else CHAT_STREAM_TOKEN_IDS):
            return WatchLevel.CONTINUE_FROM_IDS
        # A whole answer can be repeated until its end, and only some tokens have log probabilities.
        if call.api is Api.CHAT and call.stream and not call.shows_token_details and values.get("temperature") == 0:
            return WatchLevel.REPEAT_AND_COMPARE
        return WatchLevel.REPEAT_UNSEEN

    def _watch_native(self, call: Call, has: Has) -> WatchLevel:
        """Return the level for `/generate`. Its events always have token ids."""
        members = call.read_members(_NATIVE_MEMBERS)
        is_told_in_parts = sglang.needs_prefill_answer(call.read_members(sglang.MEMBERS_NEEDING_PREFILL_ANSWER))
        if any(members.values()) or is_told_in_parts or not (has(TOKEN_IDS) and has(WHOLE_EVENTS)):
            return WatchLevel.REPEAT_UNSEEN
        prompt = call.read_members(("text", "input_ids"))
        return (
            WatchLevel.CONTINUE_FROM_IDS
            if any(value is not None for value in prompt.values())
            else WatchLevel.REPEAT_UNSEEN
        )

    def make_observable_call(self, call: Call, level: WatchLevel) -> Call:
        if level is WatchLevel.REPEAT_AND_COMPARE:
            return call  # a stream with usage needs no change
        if call.api is Api.GENERATE:
            return call.copy_with_changes({"stream": True}, stream=True)
        options = call.values.get("stream_options") if call.include_usage else None
        changes: dict[str, object] = {
            "stream": True,
            "return_token_ids": True,
            "stream_options": {**(options or {}), "include_usage": True},
        }
        return call.copy_with_changes(changes, stream=True)

    def is_reproducible(self, call: Call, *, seeds_repeat: bool) -> bool:
        values = call.sampling_members
        seed = values.get("sampling_seed" if call.api is Api.GENERATE else "seed")
        return values.get("temperature") == 0 or (seeds_repeat and isinstance(seed, int))

    def is_structured(self, call: Call) -> bool:
        return has_structured_output(call, _SGLANG_GRAMMARS)

    def why_inexact(self, call: Call) -> str | None:
        values = call.sampling_members
        for name, none in _PENALTY_MEMBERS.items():
            if values.get(name) not in (None, none):
                return f"SGLang's {name} would not count the tokens before the break"
        for name in _MEMBERS_IGNORING_PROMPT:
            if values.get(name):
                return f"SGLang's {name} would not see the tokens before the break"
        return None

    def next_seed(self, seed: int, segment: int) -> int:
        """Return the same seed, because SGLang draws random numbers by seed and position (`layers/sampler.py`).

        So even a sampled answer continues as it would have without the break.
        """
        return seed

    def make_chat_call_from_ids(self, call: Call, key: str, prompt_ids: bytes, so_far: str) -> Call:
        """Return the chat with its prompt as token ids, in the member `input_ids`.

        The messages are not rendered then. The parser of reasoning still searches the last message of the assistant for
        markers (`parser/reasoning_parser.py`).
        """
        changes: dict[str, Any] = {"input_ids": orjson.Fragment(prompt_ids)}
        if so_far:
            changes["messages"] = [*call.values["messages"], {"role": "assistant", "content": so_far}]
            changes["continue_final_message"] = True
        return call.copy_with_changes(changes)

    def completion_members(self, call: Call, sampling: Mapping[str, float] | None) -> Mapping[str, object]:
        """Return the options that a chat, unlike a completion, takes from `generation_config.json` of the model.

        See `to_sampling_params` and `_build_sampling_params`. A completion rejects null as a number.
        """
        if sampling is None:
            raise CannotResume("the default sampling options of SGLang's chats are not known")
        unset = [name for name in _SAMPLING_MEMBER_NAMES if call.values.get(name) is None]
        return {name: sampling.get(name, REMOVED) for name in unset if name in sampling or name in call.values}

    def make_complete_choice(
        self, text: Mapping[str, Any], ending: Mapping[str, Any], prompt_ids: Any
    ) -> dict[str, Any]:
        """Return the choice, with token ids only for clients that asked for them."""
        ids = {"token_ids": ending["token_ids"], "prompt_token_ids": prompt_ids}
        choice = {"index": 0, **text, **{name: value for name, value in ending.items() if name not in ids}}
        return choice | {name: value for name, value in ids.items() if value is not None}

    def make_final_members(self, fingerprint: str | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the usage alone: streams do not have `metadata`, the version of the weights."""
        return {"usage": usage}


SGLANG: Final = SglangEngine()
ENGINES: Final[Mapping[str, Engine]] = {"vLLM": VLLM, "SGLang": SGLANG}
"""The engine software on which answers can be continued, by `EngineIdentity.engine_kind`."""


# vLLM's limit for a completion that names none, or null (`CompletionRequest`).
_COMPLETION_TOKENS: Final = 16


def read_output_limit(call: Call) -> int | None:
    """Return the maximum number of tokens of the answer; None: as many as fit into the engine's context."""
    if call.api is Api.GENERATE:
        return sglang.read_output_limit(call.sampling_members)
    values = call.values
    limit = values.get("max_completion_tokens") if call.api is Api.CHAT else None
    if limit is None:
        limit = values.get("max_tokens")
    if limit is None and call.api is Api.COMPLETIONS:
        return _COMPLETION_TOKENS
    return limit if isinstance(limit, int) else None


def read_min_tokens(call: Call) -> int:
    """Return the minimum number of tokens of the answer; 0 if it may be empty."""
    least = call.sampling_members.get("min_new_tokens" if call.api is Api.GENERATE else "min_tokens")
    return max(0, least) if isinstance(least, int) else 0


def may_call_tools(call: Call) -> bool:
    """Return whether the answer may call tools."""
    return bool(call.values.get("tools")) and call.values.get("tool_choice") != "none"


def has_structured_output(call: Call, members: Collection[str]) -> bool:
    """Return whether a grammar restricts the answer. The grammar would start again if the answer is continued.

    `members`: request members that name a grammar, in addition to those of the API.
    """
    values = call.sampling_members
    form = values.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    if any(values.get(name) is not None for name in members):
        return True
    choice = values.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        return True
    functions = [tool.get("function") for tool in values.get("tools") or () if isinstance(tool, dict)]
    return any(isinstance(function, dict) and function.get("strict") for function in functions)


def has_media_parts(call: Call) -> bool:
    """Return whether a chat's messages contain anything but text."""
    messages = call.values.get("messages")
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)
