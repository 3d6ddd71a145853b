"""An answer whose decoder was lost: what decides how it goes on, and the decision. No IO."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.common.terms import Action
    from proxy.dialects.call import Call
    from proxy.resume.engines import Engine
    from proxy.resume.seam import Seam
    from proxy.resume.transcript import Transcript


class ChatTokens(StrEnum):
    """How the engines take a chat's prompt as token ids."""

    NATIVE = "native"  # vLLM 0.27 as `kv_transfer_params.prompt_token_ids`, SGLang 0.5.13 as `input_ids`
    ASCEND_PRIVATE = "ascend_private"  # a patch of vllm-ascend 0.26rc (#14389)
    COMPLETIONS = "completions"  # not at all: as a completion

    @property
    def key(self) -> str:
        return "prompt_token_ids" if self is ChatTokens.NATIVE else "_vllm_ascend_recompute_token_ids"


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that decides how an answer is continued."""

    engine: Engine
    """The software that works on it."""
    call: Call
    """The call as the client sent it, watched."""
    head: Mapping[str, Any]
    """The members that all chunks of the client's stream have in common."""
    transcript: Transcript
    shown: bool
    """The client has a part of the answer."""
    shows_ids: bool
    """The client sees token ids or log probabilities."""
    ahead: Sequence[int]
    """Token ids the client has seen that are not in the transcript any more."""
    segment: int
    """Decoders that have worked on the answer."""
    keeps_length: bool
    """Engines finish a chat by length even if it calls tools."""
    chats: ChatTokens
    shows_blanks: bool
    """Engines are expected to show white space at the end of reasoning at once. The client's text decides."""
    seeds_repeat: bool
    """The same request with the same seed has the same answer."""
    max_model_len: int | None
    """Tokens that fit into a sequence; None when engines do not tell."""
    parses_reasoning: bool | None = None
    """Whether engines have a reasoning parser, which shows special tokens as text. None: that is not known."""
    chat_sampling: Mapping[str, float] | None = None
    """Sampling options of chats that do not set them; None: they are not known."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """How an answer is continued.

    `call` None: it ends here, because of its length. `seam` None: it is repeated, because the client has no part of it.
    """

    action: Action
    call: Call | None
    seam: Seam | None = None
    kept: int = 0
    """Token ids of the answer that need not be generated again."""
    prompt_ids: bytes | None = None
    """The prompt that an engine reports if it continues the answer; a JSON array of token ids."""
