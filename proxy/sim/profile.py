"""Version profiles: what differs on the wire between the engine versions a gateway meets.

A profile names a vLLM version; with the Mooncake connector it stands for the vllm-ascend release built on it. One is
SGLang, in the version that was read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

ConnectorName = Literal["mooncake", "mooncake-pull", "mooncake-hybrid", "nixl"]
PromptIds = Literal["ignored", "replace", "text_only"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Behaviour of one engine version, as far as versions differ."""

    name: str
    version: str
    connector: ConnectorName
    """The connector an engine of this version is simulated with unless told otherwise."""
    swallows_empty_finish: bool
    """A choice that ends with no token has no final chunk in a stream (vLLM `chat_completion/serving.py`)."""
    nixl_releases_unused: bool
    mooncake_releases_unused: bool
    """A rejected or abandoned decode request tells the prefiller to free its blocks."""
    chat_prompt_ids: PromptIds = "ignored"
    """`kv_transfer_params.prompt_token_ids` in chat: replaces the rendered prompt, or only that of text requests."""
    has_parser_engine: bool = True
    """One state machine reads reasoning and tool calls (vLLM `parser/engine/`); before, two parsers over the text."""
    counts_reasoning: bool = False
    """The usage of a chat says how many tokens were reasoning."""
    offsets_follow_tokens: bool = False
    """A completion chunk's `text_offset` begins after the tokens reported before; in older versions, after the text."""
    keeps_length_finish: bool = False
    """Tool calls change only the finish reason "stop"; in older versions any."""
    has_prompt_text: bool = True
    """The role chunk has a `prompt_text`."""
    has_routed_experts: bool = False
    """Whole answers have `metrics`, and their choices `routed_experts`: null unless the engine is started otherwise."""
    has_fingerprint: bool = True
    has_json_reset: bool = True
    has_waiting_by_reason: bool = True
    explicit_nulls: bool = False
    """Completion chunks carry `usage: null` and chunks of a chat may too."""
    named_tool_choice_fails: bool = False
    """The prefill leg of a named `tool_choice` with a reasoning parser pins its KV and then answers 500."""
    has_block_size: bool = True
    tells_completion_ids: bool = True
    """Completions tell token ids if asked, which SGLang ignored before 0.5.17 (PR #30917)."""
    streams_chat_ids: bool = True
    """Streams of chats do, too, which SGLang refuses (PR #37365 would bring it)."""
    tokenizes_chats: bool = True
    """`/tokenize` takes chats, SGLang's from 0.5.12 on."""
    kv_events: Literal["array", "grouped array", "map"] = "map"
    """How an event is written: its fields in order, up to `medium` or with those that came later; or by their names."""
    streams_kv_params: bool = False
    """Chunks have `kv_transfer_params`: null in each, and in the last one those of the decoder with
    `bidirectional_kv_xfer` (vllm#40186)."""
    tells_kv_events: bool = False
    """`/kv_event_sources` says where."""
    is_sglang: bool = False
    """It speaks SGLang's dialect; what else a profile says is of vLLM then, and has no effect."""
    nixl_pin_seconds: float = 30.0

    def releases_unused(self, connector: ConnectorName) -> bool:
        if connector == "nixl":
            return self.nixl_releases_unused
        return self.mooncake_releases_unused and connector == "mooncake"

    def pin_seconds(self, connector: ConnectorName) -> float:
        """Return how long a prefiller keeps KV that no decoder pulls."""
        return self.nixl_pin_seconds if connector == "nixl" else 480.0


_V18: Final = Profile(
    name="v0.18",
    version="0.18.0",
    connector="mooncake",
    swallows_empty_finish=True,
    nixl_releases_unused=False,
    mooncake_releases_unused=False,
    has_parser_engine=False,
    has_prompt_text=False,
    has_fingerprint=False,
    has_json_reset=False,
    has_waiting_by_reason=False,
    explicit_nulls=True,
    named_tool_choice_fails=True,
    has_block_size=False,
    nixl_pin_seconds=480.0,
    kv_events="array",
)
_V23: Final = Profile(
    name="v0.23",
    version="0.23.0",
    connector="mooncake",
    swallows_empty_finish=True,
    nixl_releases_unused=True,
    mooncake_releases_unused=False,
    has_parser_engine=False,
    has_json_reset=False,
    kv_events="grouped array",
)
_V27: Final = Profile(
    name="v0.27",
    version="0.27.1",
    connector="mooncake",
    swallows_empty_finish=True,
    nixl_releases_unused=True,
    mooncake_releases_unused=False,
    chat_prompt_ids="replace",
    has_routed_experts=True,
)
_V30: Final = Profile(
    name="v0.30",
    version="0.30.0",
    connector="mooncake",
    swallows_empty_finish=True,
    nixl_releases_unused=True,
    mooncake_releases_unused=True,
    chat_prompt_ids="replace",
    counts_reasoning=True,
    has_routed_experts=True,
)
_V33: Final = Profile(
    name="v0.33",
    version="0.33.0",
    connector="nixl",
    swallows_empty_finish=False,
    nixl_releases_unused=True,
    mooncake_releases_unused=True,
    chat_prompt_ids="text_only",
    counts_reasoning=True,
    offsets_follow_tokens=True,
    keeps_length_finish=True,
    streams_kv_params=True,
    tells_kv_events=True,
    has_routed_experts=True,
)

_SGLANG: Final = Profile(
    name="sglang",
    version="0.5.23",
    connector="mooncake",
    swallows_empty_finish=False,
    nixl_releases_unused=False,
    mooncake_releases_unused=False,
    keeps_length_finish=True,
    streams_chat_ids=False,
    is_sglang=True,
)
_SGLANG_OLD: Final = replace(
    _SGLANG, name="sglang-0.5.16", version="0.5.16", tells_completion_ids=False, kv_events="array"
)
_SGLANG_OLDEST: Final = replace(_SGLANG_OLD, name="sglang-0.5.11", version="0.5.11", tokenizes_chats=False)
_SGLANG_CHAT_IDS: Final = replace(_SGLANG, name="sglang-chat-ids", streams_chat_ids=True)

PROFILES: Final[dict[str, Profile]] = {profile.name: profile for profile in (_V18, _V23, _V27, _V30, _V33)}
"""The versions of vLLM."""
SGLANG_PROFILES: Final[dict[str, Profile]] = {
    profile.name: profile for profile in (_SGLANG, _SGLANG_OLD, _SGLANG_OLDEST, _SGLANG_CHAT_IDS)
}
"""SGLang's profiles.

The version whose source was read, one without token ids, one without ids of a chat's prompt, and the first with those
of a pull request.
"""
ALL_PROFILES: Final[dict[str, Profile]] = PROFILES | SGLANG_PROFILES
