"""The base of vLLM's protocols. Most calls have two legs; one engine serves calls that cannot be handed over.

A prefill leg asks for the prompt's KV cache and for one token, which is discarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from proxy.balancer.engines import FORCED_TOOL_PREFILL
from proxy.connectors.base import Connector, ConnectorContext
from proxy.connectors.leg_driver import open_attempt
from proxy.connectors.legs import RankCounts
from proxy.connectors.one_engine import RARE_MEMBERS, OneEngineCalls, uses_beam_search
from proxy.wire.document import REMOVED, Body
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.pick import PickRequest
    from proxy.balancer.pool import Pool
    from proxy.common.backend import Backend
    from proxy.connectors.legs import Attempt, Legs
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline

# A prefiller keeps the KV cache only if it stops for length after its one token, so `min_tokens` keeps an
# end-of-sequence token from ending it first (vLLM v1/core/sched/utils.py check_stop). The token is discarded, because
# the decoder computes the last position of the prompt again and samples the first token.
_PREFILL_CHANGES: Final[dict[str, object]] = {
    "kv_transfer_params": None,  # replaced by each protocol
    "stream": False,
    "max_tokens": 1,
    "min_tokens": 1,
    "stream_options": REMOVED,
    "logprobs": REMOVED,
    "top_logprobs": REMOVED,
    "return_token_ids": REMOVED,
}
_PREFILL_LIMIT_CHANGES: Final = {"max_completion_tokens": 1}
"""The changes for a prefill leg in requests that have this member, in addition to `_PREFILL_CHANGES`."""


class DisaggregatedConnector(Connector):
    """Prefills on one vLLM engine and decodes on another.

    Protocols implement `make_both_legs` or `open_two_leg_attempt`.
    """

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._upstream = context.upstream
        self._ranks = RankCounts()
        self._one_engine = OneEngineCalls(context, self._ranks)

    def check_call(self, call: Call) -> None:
        """Raise BadRequest for a call that can neither be handed over nor be served by one engine."""
        if not call.is_ordinary and not RARE_MEMBERS.isdisjoint(call.values):
            self._one_engine.check_call(call)

    def splits_into_units(self, call: Call) -> bool:
        """Return True, because a handoff carries one sequence, but False for a beam search, which needs one engine."""
        return call.is_ordinary or not uses_beam_search(call)

    def open_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        """Open the prefill leg and the decode leg of a call, or its only leg."""
        legs = self.make_legs(call, request, timeline)
        return (
            self.open_two_leg_attempt(call, request, timeline) if legs is None else open_attempt(legs, self._upstream)
        )

    def open_decoder_only_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        """Return an attempt that a decoder serves alone, without a prefiller."""
        return open_attempt(self._one_engine.decoder.make_legs(call, request, timeline), self._upstream)

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        if call.is_ordinary or RARE_MEMBERS.isdisjoint(call.values):
            return self.make_both_legs(call, request, timeline)
        return self._one_engine.make_legs(call, request, timeline) or self.make_both_legs(call, request, timeline)

    def make_both_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """Return the legs of a call that can be handed over, or None if they need tasks; see `open_two_leg_attempt`."""
        return None

    def open_two_leg_attempt(
        self, call: Call, request: PickRequest, timeline: Timeline
    ) -> AbstractAsyncContextManager[Attempt]:
        """Open the legs of a call that can be handed over, if they need tasks. See Connector.open_attempt."""
        raise NotImplementedError


class PrefillBodyMaker:
    """Makes the bodies of prefill legs, with the same KV parameters for every prompt."""

    def __init__(self, kv_params: Mapping[str, object]) -> None:
        """Store the KV parameters of the protocol."""
        self._kv_params = kv_params
        changes = {
            **_PREFILL_CHANGES,
            "kv_transfer_params": orjson.Fragment(dumps(kv_params)),
        }  # written once, not per prompt
        self._changes = changes
        self._limit_changes = {**changes, **_PREFILL_LIMIT_CHANGES}

    def make_body(self, call: Call, pool: Pool, prefiller: Backend) -> Body:
        """Return the body of the prefill leg of a call, for a prefiller of the pool."""
        values = call.values
        if call.kv_params or "tool_choice" in values:
            return make_prefill_body(call, pool, prefiller, self._kv_params)
        return call.make_body(self._limit_changes if "max_completion_tokens" in values else self._changes)


def make_prefill_body(call: Call, pool: Pool, prefiller: Backend, kv_params: Mapping[str, object]) -> Body:
    """Return the body of the prefill leg of a call, with the protocol's KV parameters, for a prefiller of the pool."""
    changes = _PREFILL_CHANGES.copy()
    changes["kv_transfer_params"] = {**kv_params, **call.kv_params} if call.kv_params else kv_params
    values = call.values
    if "max_completion_tokens" in values:
        changes |= _PREFILL_LIMIT_CHANGES
    if "tool_choice" in values:
        tool_choice = values["tool_choice"]
        is_forced = isinstance(tool_choice, dict) or tool_choice == "required"
        if is_forced and not FORCED_TOOL_PREFILL.is_in_vllm_version(pool.engine_version_of(prefiller)):
            changes["tool_choice"] = "auto"  # makes the same prompt
    return call.make_body(changes)
