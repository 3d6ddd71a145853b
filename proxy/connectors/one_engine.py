"""Serves calls on one engine, and rejects calls that neither one engine nor a handoff can serve.

SingleLegMaker sends a request to one engine of either role. OneEngineCalls decides which engine of a vLLM deployment
serves a request that cannot be handed over, or rejects it.

Only the prefiller computes the prompt's log probabilities, and its answer is discarded in a handoff. If the prompt is
all that has to be computed, as in the requests of evaluations, the prefiller's answer is the whole answer. A search
among several sequences (beam search, `best_of`) needs all of them on one engine, and a KV cache carries only one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.common.backend import Role
from proxy.common.errors import BadRequest
from proxy.common.terms import Stage
from proxy.connectors.base import (
    ConnectorContext,
    first_byte_timeout_seconds,
    make_refusal,
    new_attempt_id,
    prefill_timeout_seconds,
)
from proxy.connectors.handoff import LocalKvListener
from proxy.connectors.legs import Attempt, EngineLeg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.balancer.pick import PickRequest
    from proxy.connectors.legs import Legs, RankCounts
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response

# Members that only rare requests have. Without them a call can be handed over.
RARE_MEMBERS: Final = frozenset(("use_beam_search", "best_of", "prompt_logprobs", "echo"))


class SingleLegMaker:
    """Sends a call unchanged to one backend of a role. The client gets the answer of this backend.

    Prefillers serve calls that generate at most one token. The load and time limit of such a call are those of a
    prefill.
    """

    def __init__(
        self,
        context: ConnectorContext,
        role: Role,
        ranks: RankCounts,
        members: Callable[[str], Mapping[str, object]] | None = None,
        kv: str = "local",
    ) -> None:
        """Create a single leg for the backends of a role.

        Args:
            context: The connector's context.
            role: The role whose backends serve the call.
            ranks: The ranks that this worker's legs use.
            members: Returns the members that the protocol adds to the body, given the attempt's ID; None: it adds none.
            kv: The value of `kv` in the access log.
        """
        self._context = context
        self._kv = kv
        self._role = role
        self._pool = context.pools.pool_of(role)
        self._ranks = ranks
        self._members = members

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """Return the legs of an attempt; see Connector.make_legs."""
        is_prefiller = self._role is Role.PREFILL
        timeouts, balance = self._context.live.settings.timeouts, self._context.live.settings.balance
        attempt_id = new_attempt_id()
        changes: dict[str, object] = {"kv_transfer_params": dict(call.kv_params)} if call.kv_params else {}
        if self._members is not None:
            changes.update(self._members(attempt_id))
        with self._pool.make_lease(request) as lease, self._ranks.start_claim() as rank:
            timeline.begin_attempt()
            timeline.kv = self._kv
            if is_prefiller:
                timeline.enter_stage(Stage.PREFILL)
                timeline.prefiller, timeline.prefill_id = lease.backend.name, attempt_id
                timeline.prefill_pick = lease.backend_pick
                answer_seconds = prefill_timeout_seconds(timeouts, call)
            else:
                timeline.enter_stage(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)
                timeline.decoder, timeline.decode_id = lease.backend.name, attempt_id
                timeline.decode_pick = lease.backend_pick
                answer_seconds = first_byte_timeout_seconds(timeouts, call)
            dp_ranks = balance.prefill_dp_ranks if is_prefiller else balance.decode_dp_ranks
            leg = EngineLeg(
                lease.backend,
                call.api.path,
                call.make_body(changes),
                {**call.headers, "x-request-id": attempt_id, **rank.rank_header(lease.backend, dp_ranks)},
                answer_seconds,
                resend_if_stale=True,
            )
            response: Response = yield leg
            del leg  # a long answer would keep its body
            with response:
                if not response.is_success:
                    raise make_refusal(response, (yield response))
                yield Attempt(
                    response,
                    timeline,
                    prefiller=None,
                    has_kv_from_prefiller=False,
                    handoff=LocalKvListener(lease),
                    first_token_seconds=answer_seconds if is_prefiller else None,
                )
                if not timeline.usage.is_resumed:
                    lease.answer_tokens = timeline.usage.completion_tokens


class OneEngineCalls:
    """Serves calls that cannot be handed over by one vLLM engine."""

    def __init__(self, context: ConnectorContext, ranks: RankCounts) -> None:
        self._context = context
        self._prefiller = SingleLegMaker(context, Role.PREFILL, ranks)
        self.decoder = SingleLegMaker(context, Role.DECODE, ranks)

    def check_call(self, call: Call) -> None:
        """Raise BadRequest for a call that can neither be handed over nor be served by one engine."""
        self._role_of_call(call)

    def make_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs | None:
        """Return the legs of a call that one engine serves.

        None: the call can be handed over. See Connector.make_legs.
        """
        role = self._role_of_call(call)
        if role is None:
            return None
        return (self._prefiller if role is Role.PREFILL else self.decoder).make_legs(call, request, timeline)

    def _role_of_call(self, call: Call) -> Role | None:
        """Return the role that serves a call alone; None if the call can be handed over. Raises BadRequest."""
        if RARE_MEMBERS.isdisjoint(call.values):
            return None
        problem = _find_problem(call)
        if problem is None:
            return None
        if call.needs_only_prefill and not uses_beam_search(call):
            return Role.PREFILL
        if self._context.live.settings.kv.on_unsupported == "local":
            return Role.DECODE
        raise problem


def uses_beam_search(call: Call) -> bool:
    """Return whether the engine chooses the answer among several sequences, which must be on the same engine."""
    if RARE_MEMBERS.isdisjoint(call.values):
        return False
    best_of = call.values.get("best_of")
    return bool(call.values.get("use_beam_search")) or (isinstance(best_of, int) and best_of > call.samples_per_prompt)


def asks_for_echoed_logprobs(call: Call) -> bool:
    """Return whether the client wants the prompt and its log probabilities at the beginning of the answer."""
    return bool(call.values.get("echo")) and call.values.get("logprobs") is not None


def make_echo_error() -> BadRequest:
    """Return the error for a call that asks for echoed log probabilities and also generates tokens."""
    return BadRequest(
        "with prefill/decode disaggregation echo with logprobs is only supported with max_tokens 0 or 1",
        param="echo",
    )


def _find_problem(call: Call) -> BadRequest | None:
    """Return the reason why a call cannot be handed over, as an error; None if it can be.

    Either one KV cache cannot carry it, or its result would be in the prefiller's answer, which a handoff discards.
    """
    values = call.values
    if values.get("use_beam_search"):
        return BadRequest("beam search is not supported with prefill/decode disaggregation", param="use_beam_search")
    if uses_beam_search(call):
        return BadRequest("best_of larger than n is not supported", param="best_of")
    if values.get("prompt_logprobs") is not None:
        return BadRequest(
            "with prefill/decode disaggregation prompt_logprobs is only supported with max_tokens 1",
            param="prompt_logprobs",
        )
    return make_echo_error() if asks_for_echoed_logprobs(call) else None
