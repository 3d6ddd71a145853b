"""Profiles of engine versions: how requests and answers differ between the versions that a gateway meets.

A profile names a vLLM version. With the Mooncake connector it stands for the vllm-ascend release that is based on this
version. SGLang has its own profiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

ConnectorName = Literal["mooncake", "mooncake-pull", "mooncake-hybrid", "nixl"]
PromptIds = Literal["ignored", "replace", "text_only"]


@dataclass(frozen=True, slots=True)
class Profile:
    """The behaviour of one engine version, where versions differ."""

    name: str
    version: str
    connector: ConnectorName
    """The default connector of an engine of this version."""
    swallows_empty_finish: bool
    """Whether a streamed choice that ends without a token has no final chunk (vLLM `chat_completion/serving.py`)."""
    nixl_releases_unused: bool
    mooncake_releases_unused: bool
    """Whether a rejected or abandoned decode request makes the prefiller free its blocks."""
    chat_prompt_ids: PromptIds = "ignored"
    """Effect of `kv_transfer_params.prompt_token_ids` in a chat: they replace any prompt, or only one of text."""
    has_parser_engine: bool = True
    """Whether one state machine parses reasoning and tool calls (vLLM `parser/engine/`).

    Older versions have two parsers.
    """
    counts_reasoning: bool = False
    """Whether the usage of a chat reports the number of reasoning tokens."""
    offsets_follow_tokens: bool = False
    """Whether `text_offset` of a completion chunk continues after the reported tokens.

    In older versions, after the text.
    """
    keeps_length_finish: bool = False
    """Whether tool calls replace only the finish reason "stop". In older versions they replace any finish reason."""
    has_prompt_text: bool = True
    """Whether the role chunk has the member `prompt_text`."""
    has_routed_experts: bool = False
    """Whether whole answers have `metrics`, and their choices `routed_experts`. Both are null by default."""
    has_fingerprint: bool = True
    has_json_reset: bool = True
    has_waiting_by_reason: bool = True
    explicit_nulls: bool = False
    """Whether completion chunks have `usage: null`. Chunks of a chat may have it, too."""
    named_tool_choice_fails: bool = False
    """Whether a prefill leg with a named `tool_choice` and a reasoning parser pins its KV and then answers 500."""
    has_block_size: bool = True
    tells_completion_ids: bool = True
    """Whether completions have token ids if requested. SGLang ignored the request before 0.5.17 (PR #30917)."""
    streams_chat_ids: bool = True
    """Whether streams of chats have token ids. SGLang rejects such requests (PR #37365 would allow them)."""
    tokenizes_chats: bool = True
    """Whether `/tokenize` accepts chats. SGLang's does from 0.5.12 on."""
    kv_events: Literal["array", "grouped array", "map"] = "map"
    """How KV events are written: as an array up to `medium`, as an array with later fields, or as a map."""
    streams_kv_params: bool = False
    """Whether chunks have `kv_transfer_params`. They are null except in the last chunk with `bidirectional_kv_xfer`.

    The last chunk then has the decoder's parameters (vllm#40186).
    """
    tells_kv_events: bool = False
    """Whether `/kv_event_sources` reports the publishers of KV events."""
    is_sglang: bool = False
    """Whether the engine is SGLang. The members about vLLM then have no effect."""
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
