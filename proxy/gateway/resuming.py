"""An answer that broke off in the middle: whether it goes on, how, and the account of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

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
from proxy.resume.plan import plan
from proxy.resume.situation import ChatTokens, Resumption, Situation
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from proxy.common.errors import UpstreamError
    from proxy.dialects.call import Call
    from proxy.gateway.answers import Answer, FlowParts
    from proxy.observe.timeline import Timeline

logger = logging.getLogger("proxy.flow.resuming")


class Resuming:
    """The resumes of one unit's answer."""

    def __init__(self, parts: FlowParts, answer: Answer, timeline: Timeline) -> None:
        self.action: Action | None = None
        """How the answer is being resumed; None before the first incident."""
        self.count = 0
        self._parts = parts
        self._settings = parts.settings.resume
        self._metrics = parts.metrics
        self._answer = answer
        self._delivery = answer.delivery
        self._timeline = timeline
        self._moves = 0
        """How many of the resumes were made by an evacuation."""
        self._until = 0.0
        self._chats: ChatTokens | None = None

    @property
    def is_searching(self) -> bool:
        """An answer that had begun is looking for an instance that can go on with it, and still may."""
        return self.action is not None and asyncio.get_running_loop().time() < self._until

    @property
    def is_unrepeatable(self) -> bool:
        """Whether the client has a part of the answer, and it is not known which."""
        delivery = self._delivery
        return delivery.has_output and (delivery.has_lost_track or not delivery.is_observed)

    def is_incident(self, error: UpstreamError) -> bool:
        """Whether an answer broke off, and not only an attempt at one. What cannot be read is no part of an answer."""
        if error.is_unreadable and self._delivery.seam is None:
            return False
        return self._delivery.is_touched or error.failure in (Failure.RECOMPUTED, Failure.NOT_RESUMED)

    async def decide(self, error: UpstreamError, call: Call) -> Resumption:
        """How the answer goes on after an attempt at `call` failed; the delivery is made ready for it.

        Raises the error when the answer cannot be saved.
        """
        settings = self._settings
        if settings.mode == "off" or self.is_unrepeatable or (error.is_clients_fault and self._delivery.seam is None):
            raise error
        # Being moved at an operator's will is no failure, and happens once for each instance that is removed.
        self._moves += error.failure is Failure.REMOVED
        if self.count - self._moves >= settings.max_attempts and error.failure is not Failure.REMOVED:
            raise self.given_up(error, f"it broke off {self.count + 1} times")
        self.count += 1
        self._until = asyncio.get_running_loop().time() + settings.deadline_seconds
        try:
            resumption = await self._plan(error, call)
        except CannotResume as reason:
            raise self.given_up(error, str(reason)) from None
        self._account(error, resumption)
        self.action = resumption.action
        return resumption

    def given_up(self, error: UpstreamError, reason: str) -> UpstreamError:
        """The error of an answer that had begun and cannot be completed."""
        self._metrics.resume_failures_total.labels(error.failure.value).inc()
        return error.as_given_up(reason, keeps_body=self._delivery.seam is None)

    async def _plan(self, error: UpstreamError, call: Call) -> Resumption:
        """Raises CannotResume."""
        delivery = self._delivery
        if error.failure is Failure.NOT_RESUMED:
            if self.action not in (Action.CHAT_TOKENS, Action.ROLL_BACK):
                raise CannotResume("the engine did not continue it exactly")
            self._chats = ChatTokens.COMPLETIONS
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
        steps = plan(self._situation())
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
        self._timeline.usage.is_resumed = resumption.kept > 0
        return resumption

    async def _prompt_ids(self) -> bytes | None:
        """Where events tell the answer's ids alone: as the client gave them, or what engines make of the text; None if
        they tell the prompt's, too, or do not say.
        """
        call, told = self._answer.call, self._delivery.told or {}
        if call.api is not Api.GENERATE:
            return None
        members = call.members(("text", "input_ids"))
        ids = members.get("input_ids")
        if isinstance(text := members.get("text"), str):
            ids = await self._parts.detokenizer.tokens(call.values.get("model"), text, call.headers)
        return orjson.dumps(ids) if isinstance(ids, list) and len(ids) == told.get("prompt_tokens") else None

    def _situation(self) -> Situation:
        delivery, abilities = self._delivery, self._parts.abilities
        # The prefiller's answer tells it, but with connector plain there is none.
        counts = self._timeline.usage.counts_reasoning
        delivery.counts_reasoning |= (
            bool(counts)
            or (delivery.told or {}).get("completion_tokens_details") is not None
            or (bool(delivery.transcript.reasoning) and abilities.has_where_told(REASONING_USAGE))
        )
        # An engine that would count reasoning and does not has no parser for it.
        is_unparsed = counts is False and abilities.has_where_told(REASONING_USAGE)
        prompt = self._answer.prompt
        if prompt is not None:
            chats = ChatTokens.COMPLETIONS
        elif self._settings.chats != "auto":
            chats = ChatTokens(self._settings.chats)
        else:
            chats = ChatTokens.NATIVE if abilities.has(CHAT_TOKEN_IDS) else ChatTokens.COMPLETIONS
        return Situation(
            engine=self._answer.engine,
            call=self._answer.call,
            head=delivery.head,
            transcript=delivery.transcript,
            shown=delivery.has_output,
            shows_ids=delivery.call.shows_single_tokens,
            ahead=delivery.ahead,
            segment=self.count,
            chats=self._chats or chats,
            keeps_length=abilities.has_where_told(LENGTH_BESIDE_TOOL_CALLS),
            shows_blanks=prompt is None and not abilities.has_where_told(TRAILING_BLANKS_HELD),
            seeds_repeat=abilities.has(SEEDS_REPEAT),
            parses_reasoning=True if delivery.counts_reasoning else False if is_unparsed else None,
            chat_sampling=None if prompt is None else prompt.sampling,
            max_model_len=abilities.max_model_len(),
        )

    def _account(self, error: UpstreamError, resumption: Resumption) -> None:
        """Metrics and the one line of a resume."""
        cause, action = error.failure.value, resumption.action
        call = resumption.call
        prefilled = 0 if call is None else call.prompt_tokens
        self._metrics.resumes_total.labels(cause, action.value).inc()
        self._metrics.resumed_tokens_total.inc(prefilled)
        self._timeline.resumes += 1
        logger.info(
            "an answer is continued after its decoder was lost",
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
