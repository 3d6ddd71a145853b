"""What engines can do since which version: the one table that the rest of the gateway asks by name.

A row is a capability: the version of vLLM that brought it (vLLM-Ascend numbers its releases alike), what is assumed of
a vLLM whose version is not known, and what of SGLang has it: from a version on, what says so itself, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.balancer.engines.engine_facts import UNKNOWN_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.balancer.engines.engine_facts import EngineFacts, EngineVersion, Setup


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """Something that engines of vLLM can do from version `since` on. Only the same one is equal to it."""

    since: EngineVersion
    if_unknown: bool = False
    """Whether an engine that does not tell its version is taken to have it."""
    in_sglang: EngineVersion | Callable[[Setup], bool] | None = None
    """From which version on SGLang has it, or whether one that was started like this has it; None: none has. What does
    not tell has not.
    """

    def is_in(self, version: EngineVersion | None) -> bool:
        """Whether a vLLM of this version has it; None: the engine does not tell its version. SGLang's versions are
        lower than all of these.
        """
        return self.if_unknown if version is None else version >= self.since

    def is_in_engine(self, facts: EngineFacts | None, kind: str) -> bool:
        """Whether an engine of this kind (`vLLM` or `SGLang`) has it; None: nothing is known of it."""
        if kind != "SGLang":
            return self.is_in(None if facts is None or facts.version == UNKNOWN_VERSION else facts.version)
        if facts is None or self.in_sglang is None:
            return False
        if callable(self.in_sglang):
            return facts.identity.setup is not None and self.in_sglang(facts.identity.setup)
        return facts.version >= self.in_sglang


TOKEN_IDS: Final = Capability((0, 0), if_unknown=True, in_sglang=(0, 5, 17))
"""The stream of a completion tells token ids if it is asked for them with `return_token_ids`, and a prompt may be token
ids (SGLang `serving_completions.py`, PR #30917; older ones ignore the member)."""
CHAT_STREAM_TOKEN_IDS: Final = Capability((0, 0), if_unknown=True, in_sglang=lambda setup: setup.tells_chat_ids)
"""That of a chat does, too. SGLang up to 0.5.23 refuses such a chat with 400 (`serving_chat.py`), and
sgl-project/sglang#37365 would bring it. So each is asked when it comes up."""
WHOLE_EVENTS: Final = Capability((0, 0), in_sglang=lambda setup: setup.tells_whole_events)
"""Each event of SGLang's `/generate` has the answer so far, as text and as ids, unless it was started otherwise."""
KIMI_TOOLS: Final = Capability((0, 0), in_sglang=lambda setup: setup.tool_parser == "kimi_k2")
"""SGLang reads the tool calls of Kimi K2 in chats."""
KIMI_REASONING: Final = Capability((0, 0), in_sglang=lambda setup: setup.reasoning_parser == "kimi_k2")
"""SGLang tells the reasoning of Kimi K2 apart from content in chats."""
SEEDS_REPEAT: Final = Capability((0, 0), if_unknown=True, in_sglang=lambda setup: setup.is_deterministic)
"""The same request with the same seed has the same answer. SGLang ignores seeds, unless it was started with
`--enable-deterministic-inference` (`sampling_batch_info.py`)."""


CHAT_TOKEN_IDS: Final = Capability((0, 27), in_sglang=(0, 5, 13))
"""A chat's prompt can be given as token ids: `kv_transfer_params.prompt_token_ids` (renderers/online_renderer.py, PR
#48145), with SGLang `input_ids` (`serving_chat.py`, PR #23751)."""
LENGTH_BESIDE_TOOL_CALLS: Final = Capability((0, 32), in_sglang=(0, 5))
"""An answer that ends for length says so even if it calls tools (chat_completion/serving.py)."""
REASONING_USAGE: Final = Capability((0, 30))
"""The usage of a chat counts reasoning tokens, if the engine has a parser for them."""
ROUTED_EXPERTS: Final = Capability((0, 27))
"""Whole answers have `metrics`, and each of their choices `routed_experts` (chat_completion/protocol.py). Both are null
unless the engine runs with `--enable-per-request-metrics` or `--enable-return-routed-experts`."""
TRAILING_BLANKS_HELD: Final = Capability((0, 27))
"""White space at the end of reasoning is held back until it is known what follows (parser/engine/parser_engine.py)."""
FORCED_TOOL_PREFILL: Final = Capability((0, 23), if_unknown=True)
"""A one-token answer to a request with a forced tool call succeeds. Before, it fails with 500 after the KV cache was
pinned: `assert content is not None` in vLLM 0.18 entrypoints/openai/engine/serving.py."""
NIXL_RELEASE: Final = Capability((0, 32))
"""A decoder that rejects a request has NIXL tell the prefiller to free the KV cache that the request names.

vLLM wraps its handlers in `_with_kv_transfer_rejection_cleanup` since 0.23, and NIXL sends the message since then, but
first has to shake hands with a prefiller it does not know yet, and where that fails, because the prefiller has just
died, the decoder's engine core ends as well (PR #57570). 0.32 is the first version that was read to have the repair;
before that it is not worth the risk, as the lease is only 30 s. After a handshake the message waits for the engine's
next step, so that of an idle decoder may come after the lease."""
ASCEND_MOONCAKE_RELEASE: Final = Capability((0, 28))
"""Likewise vLLM-Ascend's MooncakeConnectorV1, since PR #14142, which no release before 0.28 has."""
NIXL_LEASE: Final = Capability((0, 23))
"""`kv_lease_duration`, which is 30 s unless configured, took the place of VLLM_NIXL_ABORT_REQUEST_TIMEOUT."""
