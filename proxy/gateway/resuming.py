"""Decides whether and how to resume an answer that broke off, and records it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import orjson

from proxy.balancer.engines import (
    CHAT_TOKEN_IDS,
    LENGTH_BESIDE_TOOL_CALLS,
    REASONING_USAGE,
    SEEDS_REPEAT,
    TRAILING_BLANKS_HELD,
)
from proxy.common.errors import Failure
from proxy.common.terms import Action
from proxy.resume.engines import CannotResume
from proxy.resume.plan import plan_resumption
from proxy.resume.situation import ChatTokenApi, Resumption, Situation
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from proxy.common.errors import UpstreamError
    from proxy.dialects.call import Call
    from proxy.gateway.answers import Answer, FlowParts
    from proxy.observe.timeline import Timeline


logger = logging.getLogger("proxy.flow.resuming")


class Resuming:
    """Resumes the answer of one unit after its decoder was lost."""

    def __init__(self, parts: FlowParts, answer: Answer, timeline: Timeline) -> None:
        self.action: Action | None = None
        """How the answer is being resumed. None before the first resume."""
        self.count = 0
        """The number of resumes."""
        self._parts = parts
        self._settings = parts.live.settings.resume
        self._metrics = parts.metrics
        self._answer = answer
        self._delivery = answer.delivery
        self._timeline = timeline
        self._moves = 0
        """The number of resumes because of an evacuation."""
        self._until = 0.0
        """The time of the event loop until which another instance is searched for."""
        self._chats: ChatTokenApi | None = None
        """How to resume chats, after another way has failed. None: as the settings say."""

    @property
    def is_searching(self) -> bool:
        """Whether the answer has begun and there is still time to find an instance that can continue it."""
        return self.action is not None and asyncio.get_running_loop().time() < self._until

    @property
    def is_unrepeatable(self) -> bool:
        """Whether the client has an unknown part of the answer."""
        delivery = self._delivery
        return delivery.has_output and (delivery.has_lost_track or not delivery.is_observed)

    def is_incident(self, error: UpstreamError) -> bool:
        """Return whether the error has broken off an answer that had begun. Unreadable bytes are no part of it."""
        if error.is_unreadable_answer and self._delivery.seam is None:
            return False
        return self._delivery.is_touched or error.failure in (Failure.RECOMPUTED, Failure.NOT_RESUMED)

    async def decide(self, error: UpstreamError, call: Call) -> Resumption:
        """Decide how the answer continues after a failed attempt, and prepare the delivery.

        Args:
            error: Why the attempt failed.
            call: The call of the attempt.

        Raises:
            UpstreamError: The answer cannot be resumed.
        """
        settings = self._settings
        if settings.mode == "off" or self.is_unrepeatable or (error.is_fault_of_client and self._delivery.seam is None):
            raise error
        # An evacuation is no failure, and happens once for each removed instance.
        self._moves += error.failure is Failure.REMOVED
        if self.count - self._moves >= settings.max_attempts and error.failure is not Failure.REMOVED:
            raise self.given_up_error(error, f"it broke off {self.count + 1} times")
        self.count += 1
        self._until = asyncio.get_running_loop().time() + settings.deadline_seconds
        try:
            resumption = await self._plan(error, call)
        except CannotResume as reason:
            raise self.given_up_error(error, str(reason)) from None
        self._account(error, resumption)
        self.action = resumption.action
        return resumption

    def given_up_error(self, error: UpstreamError, reason: str) -> UpstreamError:
        """Return the error for an answer that had begun and cannot be completed. `reason`: why it cannot."""
        self._metrics.resume_failures_total.labels(error.failure.value).inc()
        return error.copy_as_abandoned(reason, keeps_body=self._delivery.seam is None)

    async def _plan(self, error: UpstreamError, call: Call) -> Resumption:
        """Return the plan for the next attempt. Raises CannotResume."""
        delivery = self._delivery
        if error.failure is Failure.NOT_RESUMED:
            if self.action not in (Action.CHAT_TOKENS, Action.ROLL_BACK):
                raise CannotResume("the engine did not continue it exactly")
            self._chats = ChatTokenApi.COMPLETIONS_API
        elif not delivery.is_touched:
            if delivery.seam is None:
                delivery.begin_anew()
            return Resumption(self.action or Action.RESTART, call)
        if delivery.is_finished and not delivery.has_lost_track:
            return Resumption(Action.FINISH, None)
        if delivery.has_lost_track or not delivery.is_observed:
            delivery.begin_anew()
            return Resumption(Action.RESTART, self._answer.call)
        if delivery.transcript.prompt_ids is None:
            delivery.transcript.prompt_ids = await self._prompt_ids()
        steps = plan_resumption(self._situation())
        text: str | None = None
        try:
            while True:
                ids = steps.send(text)
                text = await self._parts.detokenizer.text(call.values.get("model"), ids, call.headers)
        except StopIteration as decided:
            resumption: Resumption = decided.value
        if resumption.seam is None:
            delivery.begin_anew()
        else:
            delivery.go_on(resumption)
        self._timeline.usage.is_resumed = resumption.kept_ids > 0
        return resumption

    async def _prompt_ids(self) -> bytes | None:
        """Return the prompt ids of a `/generate` call, whose events have the ids of the answer only.

        They come from the request, or from an engine's tokenizer. None: another API, or the number of ids is wrong.
        """
        call, usage = self._answer.call, self._usage()
        if call.api is not Api.GENERATE:
            return None
        members = call.read_members(("text", "input_ids"))
        ids = members.get("input_ids")
        if isinstance(text := members.get("text"), str):
            ids = await self._parts.detokenizer.tokens(call.values.get("model"), text, call.headers)
        return orjson.dumps(ids) if isinstance(ids, list) and len(ids) == usage.get("prompt_tokens") else None

    def _usage(self) -> dict[str, Any]:
        """Return the last usage of the present decoder, or an empty one."""
        segment = self._delivery.segment
        return (None if segment is None else segment.usage) or {}

    def _situation(self) -> Situation:
        delivery, abilities = self._delivery, self._parts.abilities
        # The prefiller's usage shows it, but the connector `plain` has no prefiller.
        counts = self._timeline.usage.counts_reasoning
        delivery.counts_reasoning |= (
            bool(counts)
            or self._usage().get("completion_tokens_details") is not None
            or (bool(delivery.transcript.reasoning_text) and abilities.has_if_known(REASONING_USAGE))
        )
        # An engine that could count reasoning tokens and does not has no reasoning parser.
        is_unparsed = counts is False and abilities.has_if_known(REASONING_USAGE)
        prompt = self._answer.prompt
        if prompt is not None:
            chats = ChatTokenApi.COMPLETIONS_API
        elif self._settings.chats != "auto":
            chats = ChatTokenApi(self._settings.chats)
        else:
            chats = ChatTokenApi.NATIVE_MEMBER if abilities.has(CHAT_TOKEN_IDS) else ChatTokenApi.COMPLETIONS_API
        return Situation(
            engine=self._answer.engine,
            call=self._answer.call,
            answer_head=delivery.head,
            transcript=delivery.transcript,
            is_answer_shown=delivery.has_output,
            shows_ids=delivery.call.shows_token_details,
            dropped_ids=() if delivery.seam is None else delivery.seam.swallowed_ids,
            decoder_count=self.count,
            chat_token_api=self._chats or chats,
            keeps_length=abilities.has_if_known(LENGTH_BESIDE_TOOL_CALLS),
            shows_blanks=prompt is None and not abilities.has_if_known(TRAILING_BLANKS_HELD),
            repeats_seeded_answers=abilities.has(SEEDS_REPEAT),
            parses_reasoning=True if delivery.counts_reasoning else False if is_unparsed else None,
            chat_sampling=None if prompt is None else prompt.sampling,
            max_model_len=abilities.max_model_len(),
        )

    def _account(self, error: UpstreamError, resumption: Resumption) -> None:
        """Record a resume in metrics, timeline and log."""
        cause, action = error.failure.value, resumption.action
        call = resumption.call
        prefilled = 0 if call is None else call.prompt_tokens
        self._metrics.resumes_total.labels(cause, action.value).inc()
        self._metrics.resumed_tokens_total.inc(prefilled)
        self._timeline.resumes += 1
        logger.info(
            "answer resumed after its decoder was lost",
            extra={
                "fields": {
                    "cause": cause,
                    "action": action.value,
                    "from": error.backend.name,
                    "kept": len(self._delivery.transcript.ids),
                    "prefilled": prefilled,
                    "resume": self.count,
                }
            },
        )
