"""vLLM with a KV store that all engines share: prefill first, then the decoder finds the KV cache in the store.

Spoken by vLLM's MooncakeStoreConnector and vLLM-Ascend's AscendStoreConnector and UCMConnector, whose
`request_finished` names nothing for a decoder: it looks blocks up by the hashes of the prompt's tokens. Part of a
MultiConnector, another connector may name something, which goes to the decoder as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.balancer.fitness.handovers import LEAST_STORED_TOKENS
from proxy.connectors.handoff import KvSource
from proxy.connectors.sequential import Sequential

if TYPE_CHECKING:
    from proxy.common.errors import UpstreamError
    from proxy.connectors.handoff import KvHandoff
    from proxy.dialects.call import Call
    from proxy.dialects.engine_answer import EngineAnswer


class VllmStore(Sequential):
    """Prefill → decode, one after the other; what is between them is the store's business."""

    least_tokens = LEAST_STORED_TOKENS
    source_without_kv = KvSource.STORE

    def prefill_failed(self, call: Call, error: UpstreamError) -> None:
        """Nothing is left behind: what is stored is free."""

    def takes(self, call: Call, handoff: KvHandoff, answer: EngineAnswer, *, has_kv: bool, asks_again: bool) -> bool:
        """Whatever it is."""
        return True

    def go_without_kv(self, handoff: KvHandoff, answer: EngineAnswer) -> None:
        """The store has the KV of every prompt, however its prefill ended."""
