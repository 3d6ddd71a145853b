"""vLLM pull protocol: prefill first, then the decoder pulls the KV cache from the prefiller.

Spoken by vLLM's NixlConnector and vLLM-Ascend's MooncakeConnector. The prefiller's answer carries `kv_transfer_params`,
which name what the decoder is to fetch; without them it would compute the prompt once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.common.errors import Failure
from proxy.connectors.handoff import KvSource
from proxy.connectors.sequential import Sequential

if TYPE_CHECKING:
    from proxy.common.errors import UpstreamError
    from proxy.connectors.handoff import KvHandoff
    from proxy.dialects.call import Call
    from proxy.dialects.engine_answer import EngineAnswer


class VllmPull(Sequential):
    """Prefill → decode, one after the other; the decoder gets the KV parameters of the prefiller's answer."""

    source_without_kv = KvSource.DECODER

    def prefill_failed(self, call: Call, error: UpstreamError) -> None:
        """KV may have been left behind."""
        self._releaser.suspect(error.backend, call.prompt_tokens, error)

    def takes(self, call: Call, handoff: KvHandoff, answer: EngineAnswer, *, has_kv: bool, asks_again: bool) -> bool:
        """Ask a second time, if so configured, when the answer has no KV parameters."""
        lease = handoff.prefiller
        self._context.fitness.prefilled(lease.backend, has_kv)
        if has_kv:
            return True
        asks_again = asks_again and self._context.settings.kv.on_missing == "retry_prefill"
        # A decoder is sized for decoding: a long prompt there stalls every stream it serves.
        is_short = call.prompt_tokens <= self._context.settings.kv.local_max_tokens
        if not asks_again:
            self._let_decoder_compute(answer, is_short=is_short)
            return True
        self._metrics.missing_kv_total.labels("retry_prefill").inc()
        self.move(lease, handoff.failed, _missing_kv(answer))  # the same prefiller again if there is no other
        return False

    def go_without_kv(self, handoff: KvHandoff, answer: EngineAnswer) -> None:
        """See Sequential. A long prompt, too: without KV of any prefiller the answer would be an error."""
        self._let_decoder_compute(answer, is_short=True)

    def _let_decoder_compute(self, answer: EngineAnswer, *, is_short: bool) -> None:
        """Count what `kv.on_missing` makes of missing KV. Raises UpstreamError where the decoder may not compute it."""
        on_missing = self._context.settings.kv.on_missing
        local = on_missing == "local" or (on_missing == "retry_prefill" and is_short)
        self._metrics.missing_kv_total.labels("local" if local else "error").inc()
        if not local:
            missing = _missing_kv(answer)
            missing.code = "kv_handoff_failed"
            raise missing


def _missing_kv(answer: EngineAnswer) -> UpstreamError:
    return answer.fail(Failure.MISSING_KV, "the answer has no KV parameters for a decoder")
