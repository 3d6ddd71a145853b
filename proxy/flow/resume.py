"""The call that goes on with an answer whose decoder was lost. No IO.

Exact means by token ids: text tokenised again is not the same tokens, and a partial answer put into the messages is not
the same prompt. What is possible depends on the engines, on the request, and on what the client has already.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.dialects.grammars import PROMPT_TAIL_TOKENS
from proxy.dialects.grammars.base import Verbatim
from proxy.resume.completion_as_chat import CompletionAsChat
from proxy.resume.overlap import Mismatch, beyond
from proxy.resume.seam import Seam
from proxy.resume.stop_strings import StopGuard
from proxy.terms import Action
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from proxy.call import Call
    from proxy.dialects.grammars.base import Parser
    from proxy.resume.transcript import Transcript

# Below this it is cheaper to generate an answer again than to prefill what there is of it.
_CHEAP_TOKENS: Final = 64
# A character is four bytes at most, so no more tokens than that can be without their text.
_MAX_BYTES_OF_CHARACTER: Final = 4
# What vLLM takes for the limit of a completion that names none, or null (`CompletionRequest`).
_COMPLETION_TOKENS: Final = 16
# How many ids at the end may be taken away, one after the other, to find where the answer can be cut.
_MAX_QUESTIONS: Final = 32
# What the text of an unfinished character ends in. An engine whose prompt ends so repeats all of it (vLLM 0.32).
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"

_CHAT_ONLY: Final = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "documents", "reasoning_effort"),
    *(
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "mm_processor_kwargs",
    ),
    *("include_reasoning", "max_completion_tokens", "top_logprobs", "functions", "function_call", "media_io_kwargs"),
)
# What has been applied to the prompt already, or speaks of a prompt that is text.
_OF_THE_PROMPT: Final = ("echo", "suffix", "truncate_prompt_tokens", "prompt_logprobs")
_STRUCTURED: Final = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
)


class ChatTokens(StrEnum):
    """How the engines take a chat's prompt as token ids."""

    NATIVE = "native"  # `kv_transfer_params.prompt_token_ids`, vLLM 0.27
    ASCEND_PRIVATE = "ascend_private"  # a patch of vllm-ascend 0.26rc (#14389)
    COMPLETIONS = "completions"  # not at all: as a completion

    @property
    def key(self) -> str:
        return "prompt_token_ids" if self is ChatTokens.NATIVE else "_vllm_ascend_recompute_token_ids"


class CannotResume(Exception):
    """The answer cannot be continued exactly; the text says why."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """How an answer goes on. `call` None: it is over, for length. `seam` None: it begins anew, unseen."""

    action: Action
    call: Call | None
    seam: Seam | None = None
    kept: int = 0
    """Token ids of the answer that need not be generated again."""
    prompt_ids: bytes | None = None
    """What the engine must say its prompt was, if it obeys; a JSON array."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that decides how to go on."""

    call: Call
    """As the client sent it, observed."""
    head: Mapping[str, Any]
    """The members that all chunks of the client's stream have in common."""
    transcript: Transcript
    shown: bool
    """The client has a part of the answer."""
    shows_ids: bool
    """The client sees token ids or log probabilities."""
    ahead: Sequence[int]
    """Token ids the client has seen that are not in the transcript any more."""
    segment: int
    """Decoders that have worked on the answer."""
    keeps_length: bool
    """Engines finish a chat by length even if it calls tools."""
    chats: ChatTokens
    shows_blanks: bool
    """Engines are thought to show white space at the end of reasoning at once. What the client has decides."""
    max_model_len: int | None
    """Tokens that fit into a sequence; None when engines do not tell."""


def can_be_observed(call: Call) -> bool:
    """Whether the answer stays the same if it is streamed with its token ids."""
    values = call.values
    if values.get("prompt_logprobs") is not None or values.get("echo"):
        return False  # vLLM refuses the one with `stream`, and the other with `return_token_ids` for a prompt of ids
    # Engines hide what belongs to reasoning, and which that is only they know; and without reasoning to be shown a
    # grammar begins at once (vLLM `resolve_reasoning_ended`).
    hides = values.get("include_reasoning") is False
    return not (hides and (call.shows_single_tokens or _is_structured(call)))


def plan(situation: Situation) -> Generator[Sequence[int], str | None, Resumption]:
    """Decide how the answer goes on. Raises CannotResume.

    A generator that yields token ids and is sent their text, None if that cannot be had: most answers need none.
    """
    if not situation.shown and len(situation.transcript.ids) < _CHEAP_TOKENS:
        return Resumption(Action.RESTART, situation.call)
    try:
        return (yield from _continue(situation))
    except CannotResume:
        if not situation.shown:
            return Resumption(Action.RESTART, situation.call)
        if not _is_reproducible(situation.call):
            raise
    seam = Seam(situation.call.api, situation.head, situation.transcript, kept=0, replays=True)
    return Resumption(Action.REPLAY, situation.call, seam)


def _continue(situation: Situation) -> Generator[Sequence[int], str | None, Resumption]:
    call, transcript = situation.call, situation.transcript
    if transcript.prompt_ids is None or not transcript.ids:
        raise CannotResume("the engine does not tell token ids")
    if call.values.get("prompt_embeds") is not None:
        raise CannotResume("the prompt has no token ids")
    if call.api is Api.COMPLETIONS:
        if _is_structured(call):
            raise CannotResume("structured output cannot be continued in the middle")
        return (yield from _continue_completion(situation))
    if _has_media(call):
        raise CannotResume("a prompt with media cannot be given as token ids")
    if _is_structured(call) and (situation.chats is ChatTokens.COMPLETIONS or transcript.content or transcript.tools):
        raise CannotResume("structured output cannot be continued in the middle")
    if situation.chats is ChatTokens.COMPLETIONS or transcript.tools:
        return (yield from _continue_raw(situation))
    return (yield from _continue_chat(situation))


def _continue_completion(situation: Situation) -> Generator[Sequence[int], str | None, Resumption]:
    cut = yield from _cut(situation, lambda text: (beyond(situation.transcript, {"content": text}), ""))
    return _from_tokens(situation, Action.COMPLETION_TOKENS, cut)


def _continue_chat(situation: Situation) -> Generator[Sequence[int], str | None, Resumption]:
    transcript = situation.transcript
    if transcript.has_text:
        in_reasoning, channel = transcript.began_in_reasoning, _last_channel(transcript)
    else:
        in_reasoning = bool(transcript.grammar.opens_reasoning((yield from _prompt_tail(transcript))))
        channel = transcript.reasoning_field if in_reasoning else "content"

    def compare(text: str) -> tuple[dict[str, Any], str]:
        parser, new = _parsed(situation, text, in_reasoning)
        if parser.in_tools or parser.unsaid.strip():
            raise Mismatch
        return new, parser.unsaid

    # A token may end in white space that the engine shows only if the reasoning goes on.
    may_lag = channel != "content" and not situation.shows_blanks
    cut = yield from _cut(situation, compare, channel=channel, may_lag=may_lag)
    is_in_tool_call = not set(transcript.grammar.tools_begin_ids).isdisjoint(transcript.ids[cut.kept :])
    return _from_tokens(situation, Action.ROLL_BACK if is_in_tool_call else Action.CHAT_TOKENS, cut)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where an answer is cut: `kept` token ids go on as prompt."""

    kept: int
    held: str = ""
    """The end of their text, which the client does not have."""
    deferred: str = ""
    """White space behind that, which the client is to get if more text of its kind follows."""
    channel: str = "content"
    """The member of a chat's delta that this text, and what follows, belongs to."""


def _cut(
    situation: Situation,
    compare: Callable[[str], tuple[dict[str, Any], str]],
    *,
    channel: str = "content",
    may_lag: bool = False,
) -> Generator[Sequence[int], str | None, _Cut]:
    """How many ids to keep.

    What showed nothing is generated again. But where the text that was shown may lag behind the ids, since there are
    stop strings that it may be the beginning of, or since a chunk had several ids, only the ids' text can tell.
    `compare`: what of a text the client does not have, and what is deferred; raises Mismatch where the answer cannot be
    cut. `channel`: where the answer broke off. `may_lag`: the text may do so for another reason.
    """
    transcript, stops = situation.transcript, situation.call.stops
    may_hold = max(map(len, stops), default=0) > 1
    shown = transcript.content or transcript.reasoning
    if not (may_hold or may_lag or transcript.settled - transcript.chunk_start > 1 or shown.endswith(_UNFINISHED)):
        return _Cut(transcript.settled, channel=channel)
    kept, least = (len(transcript.ids), 0) if may_hold else (transcript.settled, transcript.chunk_start)
    # What the engine held back, and what this gateway did where answers were joined before.
    most_held = 2 * max(map(len, stops), default=1) - 2
    while kept >= max(least, len(transcript.ids) - _MAX_QUESTIONS):
        text = yield from _text(transcript, kept)
        with suppress(Mismatch):
            new, deferred = compare(text)
            held = new.pop(channel, "")
            if not new and len(held) <= most_held and not text.endswith(_UNFINISHED):
                return _Cut(kept, held, deferred, channel)
        kept -= 1
    raise CannotResume("the token ids do not match the text the client has")


def _text(transcript: Transcript, kept: int) -> Generator[Sequence[int], str | None, str]:
    """The text of the first `kept` ids. Raises CannotResume."""
    text = (yield transcript.ids[:kept]) if kept else ""
    if text is None:
        raise CannotResume("no engine told the text of the answer's token ids")
    return text


def _prompt_tail(transcript: Transcript) -> Generator[Sequence[int], str | None, str]:
    """The text of the end of the prompt. Raises CannotResume."""
    assert transcript.prompt_ids is not None
    tail = yield orjson.loads(transcript.prompt_ids)[-PROMPT_TAIL_TOKENS:]
    if tail is None:
        raise CannotResume("no engine told the text of the prompt's token ids")
    return tail


def _continue_raw(situation: Situation) -> Generator[Sequence[int], str | None, Resumption]:
    """Go on as a completion, whose text is parsed here."""
    call, transcript = situation.call, situation.transcript
    grammar = transcript.grammar
    if _calls_tools(call) and not grammar.has_tools:
        raise CannotResume("the tool calls of this model are not known here")
    prompt_tail = yield from _prompt_tail(transcript)
    kept = len(transcript.ids)
    while (text := (yield from _text(transcript, kept))).endswith(_UNFINISHED):
        kept -= 1
        if kept < max(0, len(transcript.ids) - _MAX_BYTES_OF_CHARACTER):
            raise CannotResume("the answer's token ids end in something that is no text")
    opens_reasoning = bool(grammar.opens_reasoning(prompt_tail))
    begins_in_reasoning = transcript.began_in_reasoning if transcript.has_text else opens_reasoning
    try:
        if opens_reasoning and not begins_in_reasoning and not transcript.tools:
            raise Mismatch  # what is reasoning was shown as content
        parser, pending = _parsed(situation, text, begins_in_reasoning)
    except Mismatch:
        # There may be no parser at all: then what the client has is the text without special tokens.
        if transcript.reasoning or transcript.tools:
            raise CannotResume("the token ids do not match the text the client has") from None
        cut = yield from _cut(situation, lambda text: (beyond(transcript, {"content": text}), ""))
        return _from_tokens(situation, Action.RAW_TOKENS, cut, parser=Verbatim())
    action = Action.SUFFIX if transcript.tools and parser.in_tools else Action.RAW_TOKENS
    channel = "content" if "content" in pending else _last_channel(transcript)
    held = pending.pop(channel, "") if call.stops and "tool_calls" not in pending else ""
    cut = _Cut(kept, held, channel=channel)
    return _from_tokens(situation, action, cut, pending=pending, parser=parser, late=len(parser.unsaid))


def _parsed(situation: Situation, text: str, in_reasoning: bool) -> tuple[Parser, dict[str, Any]]:
    """A parser that has read the answer's text, and what of that the client does not have. Raises Mismatch."""
    for shows_blanks in (situation.shows_blanks, not situation.shows_blanks):
        parser = situation.transcript.grammar.parser(
            in_reasoning=in_reasoning,
            calls_tools=_calls_tools(situation.call),
            shows_blanks=shows_blanks,
            tells_half_calls=not situation.shows_blanks,
            # vLLM `maybe_filter_parallel_tool_calls`.
            one_call=situation.call.values.get("parallel_tool_calls") is False,
        )
        try:
            return parser, beyond(situation.transcript, parser.feed(text))
        except Mismatch:
            continue
    raise Mismatch


def _from_tokens(
    situation: Situation,
    action: Action,
    cut: _Cut,
    *,
    pending: Mapping[str, Any] | None = None,
    parser: Parser | None = None,
    late: int = 0,
) -> Resumption:
    """Put the ids that are kept behind the prompt. `late`: characters the parser keeps back. Raises CannotResume."""
    call, transcript, kept = situation.call, situation.transcript, cut.kept
    assert transcript.prompt_ids is not None
    prompt = orjson.loads(transcript.prompt_ids)
    ids = orjson.dumps(prompt + transcript.ids[:kept].tolist())
    length = len(prompt) + kept
    limit = output_limit(call)
    room = None if situation.max_model_len is None else situation.max_model_len - length
    left = None if limit is None else limit - kept
    swallowed = [*transcript.ids[kept:], *situation.ahead] if situation.shows_ids and situation.shown else []
    is_over = (left is not None and left <= 0) or (room is not None and room <= 0)
    guard = None if is_over else _guard(call, transcript, cut, late or len(cut.deferred))
    if guard is None and cut.held:
        pending = {**(pending or {}), cut.channel: cut.held}
    as_chat = None
    if parser is not None:
        as_chat = CompletionAsChat(
            parser,
            calls_tools=bool(transcript.tools) or "tool_calls" in (pending or {}),
            top_logprobs=call.values.get("top_logprobs") or 0,
            keeps_length=situation.keeps_length,
        )
    seam = Seam(
        call.api,
        situation.head,
        transcript,
        kept=kept,
        pending=pending,
        guard=guard,
        deferred=cut.deferred,
        channel=cut.channel,
        swallowed=swallowed,
        as_chat=as_chat,
        text_offset=transcript.offset_behind(kept) if situation.keeps_length else None,
    )
    if is_over:
        return Resumption(Action.FINISH, None, seam, kept)
    changes = _shared_changes(situation, kept, left)
    if parser is None and call.api is Api.CHAT:
        continuing = replace(
            call.changed(changes, prompt_tokens=length), kv_params={situation.chats.key: orjson.Fragment(ids)}
        )
    else:
        changes["prompt"] = orjson.Fragment(ids)
        if call.api is Api.CHAT:
            if left is None and room is None:
                raise CannotResume("no engine told how long a sequence may be")
            changes.update(_as_completion(call, room if left is None else left))
            if parser is not None and parser.reads_markers:
                changes.update(skip_special_tokens=False, spaces_between_special_tokens=False)
        continuing = replace(call.changed(changes, prompt_tokens=length), api=Api.COMPLETIONS)
    continuing = replace(continuing, output_tokens=max(1, call.output_tokens - kept))
    return Resumption(action, continuing, seam, kept, ids)


def _guard(call: Call, transcript: Transcript, cut: _Cut, late: int) -> StopGuard | None:
    """Watches for stop strings across the seam; None where none can be."""
    stops = call.stops
    longest = max(map(len, stops), default=0)
    if longest < 2:
        return None
    shows_stop = bool(call.values.get("include_stop_str_in_output"))
    shown = transcript.content if cut.channel == "content" else transcript.reasoning
    before = shown[1 - longest :] if shows_stop else ""
    if not (cut.held or before or late):
        return None
    least = _least_tokens(call)
    return StopGuard(
        stops,
        cut.held,
        late=late,
        before=before,
        shows_stop=shows_stop,
        tokens_to_minimum=least - cut.kept if least > 0 else None,
    )


def _least_tokens(call: Call) -> int:
    least = call.values.get("min_tokens")
    return least if isinstance(least, int) else 0


def _shared_changes(situation: Situation, kept: int, left: int | None) -> dict[str, object]:
    """What changes in any call that goes on from token ids."""
    values = situation.call.values
    changes: dict[str, object] = {name: REMOVED for name in _OF_THE_PROMPT if name in values}
    if left is not None:
        changes["max_tokens"] = left
        if values.get("max_completion_tokens") is not None:
            changes["max_completion_tokens"] = left
    if least := _least_tokens(situation.call):
        changes["min_tokens"] = max(0, least - kept)
    seed = values.get("seed")
    if isinstance(seed, int):
        # The same seed would repeat the random numbers of the first part. Any other one is as good: where the sequence
        # stood cannot be told.
        changes["seed"] = (seed + situation.segment * 0x9E3779B97F4A7C15) % 2**63
    budget = values.get("thinking_token_budget")
    if isinstance(budget, int) and budget >= 0:  # -1 is none (vLLM `ThinkingTokenBudget`)
        changes["thinking_token_budget"] = max(0, budget - situation.transcript.reasoning_among(kept))
    return changes


def _as_completion(call: Call, limit: int | None) -> dict[str, object]:
    """What turns a chat into a completion."""
    values = call.values
    changes: dict[str, object] = {name: REMOVED for name in _CHAT_ONLY if name in values or name in call.changes}
    changes["max_tokens"] = limit  # without one a completion would end after 16 tokens
    changes["add_special_tokens"] = False
    if values.get("logprobs"):
        changes["logprobs"] = values.get("top_logprobs") or 0
    elif "logprobs" in values:
        changes["logprobs"] = REMOVED
    return changes


def output_limit(call: Call) -> int | None:
    """How many tokens the answer may have; None: as many as fit."""
    values = call.values
    limit = values.get("max_completion_tokens") if call.api is Api.CHAT else None
    if limit is None:
        limit = values.get("max_tokens")
    if limit is None and call.api is Api.COMPLETIONS:
        return _COMPLETION_TOKENS
    return limit if isinstance(limit, int) else None


def _last_channel(transcript: Transcript) -> str:
    """Where text goes that follows what the client has, as long as no marker comes."""
    return "content" if transcript.content or not transcript.reasoning else transcript.reasoning_field


def _is_reproducible(call: Call) -> bool:
    """Does the same request give the same answer? Whether it did is verified token by token."""
    return call.values.get("temperature") == 0 or isinstance(call.values.get("seed"), int)


def _calls_tools(call: Call) -> bool:
    return bool(call.values.get("tools")) and call.values.get("tool_choice") != "none"


def _is_structured(call: Call) -> bool:
    """Is the answer bound to a grammar, which would begin anew?"""
    values = call.values
    form = values.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    if any(values.get(name) is not None for name in _STRUCTURED):
        return True
    choice = values.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        return True
    functions = [tool.get("function") for tool in values.get("tools") or () if isinstance(tool, dict)]
    return any(isinstance(function, dict) and function.get("strict") for function in functions)


def _has_media(call: Call) -> bool:
    messages = call.values.get("messages")
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)
