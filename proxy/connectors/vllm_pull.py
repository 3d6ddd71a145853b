"""vLLM pull protocol: prefill first, then the decoder pulls the KV cache from the prefiller.

Spoken by vLLM's NixlConnector and vLLM-Ascend's MooncakeConnector. The prefiller's answer carries `kv_transfer_params`,
which name what the decoder is to fetch; without them it would compute the prompt once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.connectors.handoff import KvSource
from proxy.connectors.sequential import Sequential
from proxy.errors import Failure, UpstreamError

if TYPE_CHECKING:
    from proxy.call import Call
    from proxy.connectors.handoff import KvHandoff
    from proxy.connectors.sequential import Prefilled, Steps
    from proxy.observe.timeline import Timeline


class VllmPull(Sequential):
    """Prefill → decode, one after the other; the second with what the first one's answer names."""

    source_without_kv = KvSource.DECODER

    def prefill(self, call: Call, handoff: KvHandoff, timeline: Timeline) -> Steps[Prefilled]:
        """Run the prefill leg; ask a second time, if so configured, when the answer has no KV parameters."""
        lease, fitness = handoff.prefiller, self._context.fitness
        may_ask_again = self._context.settings.kv.on_missing == "retry_prefill"
        while True:
            try:
                prefilled = yield from self.ask_prefiller(call, lease.backend, timeline)
            except UpstreamError as error:
                self._releaser.suspect(lease.backend, call.prompt_tokens, error)
                raise
            fitness.prefilled(lease.backend, prefilled.kv is not None)
            if prefilled.kv is not None:
                return prefilled
            missing = prefilled.response.fail(Failure.MISSING_KV, "the answer has no KV parameters for a decoder")
            if not may_ask_again:
                self._go_without_kv(call, missing)
                return replace(prefilled, params=None)
            may_ask_again = False
            self._metrics.missing_kv_total.labels("retry_prefill").inc()
            self.move(lease, handoff.failed, missing)  # the same prefiller once more where there is no other

    def _go_without_kv(self, call: Call, missing: UpstreamError) -> None:
        """Let the decoder prefill by itself where the policy allows it; otherwise raise `missing`."""
        kv = self._context.settings.kv
        local = kv.on_missing == "local" or (
            # A decoder is sized for decoding: a long prompt there stalls every stream it serves.
            kv.on_missing == "retry_prefill" and call.prompt_tokens <= kv.local_max_tokens
        )
        self._metrics.missing_kv_total.labels("local" if local else "error").inc()
        if not local:
            missing.code = "kv_handoff_failed"
            raise missing
