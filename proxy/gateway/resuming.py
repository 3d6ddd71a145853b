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
    from proxy.gateway.answers import UnitAnswer
    from proxy.gateway.lane_parts import LaneParts
    from proxy.observe.timeline import Timeline


logger = logging.getLogger("proxy.flow.resuming")


class Resuming:
    """Resumes the answer of one unit after its decoder was lost."""

    def __init__(self, parts: LaneParts, answer: UnitAnswer, timeline: Timeline) -> None:
        self.resume_action: Action | None = None
        """How the answer is being resumed. None before the first resume."""
        self.resume_count = 0
        """The number of resumes."""
        self._lane_parts = parts
        self._settings = parts.live_settings.settings.resume
        self._metrics = parts.metrics
        self._answer = answer
        self._delivery = answer.delivery
        self._timeline = timeline
        self._move_count = 0
        """The number of resumes because of an evacuation."""
        self._search_until = 0.0
        """The time of the event loop until which another instance is searched for."""
        self._chat_token_api: ChatTokenApi | None = None
        """How to resume chats, after another way has failed. None: as the settings say."""

    @property
    def is_searching(self) -> bool:
        """Whether the answer has begun and there is still time to find an instance that can continue it."""
        return self.resume_action is not None and asyncio.get_running_loop().time() < self._search_until

    @property
    def is_unrepeatable(self) -> bool:
        """Whether the client has an unknown part of the answer."""
        delivery = self._delivery
        return delivery.has_output and (delivery.is_transcript_incomplete or not delivery.is_observed)

    def is_broken_answer(self, error: UpstreamError) -> bool:
        """Return whether the error has broken off an answer that had begun. Unreadable bytes are no part of it."""
        if error.is_unreadable_answer and self._delivery.seam is None:
            return False
        return self._delivery.is_answer_changed or error.failure in (Failure.RECOMPUTED, Failure.NOT_RESUMED)

    async def decide_resumption(self, error: UpstreamError, call: Call) -> Resumption:
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
        self._move_count += error.failure is Failure.REMOVED
        if self.resume_count - self._move_count >= settings.max_attempts and error.failure is not Failure.REMOVED:
            raise self.make_given_up_error(error, f"it broke off {self.resume_count + 1} times")
        self.resume_count += 1
        self._search_until = asyncio.get_running_loop().time() + settings.deadline_seconds
        try:
            resumption = await self._plan_next_attempt(error, call)
        except CannotResume as reason:
            raise self.make_given_up_error(error, str(reason)) from None
        self._record_resume(error, resumption)
        self.resume_action = resumption.action
        return resumption

    def make_given_up_error(self, error: UpstreamError, reason: str) -> UpstreamError:
        """Return the error for an answer that had begun and cannot be completed. `reason`: why it cannot."""
        self._metrics.resume_failures_total.labels(error.failure.value).inc()
        return error.copy_as_abandoned(reason, keeps_body=self._delivery.seam is None)

    async def _plan_next_attempt(self, error: UpstreamError, call: Call) -> Resumption:
        """Return the plan for the next attempt. Raises CannotResume."""
        delivery = self._delivery
        if error.failure is Failure.NOT_RESUMED:
            if self.resume_action not in (Action.CHAT_TOKENS, Action.ROLL_BACK):
                raise CannotResume("the engine did not continue it exactly")
            self._chat_token_api = ChatTokenApi.COMPLETIONS_API
        elif not delivery.is_answer_changed:
            if delivery.seam is None:
                delivery.restart_answer()
            return Resumption(self.resume_action or Action.RESTART, call)
        if delivery.is_finished and not delivery.is_transcript_incomplete:
            return Resumption(Action.FINISH, None)
        if delivery.is_transcript_incomplete or not delivery.is_observed:
            delivery.restart_answer()
            return Resumption(Action.RESTART, self._answer.engine_call)
        if delivery.transcript.prompt_ids is None:
            delivery.transcript.prompt_ids = await self._prompt_ids()
        steps = plan_resumption(self._describe_situation())
        text: str | None = None
        try:
            while True:
                ids = steps.send(text)
                text = await self._lane_parts.detokenizer.text_of_ids(call.values.get("model"), ids, call.headers)
        except StopIteration as decided:
            resumption: Resumption = decided.value
        if resumption.seam is None:
            delivery.restart_answer()
        else:
            delivery.prepare_to_continue(resumption)
        self._timeline.usage.is_resumed = resumption.kept_ids > 0
        return resumption

    async def _prompt_ids(self) -> bytes | None:
        """Return the prompt ids of a `/generate` call, whose events have the ids of the answer only.

        They come from the request, or from an engine's tokenizer. None: another API, or the number of ids is wrong.
        """
        call, usage = self._answer.engine_call, self._last_usage()
        if call.api is not Api.GENERATE:
            return None
        members = call.read_members(("text", "input_ids"))
        ids = members.get("input_ids")
        if isinstance(text := members.get("text"), str):
            ids = await self._lane_parts.detokenizer.ids_of_text(call.values.get("model"), text, call.headers)
        return orjson.dumps(ids) if isinstance(ids, list) and len(ids) == usage.get("prompt_tokens") else None

    def _last_usage(self) -> dict[str, Any]:
        """Return the last usage of the present decoder, or an empty one."""
        segment = self._delivery.current_segment
        return (None if segment is None else segment.usage) or {}

    def _describe_situation(self) -> Situation:
        delivery, abilities = self._delivery, self._lane_parts.common_abilities
        # The prefiller's usage shows it, but the connector `plain` has no prefiller.
        counts = self._timeline.usage.counts_reasoning
        delivery.counts_reasoning |= (
            bool(counts)
            or self._last_usage().get("completion_tokens_details") is not None
            or (bool(delivery.transcript.reasoning_text) and abilities.have_all_known(REASONING_USAGE))
        )
        # An engine that could count reasoning tokens and does not has no reasoning parser.
        is_unparsed = counts is False and abilities.have_all_known(REASONING_USAGE)
        prompt = self._answer.chat_prompt
        if prompt is not None:
            chats = ChatTokenApi.COMPLETIONS_API
        elif self._settings.chats != "auto":
            chats = ChatTokenApi(self._settings.chats)
        else:
            chats = ChatTokenApi.NATIVE_MEMBER if abilities.have_all(CHAT_TOKEN_IDS) else ChatTokenApi.COMPLETIONS_API
        return Situation(
            engine=self._answer.engine,
            call=self._answer.engine_call,
            answer_head=delivery.head,
            transcript=delivery.transcript,
            is_answer_shown=delivery.has_output,
            shows_ids=delivery.call.shows_token_details,
            dropped_ids=() if delivery.seam is None else delivery.seam.swallowed_ids,
            decoder_count=self.resume_count,
            chat_token_api=self._chat_token_api or chats,
            keeps_length=abilities.have_all_known(LENGTH_BESIDE_TOOL_CALLS),
            shows_blanks=prompt is None and not abilities.have_all_known(TRAILING_BLANKS_HELD),
            repeats_seeded_answers=abilities.have_all(SEEDS_REPEAT),
            parses_reasoning=True if delivery.counts_reasoning else False if is_unparsed else None,
            chat_sampling=None if prompt is None else prompt.sampling,
            max_model_len=abilities.max_model_len(),
        )

    def _record_resume(self, error: UpstreamError, resumption: Resumption) -> None:
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
                    "resume": self.resume_count,
                }
            },
        )
