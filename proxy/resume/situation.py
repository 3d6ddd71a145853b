"""The facts that decide how an answer with a lost decoder continues, and the resulting decision. No IO."""

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


class ChatTokenApi(StrEnum):
    """How engines accept the prompt of a chat as token ids."""

    NATIVE_MEMBER = "native"  # vLLM 0.27 as `kv_transfer_params.prompt_token_ids`, SGLang 0.5.13 as `input_ids`
    ASCEND_PRIVATE_MEMBER = "ascend_private"  # a patch of vllm-ascend 0.26rc (#14389)
    COMPLETIONS_API = "completions"  # not at all: as a completion

    @property
    def member_name(self) -> str:
        return "prompt_token_ids" if self is ChatTokenApi.NATIVE_MEMBER else "_vllm_ascend_recompute_token_ids"


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts that decide how an answer continues after its decoder was lost."""

    engine: Engine
    """The engine software that serves the answer."""
    call: Call
    """The call as the client sent it, with the changes that make its answer observable."""
    answer_head: Mapping[str, Any]
    """The members that all chunks of the client's stream have in common."""
    transcript: Transcript
    is_answer_shown: bool
    """Whether the client has received a part of the answer."""
    shows_ids: bool
    """Whether the client's answer has token ids or log probabilities."""
    dropped_ids: Sequence[int]
    """Token ids that the client has seen and that are no longer in the transcript."""
    decoder_count: int
    """The number of decoders that have worked on the answer."""
    keeps_length: bool
    """Whether engines report the finish reason `length` even for a chat that calls tools."""
    chat_token_api: ChatTokenApi
    shows_blanks: bool
    """Whether engines probably send white space at the end of reasoning at once. The client's text decides."""
    repeats_seeded_answers: bool
    """Whether the same request with the same seed has the same answer."""
    max_model_len: int | None
    """Maximum number of tokens in a sequence; None if engines do not report it."""
    parses_reasoning: bool | None = None
    """Whether engines have a reasoning parser, which shows special tokens as text; None if it is not known."""
    chat_sampling: Mapping[str, float] | None = None
    """The engines' default sampling options for chats; None if they are not known."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The decision how an answer continues after its decoder was lost.

    `call` None: the answer ends here, because of its length. `seam` None: the answer starts again, because the client
    has no part of it.
    """

    action: Action
    call: Call | None
    seam: Seam | None = None
    kept_ids: int = 0
    """The number of the answer's token ids that need not be generated again."""
    prompt_ids: bytes | None = None
    """The prompt that an engine reports if it continues the answer: a JSON array of token ids. None: it restarts."""
