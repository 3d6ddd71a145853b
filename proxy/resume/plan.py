"""Plans how an answer continues after its decoder was lost. No IO.

Only token ids continue an answer exactly: text that is tokenised again has other tokens, and a partial answer in the
messages makes another prompt. The plan depends on the engines, on the request, and on the client's part of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.terms import Action
from proxy.dialects.grammars import AnswerParser, VerbatimParser
from proxy.resume.chat_as_completion import rename_reasoning_member
from proxy.resume.continuation import continue_from_tokens
from proxy.resume.cut import UNFINISHED_CHARACTER_MARK, Cut, Steps, detokenize, detokenize_prompt_tail, find_cut
from proxy.resume.engines import CannotResume, has_media_parts, may_call_tools
from proxy.resume.overlap import AnswerMismatch, compare_answer, cut_known_part
from proxy.resume.seam import Seam, SeamPlan
from proxy.resume.situation import ChatTokenApi, Resumption, Situation
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from proxy.resume.transcript import Transcript

# Below this it is cheaper to generate an answer again than to prefill what there is of it.
_CHEAP_ANSWER_TOKENS: Final = 64
# A character is four bytes at most, so no more tokens than that can be without their text.
_MAX_CHARACTER_BYTES: Final = 4


def plan_resumption(situation: Situation) -> Steps[Resumption]:
    """Decide how an answer is continued. Raises CannotResume.

    This is a generator. It yields token ids and receives their text, or None if that is not available. Most answers
    need no text.
    """
    if not situation.is_answer_shown and len(situation.transcript.ids) < _CHEAP_ANSWER_TOKENS:
        return Resumption(Action.RESTART, situation.call)
    try:
        return (yield from _continue_answer(situation))
    except CannotResume:
        if not situation.is_answer_shown:
            return Resumption(Action.RESTART, situation.call)
        if not situation.engine.is_reproducible(situation.call, seeds_repeat=situation.repeats_seeded_answers):
            raise
    replay = SeamPlan(
        api=situation.call.api,
        answer_head=situation.answer_head,
        transcript=situation.transcript,
        replays_answer=True,
        engine=situation.engine,
    )
    return Resumption(Action.REPLAY, situation.call, Seam(replay))


def _continue_answer(situation: Situation) -> Steps[Resumption]:
    call, transcript, is_structured = situation.call, situation.transcript, situation.engine.is_structured
    if transcript.prompt_ids is None or not transcript.ids:
        raise CannotResume("the engine does not report token ids")
    if call.values.get("prompt_embeds") is not None:
        raise CannotResume("the prompt has no token ids")
    if (why := situation.engine.why_inexact(call)) is not None:
        raise CannotResume(why)
    if call.api is not Api.CHAT:
        if is_structured(call):
            raise CannotResume("structured output cannot be continued in the middle")
        return (yield from _continue_completion(situation))
    if has_media_parts(call):
        raise CannotResume("a prompt with media cannot be given as token ids")
    if is_structured(call) and (
        situation.chat_token_api is ChatTokenApi.COMPLETIONS_API or transcript.content_text or transcript.tools
    ):
        raise CannotResume("structured output cannot be continued in the middle")
    if situation.chat_token_api is ChatTokenApi.COMPLETIONS_API or transcript.tools:
        return (yield from _continue_raw_text(situation))
    return (yield from _continue_chat(situation))


def _continue_completion(situation: Situation) -> Steps[Resumption]:
    cut = yield from _find_cut_of_unparsed_text(situation)
    return continue_from_tokens(situation, Action.COMPLETION_TOKENS, cut)


def _continue_chat(situation: Situation) -> Steps[Resumption]:
    transcript = situation.transcript
    if transcript.has_text:
        in_reasoning, channel = transcript.began_in_reasoning, _channel_of_last_text(transcript)
    else:
        in_reasoning = bool(transcript.grammar.begins_with_reasoning((yield from detokenize_prompt_tail(transcript))))
        channel = transcript.reasoning_field if in_reasoning else "content"

    def compare(text: str) -> tuple[dict[str, Any], str]:
        parser, new, _ = _parse_answer_so_far(situation, text, in_reasoning)
        if parser.is_in_tool_section or parser.held_text.strip():
            raise AnswerMismatch
        return new, parser.held_text

    # A token may end in white space that the engine shows only if the reasoning goes on.
    may_lag = channel != "content" and not situation.shows_blanks
    if _is_unparsed_by_engine(situation, opens_reasoning=in_reasoning):
        cut = yield from _find_cut_of_unparsed_text(situation)
    else:
        cut = yield from find_cut(situation, compare, channel=channel, may_lag=may_lag)
    is_in_tool_call = not set(transcript.grammar.tools_begin_ids).isdisjoint(transcript.ids[cut.kept_ids :])
    so_far = (yield from detokenize(transcript, cut.kept_ids)) if situation.engine.sends_chats_as_text else ""
    return continue_from_tokens(
        situation, Action.ROLL_BACK if is_in_tool_call else Action.CHAT_TOKENS, cut, delta_so_far=so_far
    )


def _continue_raw_text(situation: Situation) -> Steps[Resumption]:
    """Return how a chat continues as a completion whose text the gateway parses."""
    call, transcript = situation.call, situation.transcript
    grammar = transcript.grammar
    if may_call_tools(call) and not grammar.has_tools:
        raise CannotResume("the tool calls of this model are not known here")
    tail = yield from detokenize_prompt_tail(transcript)
    opens_reasoning = bool(grammar.begins_with_reasoning(tail))
    if _is_unparsed_by_engine(situation, opens_reasoning=opens_reasoning):
        return (yield from _continue_unparsed_text(situation))
    kept = len(transcript.ids)
    while (text := (yield from detokenize(transcript, kept))).endswith(UNFINISHED_CHARACTER_MARK):
        kept -= 1
        if kept < max(0, len(transcript.ids) - _MAX_CHARACTER_BYTES):
            raise CannotResume("the answer's token ids end in bytes that are not text")
    begins_in_reasoning = transcript.began_in_reasoning if transcript.has_text else opens_reasoning
    try:
        if opens_reasoning and not begins_in_reasoning and not transcript.tools:
            raise AnswerMismatch  # what is reasoning was shown as content
        is_cut = kept < len(transcript.ids) and situation.engine.shows_half_tokens
        parser, pending, known = _parse_answer_so_far(situation, text, begins_in_reasoning, is_cut=is_cut)
    except AnswerMismatch:
        # There may be no parser at all: then what the client has is the text without special tokens.
        if transcript.reasoning_text or transcript.tools:
            raise CannotResume("the token ids do not match the text the client has") from None
        return (yield from _continue_unparsed_text(situation))
    action = Action.SUFFIX if transcript.tools and parser.is_in_tool_section else Action.RAW_TOKENS
    channel = "content" if "content" in pending else _channel_of_last_text(transcript)
    held = pending.pop(channel, "") if call.stop_strings and "tool_calls" not in pending else ""
    cut = Cut(kept, held, channel=channel, known_text=known)
    return continue_from_tokens(situation, action, cut, pending=pending, parser=parser)


def _is_unparsed_by_engine(situation: Situation, *, opens_reasoning: bool) -> bool:
    """Return whether engines show this chat's text unchanged, without special tokens.

    Engines without a reasoning parser do, unless the request has tools. Before vLLM 0.27, which introduced its parser
    engine, a reasoning parser left all other text unchanged.
    """
    transcript = situation.transcript
    if transcript.reasoning_text or transcript.tools or may_call_tools(situation.call) or situation.parses_reasoning:
        return False
    return situation.parses_reasoning is False or (situation.shows_blanks and not opens_reasoning)


def _continue_unparsed_text(situation: Situation) -> Steps[Resumption]:
    """Return how a chat continues as a completion whose text becomes the chat's content without parsing."""
    cut = yield from _find_cut_of_unparsed_text(situation)
    return continue_from_tokens(situation, Action.RAW_TOKENS, cut, parser=VerbatimParser())


def _find_cut_of_unparsed_text(situation: Situation) -> Steps[Cut]:
    """Find the cut of an answer whose text was not parsed."""
    transcript = situation.transcript
    return (
        yield from find_cut(situation, lambda text: (cut_known_part(transcript, {"content": text}), ""), may_hide=True)
    )


def _parse_answer_so_far(
    situation: Situation, text: str, in_reasoning: bool, *, is_cut: bool = False
) -> tuple[AnswerParser, dict[str, Any], str]:
    """Parse the answer so far. Return the parser, the delta that the client lacks, and the content that the text lacks.

    `is_cut`: whether the text may lack content. Raises AnswerMismatch.
    """
    compare = compare_answer if is_cut else lambda transcript, said: (cut_known_part(transcript, said), "")
    for shows_blanks in (situation.shows_blanks, not situation.shows_blanks):
        parser = situation.transcript.grammar.make_parser(
            in_reasoning=in_reasoning,
            calls_tools=may_call_tools(situation.call),
            shows_blanks=shows_blanks,
            reports_half_calls=not situation.shows_blanks,
            # vLLM `maybe_filter_parallel_tool_calls`.
            one_call=situation.call.values.get("parallel_tool_calls") is False,
        )
        try:
            said = rename_reasoning_member(situation.transcript.reasoning_field, parser.parse_text(text))
            return parser, *compare(situation.transcript, said)
        except AnswerMismatch:
            continue
    raise AnswerMismatch


def _channel_of_last_text(transcript: Transcript) -> str:
    """Return the delta member to which the next text belongs, unless a marker precedes that text."""
    return "content" if transcript.content_text or not transcript.reasoning_text else transcript.reasoning_field
