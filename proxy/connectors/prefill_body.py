"""What a prefill leg asks of a vLLM engine: the prompt's KV cache, and one token that is thrown away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.balancer.engines.capabilities import FORCED_TOOL_PREFILL
from proxy.wire.document import REMOVED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.backend import Backend
    from proxy.balancer.pool import Pool
    from proxy.call import Call
    from proxy.wire.document import Body

# A prefiller keeps the KV cache only if it stops for length after its one token, so `min_tokens` keeps an
# end-of-sequence token from ending it first (vLLM v1/core/sched/utils.py check_stop). The token itself is thrown away:
# the decoder computes the last prompt position again and samples for itself.
_CHANGES: Final[dict[str, object]] = {
    "kv_transfer_params": None,  # each protocol has its own
    "stream": False,
    "max_tokens": 1,
    "min_tokens": 1,
    "stream_options": REMOVED,
    "logprobs": REMOVED,
    "top_logprobs": REMOVED,
    "return_token_ids": REMOVED,
}
_LIMITED: Final = {"max_completion_tokens": 1}
"""Where the client says it."""


class Prefill:
    """What a protocol asks prefillers for, the same of every prompt."""

    def __init__(self, kv_params: Mapping[str, object]) -> None:
        """`kv_params` are the protocol's own."""
        self._kv_params = kv_params
        changes = {**_CHANGES, "kv_transfer_params": kv_params}
        self._changes = changes
        self._limited = {**changes, **_LIMITED}

    def body(self, call: Call, pool: Pool, prefiller: Backend) -> Body:
        """The body of the leg to a prefiller of this pool."""
        values = call.values
        if call.kv_params or "tool_choice" in values:
            return prefill_body(call, pool, prefiller, self._kv_params)
        return call.body(self._limited if "max_completion_tokens" in values else self._changes)


def prefill_body(call: Call, pool: Pool, prefiller: Backend, kv_params: Mapping[str, object]) -> Body:
    """The body of the leg to a prefiller of this pool. `kv_params` are the protocol's own."""
    changes = _CHANGES.copy()
    changes["kv_transfer_params"] = {**kv_params, **call.kv_params} if call.kv_params else kv_params
    values = call.values
    if "max_completion_tokens" in values:
        changes |= _LIMITED
    if "tool_choice" in values:
        tool_choice = values["tool_choice"]
        is_forced = isinstance(tool_choice, dict) or tool_choice == "required"
        if is_forced and not FORCED_TOOL_PREFILL.is_in(pool.engine_version(prefiller)):
            changes["tool_choice"] = "auto"  # with which the prompt is the same
    return call.body(changes)
