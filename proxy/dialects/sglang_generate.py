"""SGLang's native API, POST /generate: each event has the answer so far, and a list of prompts gets a list of answers.

A request for several answers is split into units, because each sequence needs a separate bootstrap room. Each unit has
its own backends, retries and place in the queue. Facts about the prompt that only the prefiller reports are merged into
the decoder's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import Failure, GatewayError
from proxy.dialects.base import (
    AnsweredAttempt,
    CompleteAnswer,
    Dialect,
    EngineAnswer,
    PrefillAnswer,
    Unit,
    UnitRendering,
)
from proxy.dialects.call import MAX_OUTPUT_TOKENS, Call, estimate_text_tokens
from proxy.dialects.requests import WHOLE_NUMBER, coerced_members, read_boolean, remove_reserved_members
from proxy.dialects.sglang_events import (
    GenerateAnswerAssembler,
    GenerateEvents,
    WatchedGenerateEvents,
    read_finish_reason,
)
from proxy.wire import openai, sglang
from proxy.wire.openai import Api, data_event, is_abort_reason
from proxy.wire.prefix import PromptPrefixes
from proxy.wire.sglang import ERROR_HEADERS, find_event_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.dialects.requests import Reading
    from proxy.dialects.segment import Segment
    from proxy.settings import Cost
    from proxy.wire.document import Document

_READINGS: Final[Mapping[str, Reading]] = dict.fromkeys(sglang.WHOLE_NUMBERS, WHOLE_NUMBER)


class SglangGenerate(Dialect):
    """SGLang's `/generate`. Served if the connector's engines speak it."""

    api = Api.GENERATE
    path = Api.GENERATE.path
    label = Api.GENERATE.value
    methods = ("POST", "PUT")

    def parse_request(self, document: Document, cost: Cost, headers: Mapping[str, str]) -> Call:
        """Return a call without `include_usage`, because SGLang reports usage in every answer."""
        values = document.values
        changes: dict[str, object] = {}
        params = values.get("sampling_params")
        for each in params if isinstance(params, list) else [params]:
            if isinstance(each, dict) and (coerced := coerced_members(each, _READINGS)):
                each.update(coerced)
                changes["sampling_params"] = params
        rows = sglang.count_embeddings(values)
        tokens = estimate_text_tokens(sglang.read_prompt(values), cost) if rows is None else rows
        tokens += _count_media(values.get("image_data")) * cost.image_tokens
        tokens += _count_media(values.get("audio_data")) * cost.audio_tokens
        return Call(
            api=self.api,
            document=document,
            prompt_tokens=max(1, tokens),
            output_tokens=min(sglang.read_output_limit(params), MAX_OUTPUT_TOKENS),
            stream=read_boolean(values, "stream"),
            include_usage=False,
            headers=headers,
            changes={**changes, **remove_reserved_members(values, sglang.RESERVED_FIELDS)},
            prompt=PromptPrefixes(document),
        )

    def split_into_units(self, call: Call, cost: Cost, max_units: int) -> list[Unit]:
        """Divide the estimated prompt tokens equally among the units: one for each sample of each prompt."""
        items = sglang.split_into_items(call.values, max_units)
        tokens = max(1, call.prompt_tokens // sum(item.is_first_sample for item in items))
        return [
            Unit(call.make_unit_call(item.changes, tokens) if item.changes else call, index, item.is_first_sample)
            for index, item in enumerate(items)
        ]

    def has_single_choice(self, call: Call) -> bool:
        return not sglang.is_batch_request(call.values)

    def make_segment(self) -> Segment:
        return GenerateEvents()

    def make_watched_segment(self) -> Segment:
        return WatchedGenerateEvents()

    def make_watched_rendering(self, call: Call) -> UnitRendering | None:
        return _UnitRendering(call, None)

    def make_watched_assembler(self, call: Call) -> GenerateAnswerAssembler:
        return GenerateAnswerAssembler()

    def check_answer(self, response: EngineAnswer, values: dict[str, Any]) -> None:
        """Raise UpstreamError if a complete engine answer is an error or has no finish reason."""
        if error := find_event_error(values):
            raise response.make_refusal("reported an error", error.status, error.body, ERROR_HEADERS)
        finish = read_finish_reason(values)
        if finish is None:
            raise response.make_failure(Failure.BROKEN, "the answer ended without a finish reason")
        if is_abort_reason(finish):
            raise response.make_failure(Failure.ABORTED, "aborted the answer")

    def read_usage(self, values: dict[str, Any]) -> Any:
        """Return the token counts in `meta_info` in the form of a usage."""
        return sglang.usage_of_event(values)

    def correct_members(self, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        """Return nothing, because the decoder's answer needs no changes."""
        return {}

    def waits_for_prefiller(self, call: Call) -> bool:
        return _needs_prefiller(call)

    async def complete_members(self, call: Call, values: dict[str, Any], attempt: AnsweredAttempt) -> dict[str, Any]:
        parts = _prefiller_members(call, attempt)
        if parts is None:
            return {}
        completed = (await parts.wait_for_members()).complete_event(values)
        return {name: value for name, value in completed.items() if value is not values.get(name)}

    def render_complete_body(self, call: Call, units: Sequence[Unit], answers: Sequence[CompleteAnswer]) -> bytes:
        """Return the answer, or a list of answers if the request has a list of prompts, even a list of one."""
        if not sglang.is_batch_request(call.values):
            return answers[0].make_body()
        return b"[%b]" % b",".join(answer.make_body() for answer in answers)

    def make_rendering(self, call: Call, units: Sequence[Unit]) -> _Rendering:
        """Return the writer of the events. It adds the index of the answer, and the prefiller's members."""
        return _Rendering(is_batch=sglang.is_batch_request(call.values))


class _Rendering:
    """See Rendering."""

    def __init__(self, *, is_batch: bool) -> None:
        self._is_batch = is_batch

    def make_unit_rendering(self, unit: Unit) -> UnitRendering | None:
        """Return the writer of one unit's events; None if the client gets the engine's events unchanged."""
        if not self._is_batch and not _needs_prefiller(unit.call):
            return None
        return _UnitRendering(unit.call, unit.index if self._is_batch else None)

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return nothing, because every event already has the usage."""
        return b""

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error, in the form that engines use."""
        return openai.error_event(error)


class _UnitRendering:
    """Writes one unit's events. It holds back the decoder's events until the prefiller's answer has arrived."""

    def __init__(self, call: Call, index: int | None) -> None:
        self._call = call
        self._index = index
        self._parts: PrefillerMembers | _LonePrefillerMembers | None = None
        self._waiting_payloads: list[dict[str, Any]] = []
        self._answer_so_far = GenerateAnswerAssembler()
        """Assembles the answer so far from the chunks of a watched stream. Other streams do not use it.
        """

    def begin_decoder_answer(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        self._parts = _prefiller_members(self._call, attempt)
        self._waiting_payloads.clear()
        if not goes_on:
            self._answer_so_far = GenerateAnswerAssembler()

    def render(self, payload: dict[str, Any]) -> bytes:
        """Add an event and return the events that can be sent now."""
        if "choices" in payload:
            self._answer_so_far.add_chunk(payload)
            payload = self._answer_so_far.values()
        self._waiting_payloads.append(payload)
        if self._parts is None:
            return self._render_events(None)
        parts = self._parts.available_members
        return b"" if parts is None else self._render_events(parts)

    async def wait_for_remaining_events(self) -> bytes:
        return (
            self._render_events(await self._parts.wait_for_members())
            if self._waiting_payloads and self._parts is not None
            else b""
        )

    def _render_events(self, parts: sglang.PrefillerMeta | sglang.LonePrefillerMeta | None) -> bytes:
        events = []
        for payload in self._waiting_payloads:
            index = {} if self._index is None else {"index": self._index}
            events.append(data_event({**(payload if parts is None else parts.complete_event(payload)), **index}))
        self._waiting_payloads.clear()
        return b"".join(events)


class PrefillerMembers:
    """The members of one answer that only the prefiller reports."""

    def __init__(self, answer: PrefillAnswer) -> None:
        self._answer = answer
        self._parts: sglang.PrefillerMeta | None = None

    @property
    def available_members(self) -> sglang.PrefillerMeta | None:
        """The prefiller's members; None until its answer has arrived."""
        answer = self._answer.body_or_none
        if self._parts is None and answer is not None:
            self._parts = sglang.PrefillerMeta(answer)
        return self._parts

    async def wait_for_members(self) -> sglang.PrefillerMeta:
        """Wait for the prefiller's members and return them. Raises UpstreamError."""
        await self._answer.wait_for_body()
        parts = self.available_members
        assert parts is not None
        return parts


class _LonePrefillerMembers:
    """The members of an answer that a prefiller serves without a decoder."""

    def __init__(self, call: Call) -> None:
        params = call.changes.get("sampling_params", call.values.get("sampling_params"))
        self.available_members = sglang.LonePrefillerMeta(sglang.read_output_limit(params))

    async def wait_for_members(self) -> sglang.LonePrefillerMeta:
        return self.available_members


def _prefiller_members(call: Call, attempt: AnsweredAttempt) -> PrefillerMembers | _LonePrefillerMembers | None:
    """Return the prefiller's members of an answer; None if the answer needs none."""
    if not _needs_prefiller(call):
        return None
    return _LonePrefillerMembers(call) if attempt.prefill_answer is None else PrefillerMembers(attempt.prefill_answer)


def _needs_prefiller(call: Call) -> bool:
    return sglang.needs_prefill_answer(call.read_members(sglang.MEMBERS_NEEDING_PREFILL_ANSWER))


def _count_media(value: object) -> int:
    """Return the number of images or sounds in a member: a single one, a list, or a list of lists."""
    if isinstance(value, list):
        return sum(map(_count_media, value))
    return int(value is not None)
