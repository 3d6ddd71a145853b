"""vLLM's NixlPushConnector: both legs run at the same time, and the prefiller writes the KV cache into the decoder.

The decoder registers its blocks with the prefiller's engine, and that engine writes into them when the prompt is
computed (vLLM 0.32 `nixl/push_scheduler.py`). It matches both requests by their id without the random suffix, so both
legs have the same `X-Request-Id` (`_pop_matching_registration` in `nixl/push_worker.py`). The decoder must know the
engine of the prefiller before the prefill ends. pdproxy learns it from the first answer of each prefiller, whose decode
leg follows the prefill leg.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Stage
from proxy.connectors.base import (
    ConnectorContext,
    first_byte_timeout_seconds,
    make_refusal,
    new_attempt_id,
    parse_prefilled,
    prefill_timeout_seconds,
)
from proxy.connectors.disaggregated import DisaggregatedConnector, PrefillBodyMaker
from proxy.connectors.handoff import KvHandoff
from proxy.connectors.legs import RANK_HEADER, Attempt, EngineLeg, LegPair
from proxy.connectors.releaser import KvTransfer, PrefilledKv
from proxy.observe import logs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.balancer.pick import PickRequest
    from proxy.common.backend import Backend
    from proxy.connectors.legs import Legs, RankClaim
    from proxy.dialects.call import Call
    from proxy.observe.timeline import Timeline
    from proxy.upstream import Response

logger = logging.getLogger(__name__)

_ASK_FOR_KV: Final = PrefillBodyMaker({"do_remote_decode": True, "do_remote_prefill": False})
# Answers of the same engine in a row, after another one has answered at the address. They show that the engine was
# restarted, and that there are not several engines behind the address.
_CONFIRMING_ANSWERS: Final = 8
_PULL_HINT: Final = (
    "hands over KV that decoders pull, but connector nixl_push is for engines with NixlPushConnector: set "
    "`connector: vllm_pull`, or start all engines with NixlPushConnector"
)


class EnginePlace(msgspec.Struct):
    """The engine that has computed a prompt, from its KV parameters (`request_finished` in `nixl/push_scheduler.py`).

    A decoder's engine ends if one of the members without a default is missing (vllm-project/vllm#56585).
    """

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_request_id: str
    """The prefiller's id of this prompt, which decoders name in heartbeats that keep its KV cache."""
    pp_size: int = 1
    dcp_size: int = 1
    transfer_mode: str = "push"
    """`push` or `pull`; missing in older versions."""

    def decode_params(self, request_id: str) -> dict[str, object]:
        """Return the KV parameters of a decode leg. `request_id`: see `remote_request_id`.

        Prefillers ignore heartbeats for ids that they do not know (`_handle_heartbeat` in `nixl/base_worker.py`).
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.remote_engine_id,
            "remote_request_id": request_id,
            "remote_host": self.remote_host,
            "remote_port": self.remote_port,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "dcp_size": self.dcp_size,
        }


_place_in: Final = msgspec.json.Decoder(EnginePlace).decode


class _LearnedPlace:
    """The engine of one rank of a prefiller, as the latest answers named it."""

    def __init__(self, prefiller: Backend, place: EnginePlace) -> None:
        self.prefiller = prefiller
        self.place = place
        self.missing_answers = 0
        """The number of further answers of this engine that must arrive before decoders are sent to it in advance."""
        self.is_reported = False
        """Whether the log has a line about several engines behind the address."""


class EnginePlaces:
    """One worker's knowledge of the engines of all prefillers, from their answers."""

    def __init__(self) -> None:
        self._learned: dict[tuple[int, int], _LearnedPlace] = {}  # by slot and rank

    def of(self, prefiller: Backend, rank: int) -> EnginePlace | None:
        """Return the place of the engine that will compute the next prompt. None: it is not known for certain."""
        learned = self._learned.get((prefiller.slot, rank))
        if learned is None or learned.prefiller != prefiller or learned.missing_answers:
            return None
        return learned.place

    def learn(self, prefiller: Backend, rank: int, place: EnginePlace) -> None:
        """Record the engine that has computed a prompt."""
        learned = self._learned.get((prefiller.slot, rank))
        if learned is None or learned.prefiller != prefiller:
            self._learned[prefiller.slot, rank] = _LearnedPlace(prefiller, place)
        elif learned.place.remote_engine_id == place.remote_engine_id:
            learned.missing_answers = max(0, learned.missing_answers - 1)
        else:
            if learned.missing_answers and not learned.is_reported:
                learned.is_reported = True
                logger.warning(
                    "nixl push: legs are sent one after the other: several engines answer behind one address: set "
                    "balance.prefill_dp_ranks: prefill instance %s",
                    prefiller.name,
                    extra=logs.ALWAYS,
                )
            learned.place = place
            learned.missing_answers = _CONFIRMING_ANSWERS

    def distrust(self, prefiller: Backend, rank: int) -> None:
        """Require an answer of this prefiller before decoders are sent to its engine in advance again."""
        learned = self._learned.get((prefiller.slot, rank))
        if learned is not None:
            learned.missing_answers = max(learned.missing_answers, 1)


class NixlPush(DisaggregatedConnector):
    """Runs the prefill leg beside the decode leg if it knows the prefiller's engine, otherwise before it."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._pools = context.pools
        self.releaser = context.releaser
        self.places = EnginePlaces()

    def make_both_legs(self, call: Call, request: PickRequest, timeline: Timeline) -> Legs:
        balance = self._context.live.settings.balance
        with (
            KvHandoff(self._context, call, request, timeline) as handoff,
            self._ranks.start_claim() as prefill_rank,
            self._ranks.start_claim() as decode_rank,
        ):
            prefiller, decoder = handoff.prefiller.backend, handoff.decoder.backend
            timeline.prefiller, timeline.decoder = prefiller.name, decoder.name
            timeline.enter_stage(Stage.PREFILL)
            rank = prefill_rank.claim_rank(prefiller, balance.prefill_dp_ranks)
            attempt = _PushAttempt(self, call, handoff, timeline, prefill_rank)
            attempt.rank, attempt.place = rank, self.places.of(prefiller, rank)
            timeline.prefill_id = timeline.decode_id = attempt.id
            prefill = self._prefill_leg(attempt, balance.prefill_dp_ranks)
            steering = decode_rank.rank_header(decoder, balance.decode_dp_ranks)
            try:
                if attempt.place is None:
                    prefill.wants_whole_body, prefill.preconnect_to = True, decoder
                    answer, body = yield prefill
                    attempt.read(answer, body)
                    response: Response = yield self._decode_leg(attempt, steering)
                    yield from attempt.take_answer(response)
                else:
                    decode = self._decode_leg(attempt, steering)
                    with LegPair(prefill, decode, attempt.read, attempt.is_served) as pair:
                        del prefill, decode  # a long answer would keep their bodies
                        response = yield pair
                        yield from attempt.take_answer(response)
            except UpstreamError as error:
                if not handoff.is_settled:
                    self._note_failure(error, prefiller, attempt)
                raise

    def _note_failure(self, error: UpstreamError, prefiller: Backend, attempt: _PushAttempt) -> None:
        """Record a failure before the decoder's first output. A restart of the prefiller may be its cause."""
        if not (error.is_backpressure or error.is_fault_of_client):
            self.places.distrust(prefiller, attempt.rank)
        if error.backend == prefiller and not attempt.has_answer:
            self.releaser.add_possible_orphan(prefiller, attempt.call.prompt_tokens, error)

    def _prefill_leg(self, attempt: _PushAttempt, ranks: int) -> EngineLeg:
        """Return the prefill leg. `ranks`: the data-parallel ranks behind the prefiller's address."""
        call, prefiller = attempt.call, attempt.handoff.prefiller.backend
        headers = {**call.headers, "x-request-id": attempt.id}
        if ranks > 1:
            headers[RANK_HEADER] = str(attempt.rank)
        body = _ASK_FOR_KV.make_body(call, self._pools.prefill, prefiller)
        return EngineLeg(
            prefiller, call.api.path, body, headers, prefill_timeout_seconds(self._context.live.settings.timeouts, call)
        )

    def _decode_leg(self, attempt: _PushAttempt, steering: Mapping[str, str]) -> EngineLeg:
        """Return the decode leg. `steering`: the header that selects the decoder's rank; empty: it has only one."""
        call, place = attempt.call, attempt.place
        assert place is not None
        # The prefiller's id of a prompt is known after its answer. Another prompt's id would keep that prompt's KV.
        request_id = place.remote_request_id if attempt.has_answer else attempt.id
        body = call.make_body({"kv_transfer_params": {**place.decode_params(request_id), **call.kv_params}})
        headers = {**call.headers, "x-request-id": attempt.id, **steering}
        return EngineLeg(attempt.handoff.decoder.backend, call.api.path, body, headers, self.decode_seconds(call))

    def decode_seconds(self, call: Call) -> float:
        """Return the time limit until a decoder's answer begins, in seconds. It includes the prefill."""
        timeouts = self._context.live.settings.timeouts
        return prefill_timeout_seconds(timeouts, call) + first_byte_timeout_seconds(timeouts, call)

    def learn(self, answer: Response, rank: int, params: bytes) -> EnginePlace:
        """Return the engine that the KV parameters of a prefiller's answer name, and remember it for later attempts.

        Raises UpstreamError if the parameters are missing, or are not those of NixlPushConnector.
        """
        compatibility, prefiller = self._context.compatibility, answer.backend
        try:
            place = _place_in(params)
        except msgspec.DecodeError:
            compatibility.record_prefill(prefiller, False)
            raise self._make_missing_kv_error(answer) from None
        if place.transfer_mode != "push":
            compatibility.set_finding(prefiller, IncompatibilityKind.CONNECTOR, _PULL_HINT)
            raise answer.make_failure(Failure.MISSING_KV, "its KV parameters are not those of NixlPushConnector")
        compatibility.record_prefill(prefiller, True)
        self.places.learn(prefiller, rank, place)
        return place

    def _make_missing_kv_error(self, answer: Response) -> UpstreamError:
        """Return the error for an answer without KV parameters, for which the decoder may wait already.

        The attempt is repeated unless `kv.on_missing` is error.
        """
        is_repeated = self._context.live.settings.kv.on_missing != "error"
        self._context.metrics.missing_kv_total.labels("retry_prefill" if is_repeated else "error").inc()
        failure = Failure.BOOTSTRAP if is_repeated else Failure.MISSING_KV
        missing = answer.make_failure(failure, "the answer has no KV parameters for a decoder")
        missing.code, missing.status = "kv_handoff_failed", 502
        return missing


class _PushAttempt:
    """The state of one attempt, and the effects of the prefiller's answer."""

    def __init__(
        self, connector: NixlPush, call: Call, handoff: KvHandoff, timeline: Timeline, claim: RankClaim
    ) -> None:
        self.id = new_attempt_id()
        self.call = call
        self.handoff = handoff
        self.rank = 0
        """The data-parallel rank of the prefill leg."""
        self.place: EnginePlace | None = None
        """The engine that the decoder is sent to; None until it is known."""
        self.has_answer = False
        """Whether the prefiller has answered."""
        self._connector = connector
        self._timeline = timeline
        self._claim = claim

    def read(self, answer: Response, body: bytes) -> None:
        """Read the prefiller's answer, which arrives before the KV cache is sent.

        Raises UpstreamError if the prefill failed, or if another engine has computed the prompt than the decoder
        expects.
        """
        prefilled = parse_prefilled(answer, body)
        self.has_answer = True
        call, handoff, timeline, prefiller = self.call, self.handoff, self._timeline, answer.backend
        prompt_counts = timeline.usage.add_prompt_usage(prefilled.read_usage)
        params = bytes(prefilled.kv_transfer_params)
        place = self._connector.learn(answer, self.rank, params)
        self._claim.release_ranks()
        handoff.record_prefill(*prompt_counts)
        kv = PrefilledKv(prefiller, params, KvTransfer.NIXL_PUSH, call.prompt_tokens, call.headers, True)
        handoff.record_kv_held(kv)
        if self.place is not None and self.place.remote_engine_id != place.remote_engine_id:
            raise answer.make_failure(Failure.RESTARTED, "another engine than before answers at its address")
        if not handoff.is_settled:
            timeline.enter_stage(self._next_stage())
        self.place = place

    def is_served(self) -> bool:
        """Return whether the decoder no longer needs the prefiller."""
        return self.handoff.is_settled

    def _next_stage(self) -> Stage:
        """Return the stage after the prefill."""
        if not self.call.stream:
            return Stage.STREAM
        return Stage.HANDOFF if self.place is None else Stage.FIRST_TOKEN

    def take_answer(self, response: Response) -> Legs:
        """Give the decoder's answer to the driver. Raises UpstreamError if its status is not a success."""
        timeline, handoff = self._timeline, self.handoff
        with response:
            if not response.is_success:
                raise make_refusal(response, (yield response))
            if timeline.current_stage is Stage.HANDOFF:
                timeline.enter_stage(Stage.FIRST_TOKEN)
            seconds = self._connector.decode_seconds(self.call)
            yield Attempt(response, timeline, handoff.prefiller.backend, True, handoff, seconds)
