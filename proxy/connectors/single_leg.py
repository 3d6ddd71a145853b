"""One leg: an engine that serves a request by itself, whichever role it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.backend import Role
from proxy.connectors.attempt import Attempt
from proxy.connectors.base import first_byte_seconds, new_attempt_id, prefill_seconds, refusal
from proxy.connectors.handoff import LocalKv
from proxy.connectors.leg_driver import opened
from proxy.connectors.legs import Leg
from proxy.terms import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from proxy.balancer.pick import PickRequest
    from proxy.call import Call
    from proxy.connectors.base import ConnectorContext
    from proxy.connectors.legs import Legs
    from proxy.connectors.ranks import Ranks
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response


class SingleLeg:
    """Sends a call to one backend of a role as it is, and its answer is the client's.

    A prefiller is given what is nearly all prompt; it is charged, and waited for, as for any other prefill.
    """

    def __init__(
        self,
        context: ConnectorContext,
        role: Role,
        ranks: Ranks,
        members: Callable[[str], Mapping[str, object]] | None = None,
        kv: str = "local",
    ) -> None:
        """`members`: what the protocol has to put into the body, by the attempt's id; None: nothing. `kv`: what the
        access line says of the KV cache.
        """
        self._context = context
        self._kv = kv
        self._role = role
        self._pool = context.pools.of(role)
        self._upstream = context.upstream
        self._ranks = ranks
        self._members = members

    def open(self, call: Call, request: PickRequest, timeline: Timeline) -> AbstractAsyncContextManager[Attempt]:
        """The attempt, as in Connector.open."""
        return opened(self.legs(call, request, timeline), self._upstream)

    def legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        """The attempt, as in Connector.legs."""
        is_prefiller = self._role is Role.PREFILL
        timeouts, balance = self._context.settings.timeouts, self._context.settings.balance
        attempt_id = new_attempt_id()
        changes: dict[str, object] = {"kv_transfer_params": dict(call.kv_params)} if call.kv_params else {}
        if self._members is not None:
            changes.update(self._members(attempt_id))
        with self._pool.lease(request) as lease, self._ranks.claim() as rank:
            timeline.begin_attempt()
            timeline.kv = self._kv
            if is_prefiller:
                timeline.enter(Stage.PREFILL)
                timeline.prefiller, timeline.prefill_id = lease.backend.name, attempt_id
                timeline.prefill_pick = lease.pick
                answer_seconds = prefill_seconds(timeouts, call)
            else:
                timeline.enter(Stage.FIRST_TOKEN if call.stream else Stage.STREAM)
                timeline.decoder, timeline.decode_id = lease.backend.name, attempt_id
                timeline.decode_pick = lease.pick
                answer_seconds = first_byte_seconds(timeouts, call)
            dp_ranks = balance.prefill_dp_ranks if is_prefiller else balance.decode_dp_ranks
            leg = Leg(
                lease.backend,
                call.api.path,
                call.body(changes),
                {**call.headers, "x-request-id": attempt_id, **rank.header(lease.backend, dp_ranks)},
                answer_seconds,
                resend_if_stale=True,
            )
            response: Response = yield leg
            with response:
                if not response.is_success:
                    raise refusal(response, (yield response))
                yield Attempt(
                    response,
                    timeline,
                    prefiller=None,
                    kv_handed_over=False,
                    handoff=LocalKv(lease),
                    first_token_seconds=answer_seconds if is_prefiller else None,
                )
                if not timeline.usage.is_resumed:
                    lease.answer_tokens = timeline.usage.completion_tokens
