"""What engines can do since which version: the one table that the rest of the gateway asks by name.

Versions are vLLM's; vLLM-Ascend numbers its releases alike. SGLang's are lower than all of them, so an engine of SGLang
has none of these. A row is a capability: the version that brought it, and what is assumed of an engine whose version is
not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.balancer.engine_facts import EngineVersion


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that engines can do from version `since` on."""

    since: EngineVersion
    if_unknown: bool = False
    """Whether an engine that does not tell its version is taken to have it."""

    def is_in(self, version: EngineVersion | None) -> bool:
        """Whether an engine of this version has it; None: the engine does not tell its version."""
        return self.if_unknown if version is None else version >= self.since


CHAT_TOKEN_IDS: Final = Capability((0, 27))
"""A chat's prompt can be given as `kv_transfer_params.prompt_token_ids` (renderers/online_renderer.py, PR #48145)."""
LENGTH_BESIDE_TOOL_CALLS: Final = Capability((0, 32))
"""An answer that ends for length says so even if it calls tools (chat_completion/serving.py)."""
REASONING_USAGE: Final = Capability((0, 30))
"""The usage of a chat counts reasoning tokens, if the engine has a parser for them."""
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
