"""Makes the call that continues an answer from its token ids, and the seam for its stream. No IO."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.terms import Action
from proxy.resume.chat_as_completion import CompletionToChat, translate_to_completion
from proxy.resume.engines import CannotResume, read_min_tokens, read_output_limit
from proxy.resume.seam import Seam, SeamPlan, StopGuard
from proxy.resume.situation import Resumption, Situation
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.dialects.call import Call
    from proxy.dialects.grammars import AnswerParser
    from proxy.resume.cut import Cut

# Members that were applied to the prompt already, or that only a prompt of text can have.
_PROMPT_ONLY_MEMBERS: Final = ("echo", "suffix", "truncate_prompt_tokens", "prompt_logprobs")


def continue_from_tokens(
    situation: Situation,
    action: Action,
    cut: Cut,
    *,
    pending: Mapping[str, Any] | None = None,
    parser: AnswerParser | None = None,
    delta_so_far: str = "",
) -> Resumption:
    """Return how an answer continues from its token ids, which become the end of the next call's prompt.

    Raises CannotResume.

    Args:
        situation: The answer to continue.
        action: How the answer is continued.
        cut: Where the answer is cut.
        pending: A chat delta that belongs to the kept ids and that the client does not have yet.
        parser: The parser for the text of a chat that continues as a completion.
        delta_so_far: The text of the kept ids, for a chat whose engine needs it.
    """
    call, transcript, kept = situation.call, situation.transcript, cut.kept_ids
    assert transcript.prompt_ids is not None
    prompt = orjson.loads(transcript.prompt_ids) + transcript.ids[:kept].tolist()
    limit = read_output_limit(call)
    room = None if situation.max_model_len is None else situation.max_model_len - len(prompt)
    left = None if limit is None else limit - kept
    is_over = (left is not None and left <= 0) or (room is not None and room <= 0)
    late = 0 if parser is None else len(parser.held_text)
    guard = None if is_over else _make_stop_guard(situation, cut, late or len(cut.deferred_text))
    if guard is None and cut.held_text:
        pending = {**(pending or {}), cut.channel: cut.held_text}
    seam = Seam(
        SeamPlan(
            api=call.api,
            answer_head=situation.answer_head,
            transcript=transcript,
            kept_ids=kept,
            pending_delta=pending,
            channel=cut.channel,
            stop_guard=guard,
            deferred_text=cut.deferred_text,
            defers_blanks=call.api is Api.CHAT and cut.channel != "content" and not situation.shows_blanks,
            swallowed_ids=[*transcript.ids[kept:], *situation.dropped_ids]
            if situation.shows_ids and situation.is_answer_shown
            else [],
            known_text=cut.known_text,
            chat_translator=None if parser is None else _make_chat_translator(situation, parser, pending or {}),
            text_offset=transcript.text_offset_after(kept) if situation.keeps_length else None,
            engine=situation.engine,
        )
    )
    if is_over:
        return Resumption(Action.FINISH, None, seam, kept)
    prompt_ids = orjson.dumps(prompt)
    if call.api is Api.GENERATE:
        continuing = _make_native_call(situation, prompt_ids, len(prompt), kept, left)
        return Resumption(action, continuing, seam, kept)
    changes = _continuation_changes(situation, kept, left)
    if parser is None and call.api is Api.CHAT:
        changed = call.copy_with_changes(changes, prompt_tokens=len(prompt))
        continuing = situation.engine.make_chat_call_from_ids(
            changed, situation.chat_token_api.member_name, prompt_ids, delta_so_far
        )
    else:
        changes["prompt"] = orjson.Fragment(prompt_ids)
        if call.api is Api.CHAT:
            if left is None and room is None:
                raise CannotResume("no engine has reported its maximum sequence length")
            changes.update(situation.engine.completion_members(call, situation.chat_sampling))
            reads_markers = parser is not None and parser.reads_markers
            changes.update(translate_to_completion(call, room if left is None else left, reads_markers=reads_markers))
        continuing = replace(call.copy_with_changes(changes, prompt_tokens=len(prompt)), api=Api.COMPLETIONS)
    continuing = replace(continuing, output_tokens=max(1, call.output_tokens - kept))
    return Resumption(action, continuing, seam, kept, prompt_ids)


def _make_native_call(situation: Situation, prompt_ids: bytes, prompt_tokens: int, kept: int, left: int | None) -> Call:
    """Return the call of SGLang's `/generate` that continues an answer. Its seed stays the same."""
    call = situation.call
    params: dict[str, Any] = {**call.sampling_members, "max_new_tokens": left}
    if least := read_min_tokens(call):
        params["min_new_tokens"] = max(0, least - kept)
    changes = {"text": REMOVED, "input_ids": orjson.Fragment(prompt_ids), "sampling_params": params}
    changed = call.copy_with_changes(changes, prompt_tokens=prompt_tokens)
    return replace(changed, output_tokens=max(1, call.output_tokens - kept))


def _make_stop_guard(situation: Situation, cut: Cut, late: int) -> StopGuard | None:
    """Return the guard that looks for stop strings across the seam; None if there can be none."""
    call, transcript = situation.call, situation.transcript
    longest = max(map(len, call.stop_strings), default=0)
    if longest < 2:
        return None
    shows_stop = situation.engine.shows_stop_strings(call)
    shown = transcript.content_text if cut.channel == "content" else transcript.reasoning_text
    before = shown[1 - longest :] if shows_stop else ""
    if not (cut.held_text or before or late):
        return None
    minimum = read_min_tokens(call)
    return StopGuard(
        call.stop_strings,
        cut.held_text,
        late=late,
        before=before,
        shows_stop=shows_stop,
        tokens_to_minimum=minimum - cut.kept_ids if minimum else None,
    )


def _make_chat_translator(situation: Situation, parser: AnswerParser, pending: Mapping[str, Any]) -> CompletionToChat:
    return CompletionToChat(
        parser,
        calls_tools=bool(situation.transcript.tools) or "tool_calls" in pending,
        top_logprobs=situation.call.values.get("top_logprobs") or 0,
        keeps_length=situation.keeps_length,
        reasoning_field=situation.transcript.reasoning_field,
    )


def _continuation_changes(situation: Situation, kept: int, left: int | None) -> dict[str, object]:
    """Return the changes that every call needs to continue from token ids."""
    values = situation.call.values
    changes: dict[str, object] = {name: REMOVED for name in _PROMPT_ONLY_MEMBERS if name in values}
    if left is not None:
        changes["max_tokens"] = left
        if values.get("max_completion_tokens") is not None:
            changes["max_completion_tokens"] = left
    if least := read_min_tokens(situation.call):
        changes["min_tokens"] = max(0, least - kept)
    seed = values.get("seed")
    if isinstance(seed, int):
        changes["seed"] = situation.engine.next_seed(seed, situation.decoder_count)
    budget = values.get("thinking_token_budget")
    if isinstance(budget, int) and budget >= 0:  # -1 means no budget (vLLM `ThinkingTokenBudget`)
        changes["thinking_token_budget"] = max(0, budget - situation.transcript.count_reasoning_among(kept))
    return changes
