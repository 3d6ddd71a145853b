"""The stream of another decoder continues the first one: no id, token or stop string shows the seam."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from proxy.dialects.grammars import KimiParser
from proxy.resume.chat_as_completion import CompletionToChat
from proxy.resume.overlap import AnswerMismatch
from proxy.resume.seam import Seam, SeamPlan, StopGuard
from proxy.resume.transcript import Transcript
from proxy.sim.dialects import vllm_answers as sim_logprobs
from proxy.sim.dialects.vllm_answers import TokenSpeller
from proxy.wire.openai import Api

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
COMPLETION_HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}

Chunk = tuple[dict[str, Any], list[int]]


def choice(ids: list[int] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return the choice of a chat, or of a completion if it has a `text`. As in vLLM, a finish has a stop reason."""
    shows = fields if "text" in fields else {"delta": fields}
    stop = {"stop_reason": None} if finish else {}
    return {"index": 0, **shows, "logprobs": None, "finish_reason": finish, **stop, "token_ids": ids or []}


def payload(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a chunk of the second engine."""
    return {"id": "chatcmpl-2", "object": "other", "created": 2, "model": "m", "choices": [choice], **more}


def transcript_of(*chunks: tuple[dict[str, Any], list[int]]) -> Transcript:
    transcript = Transcript()
    for delta, ids in chunks:
        transcript.add_choice(delta, ids)
    return transcript


def chat_seam(transcript: Transcript | None = None, **options: Any) -> Seam:
    return Seam(SeamPlan(api=Api.CHAT, answer_head=HEAD, transcript=transcript or Transcript(), **options))


def completion_seam(transcript: Transcript | None = None, **options: Any) -> Seam:
    return Seam(
        SeamPlan(api=Api.COMPLETIONS, answer_head=COMPLETION_HEAD, transcript=transcript or Transcript(), **options)
    )


def rewritten(seam: Seam, *payloads: dict[str, Any]) -> list[Chunk]:
    return [chunk for each in payloads for chunk in seam.rewrite_chunk(each, recomputed=False)]


def deltas(chunks: Iterable[Chunk]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk, _ in chunks]


def texts(chunks: Iterable[Chunk]) -> list[str]:
    return [chunk["choices"][0]["text"] for chunk, _ in chunks]


# One answer


def test_chunk_has_the_head_of_the_first_stream() -> None:
    ((chunk, ids),) = rewritten(chat_seam(), payload(choice([7], content="a")))
    assert {name: chunk[name] for name in HEAD} == HEAD
    assert ids == [7]
    assert chunk["choices"] == [choice([7], content="a")]


def test_seam_keeps_other_members_of_a_chunk() -> None:
    told = payload(choice([7], text="a") | {"x": 1}, system_fingerprint="f", y=[2])
    ((chunk, _),) = rewritten(completion_seam(), told)
    assert chunk == told | COMPLETION_HEAD


def test_engines_payload_is_left_alone() -> None:
    told = payload(choice([7, 8], role="assistant", content="a"), usage={"prompt_tokens": 9, "completion_tokens": 2})
    before = repr(told)
    rewritten(chat_seam(kept_ids=3, swallowed_ids=[7]), told)
    assert repr(told) == before


def test_seam_sends_no_second_role() -> None:
    assert deltas(rewritten(chat_seam(), payload(choice([7], role="assistant", content="a")))) == [{"content": "a"}]


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
def test_finish_is_the_engines(finish: str) -> None:
    ((chunk, _),) = rewritten(chat_seam(), payload(choice([7], finish, content="a")))
    assert chunk["choices"] == [choice([7], finish, content="a")]


# Usage


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            {"prompt_tokens": 40, "total_tokens": 43, "completion_tokens": 3},
            {"prompt_tokens": 30, "total_tokens": 43, "completion_tokens": 13},
        ),
        (
            {"prompt_tokens": 40, "total_tokens": 40, "completion_tokens": None},
            {"prompt_tokens": 30, "total_tokens": 40, "completion_tokens": 10},
        ),
        (
            {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 39}},
            {"prompt_tokens": 30, "completion_tokens": 13, "prompt_tokens_details": {"cached_tokens": 39}},
        ),
        (
            {"prompt_tokens": 40, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2, "x": 1}},
            {
                "prompt_tokens": 30,
                "completion_tokens": 13,
                "completion_tokens_details": {"reasoning_tokens": 8, "x": 1},
            },
        ),
        (
            {"prompt_tokens": 40, "completion_tokens": 3, "completion_tokens_details": None},
            {"prompt_tokens": 30, "completion_tokens": 13, "completion_tokens_details": None},
        ),
    ],
)
def test_tokens_that_were_given_as_prompt_are_the_answers(told: dict[str, Any], expected: dict[str, Any]) -> None:
    """Ten ids were kept, the first six of them reasoning."""
    transcript = transcript_of((choice(reasoning="abcdef"), [1] * 6), (choice(content="ghij"), [1] * 4))
    seam = chat_seam(transcript, kept_ids=10)
    assert seam.count_whole_usage(told) == expected
    ((chunk, _),) = rewritten(seam, payload(choice([7], content="k"), usage=told))
    assert chunk["usage"] == expected


def test_reasoning_that_was_not_kept_does_not_count_twice() -> None:
    seam = chat_seam(transcript_of((choice(reasoning="abcdef"), [1] * 6)), kept_ids=4)
    told = {"prompt_tokens": 34, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 5}}
    assert seam.count_whole_usage(told)["completion_tokens_details"] == {"reasoning_tokens": 9}


def test_chat_chunk_has_no_usage_that_is_null() -> None:
    """Old engines write it in a completion."""
    ((chunk, _),) = rewritten(raw_seam(""), payload(choice([7], text="a"), usage=None))
    assert "usage" not in chunk


@pytest.mark.parametrize("usage", [None, {}])
def test_chunk_without_usage_gets_none(usage: Any) -> None:
    ((chunk, _),) = rewritten(chat_seam(kept_ids=5), payload(choice([7], content="a"), usage=usage))
    assert chunk["usage"] == usage


def test_replay_has_the_engines_usage() -> None:
    transcript = transcript_of((choice(content="ab"), [1, 2]))
    told = {"prompt_tokens": 40, "total_tokens": 43, "completion_tokens": 3}
    assert chat_seam(transcript, replays_answer=True).count_whole_usage(told) == told


# Log probabilities


def test_offsets_in_the_text_go_on_where_the_first_stream_ended() -> None:
    seam = completion_seam(transcript_of((choice(text="Hello"), [1, 2])), kept_ids=2)
    told = payload(choice([7, 8], text=" yo") | {"logprobs": {"text_offset": [0, 1], "tokens": [" ", "yo"]}})
    ((chunk, _),) = rewritten(seam, told)
    assert chunk["choices"][0]["logprobs"] == {"text_offset": [5, 6], "tokens": [" ", "yo"]}


@pytest.mark.parametrize("logprobs", [None, {}, {"text_offset": []}, {"content": []}])
def test_log_probabilities_may_lack_offsets(logprobs: Any) -> None:
    seam = completion_seam(transcript_of((choice(text="Hello"), [1, 2])), kept_ids=2)
    ((chunk, _),) = rewritten(seam, payload(choice([7], text="a") | {"logprobs": logprobs}))
    assert chunk["choices"][0]["logprobs"] == logprobs


@pytest.mark.parametrize("is_guarded", [True, False])
def test_offsets_count_text_that_the_client_is_still_to_get(is_guarded: bool) -> None:
    """Kept ids have said it, so the next token begins behind it."""
    late: dict[str, Any] = (
        {"stop_guard": StopGuard(["xyz"], "lo"), "channel": "content"}
        if is_guarded
        else {"pending_delta": {"content": "lo"}}
    )
    seam = completion_seam(transcript_of((choice(text="Hel"), [1, 2, 3, 4, 5])), kept_ids=5, **late)
    told = payload(choice([7], text="! ha") | {"logprobs": {"text_offset": [0], "tokens": ["! ha"]}})
    chunks = rewritten(seam, told)
    assert "".join(texts(chunks)) == "lo! ha"
    assert chunks[-1][0]["choices"][0]["logprobs"]["text_offset"] == [5]


def test_offsets_of_a_replay_are_right_as_they_are() -> None:
    seam = completion_seam(transcript_of((choice(text="He"), [1, 2])), replays_answer=True)
    told = payload(choice([1, 2, 3], text="Hel") | {"logprobs": {"text_offset": [0, 1, 2], "tokens": ["H", "e", "l"]}})
    ((chunk, _),) = rewritten(seam, told)
    assert chunk["choices"][0]["logprobs"] == {"text_offset": [2], "tokens": ["l"]}


# Ids that the client has seen and the engine generates again


def swallowing(first: list[int], *payloads: dict[str, Any]) -> list[Chunk]:
    return rewritten(chat_seam(kept_ids=3, swallowed_ids=first), *payloads)


def test_ids_that_the_client_has_are_counted_but_not_sent_again() -> None:
    chunks = swallowing(
        [4, 5], payload(choice([4])), payload(choice([5, 6], content="日")), payload(choice([7], content="b"))
    )
    assert [chunk["choices"][0]["token_ids"] for chunk, _ in chunks] == [[], [6], [7]]
    assert [ids for _, ids in chunks] == [[4], [5, 6], [7]]
    assert deltas(chunks) == [{}, {"content": "日"}, {"content": "b"}]


def test_log_probabilities_of_repeated_ids_are_not_sent_again() -> None:
    told = payload(choice([4, 5], content="日") | {"logprobs": {"content": [{"token": ""}, {"token": "日"}]}})
    ((chunk, _),) = swallowing([4], told)
    assert chunk["choices"][0]["logprobs"] == {"content": [{"token": "日"}]}


@pytest.mark.parametrize("ids", [[6], [5, 4], [4, 6], [4, 6, 7]])
def test_other_ids_than_the_client_has_are_no_continuation(ids: list[int]) -> None:
    with pytest.raises(AnswerMismatch):
        swallowing([4, 5], payload(choice(ids, content="x")))


def test_seam_knows_the_text_still_to_be_repeated() -> None:
    seam = chat_seam(kept_ids=3, swallowed_ids=[4, 5, 6])
    rewritten(seam, payload(choice([4])), payload(choice([5])))
    assert seam.swallowed_ids == [6]


# Text of kept ids that the client does not have


def test_pending_text_comes_first_and_alone() -> None:
    seam = chat_seam(kept_ids=3, pending_delta={"content": "lo"})
    told = payload(choice([7], "stop", content="!") | {"logprobs": {"content": [{"token": "!"}]}})
    (first, first_ids), (second, second_ids) = rewritten(seam, told)
    assert first["choices"] == [choice([], content="lo")]
    assert first_ids == []
    assert second["choices"] == told["choices"]
    assert second_ids == [7]


def test_pending_text_of_a_completion_comes_first() -> None:
    seam = completion_seam(kept_ids=3, pending_delta={"content": "lo"})
    chunks = rewritten(seam, payload(choice([7], text="!")), payload(choice([8], text="?")))
    assert texts(chunks) == ["lo", "!", "?"]


def test_pending_tool_call_comes_first() -> None:
    pending = {"tool_calls": [{"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f"}}]}
    assert deltas(rewritten(chat_seam(kept_ids=3, pending_delta=pending), payload(choice([7])))) == [pending, {}]


# A chat that goes on as a completion


def parsed(seam: Seam, *pieces: str, finish: str | None = None) -> list[dict[str, Any]]:
    ends = [None] * (len(pieces) - 1) + [finish]
    told = [payload(choice([7], end, text=piece)) for piece, end in zip(pieces, ends, strict=True)]
    return deltas(rewritten(seam, *told))


def raw_seam(primed: str, *, in_reasoning: bool = False, pending: dict[str, Any] | None = None, **options: Any) -> Seam:
    parser = KimiParser(in_reasoning=in_reasoning)
    parser.parse_text(primed)
    return chat_seam(pending_delta=pending, chat_translator=CompletionToChat(parser, **options))


def test_text_of_a_completion_becomes_reasoning_and_content() -> None:
    seam = raw_seam("Let me", in_reasoning=True)
    assert parsed(seam, " see", ".</th", "ink>Hi") == [{"reasoning": " see"}, {"reasoning": "."}, {"content": "Hi"}]


def test_completions_choice_becomes_a_chats() -> None:
    told = payload(
        choice([97], text="a")
        | {
            "logprobs": sim_logprobs.make_completion_logprobs([97], 1, 0, TokenSpeller()),
            "stop_reason": None,
            "prompt_token_ids": [1, 2],
        }
    )
    ((chunk, ids),) = rewritten(raw_seam("", top_logprobs=1), told)
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"] == [
        {
            "index": 0,
            "logprobs": sim_logprobs.make_chat_logprobs([97], 1, TokenSpeller()),
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [97],
            "delta": {"content": "a"},
        }
    ]
    assert ids == [97]


SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"


@pytest.mark.parametrize(
    ("finish", "keeps_length", "expected"),
    [
        ("stop", True, "tool_calls"),
        ("stop", False, "tool_calls"),
        ("length", True, "length"),
        ("length", False, "tool_calls"),
    ],
)
@pytest.mark.parametrize("primed", ["", SECTION + '{"a"'])
def test_answer_that_calls_tools_ends_with_tool_calls(
    primed: str, finish: str, keeps_length: bool, expected: str
) -> None:
    seam = raw_seam(primed, keeps_length=keeps_length)
    rest = (SECTION + '{"a"' if not primed else "") + ": 1}<|tool_call_end|><|tool_calls_section_end|>"
    chunks = rewritten(seam, payload(choice([7], text=rest)), payload(choice([8], finish, text="")))
    assert chunks[-1][0]["choices"][0]["finish_reason"] == expected


def test_last_chunk_brings_what_the_parser_kept_back() -> None:
    assert parsed(raw_seam(""), "a<", "b</thi", finish="stop") == [{"content": "a"}, {"content": "<b</thi"}]


def test_tool_calls_of_an_interrupted_engine_are_dropped() -> None:
    """What closes them may be made up."""
    told = payload(choice([7], content="a", tool_calls=[{"index": 0, "function": {"arguments": "}"}}]))
    ((chunk, _),) = chat_seam().rewrite_chunk(told, recomputed=True)
    assert chunk["choices"][0]["delta"] == {"content": "a"}


def test_engine_that_breaks_off_does_not_end_the_text() -> None:
    seam = raw_seam("")
    ((chunk, _),) = seam.rewrite_chunk(payload(choice([7], text="a</thi")), recomputed=True)
    assert chunk["choices"][0]["delta"] == {"content": "a"}


# The end of an answer for which there is no room


def test_answer_that_ends_for_length() -> None:
    ((chunk, ids),) = chat_seam(kept_ids=3).make_ending_chunks()
    expected = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert chunk == HEAD | {"choices": [expected]}
    assert ids == []
    ((chunk, _),) = completion_seam(kept_ids=3).make_ending_chunks()
    assert chunk["choices"][0]["text"] == ""


def test_end_brings_what_was_kept_back() -> None:
    assert texts(completion_seam(kept_ids=3, pending_delta={"content": "lo"}).make_ending_chunks()) == ["lo", ""]
    finishes = [
        chunk["choices"][0]["finish_reason"]
        for chunk, _ in raw_seam("Hi </th", pending={"content": "Hi"}).make_ending_chunks()
    ]
    assert finishes == [None, "length"]
    assert deltas(raw_seam("Hi </th", pending={"content": "Hi"}).make_ending_chunks()) == [
        {"content": "Hi"},
        {"content": "</th"},
    ]


# Stop strings

Found = tuple[str, str | None]


def naive_engine(text: str, stops: Sequence[str], least: int, *, shows_stop: bool) -> Found:
    """Return the text that an engine shows with one character per token, and the stop string that ends it.

    vLLM `check_stop_strings`: the one that is complete first, and of several the first in the list; but none that is
    complete within the first `least` tokens.
    """
    for end in range(least + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if shows_stop else end - len(stop)], stop
    return text, None


def engine_chunks(
    text: str, stops: Sequence[str], least: int, cuts: Sequence[int], *, shows_stop: bool, is_whole: bool = True
) -> list[dict[str, Any]]:
    """How it streams that: it holds back what a stop string may begin in, and chunks of several tokens end at cuts.

    Not `is_whole`: it dies before it finishes.
    """
    whole, stop = naive_engine(text, stops, least, shows_stop=shows_stop)
    length = len(whole) + (len(stop) if stop and not shows_stop else 0)
    hold = 0 if shows_stop else max(map(len, stops)) - 1
    chunks, sent, begin = [], 0, 0
    for end in sorted({*(cut % (length + 1) for cut in cuts), length}):
        is_last = end == length and is_whole
        shown = len(whole) if is_last else max(sent, end - hold)
        finish = None if not is_last else "stop" if stop else "length"
        ids = list(map(ord, text[begin:end]))
        chunks.append(choice(ids, finish, text=whole[sent:shown]) | {"stop_reason": stop if finish else None})
        sent, begin = shown, end
    return chunks


def joined(text: str, seam: int, stops: Sequence[str], cuts: Sequence[int], *, shows_stop: bool) -> Found:
    """Return the result of two engines: the first one breaks off after `seam` characters."""
    hold = max(map(len, stops)) - 1
    sent = text[:seam] if shows_stop else text[: max(0, seam - hold)]
    before = sent[len(sent) - min(hold, len(sent)) :] if shows_stop else ""
    guard = StopGuard(stops, text[len(sent) : seam], before=before, shows_stop=shows_stop)
    rewriting = completion_seam(transcript_of((choice(text=sent), [1])), kept_ids=1, stop_guard=guard)
    for told in engine_chunks(text[seam:], stops, 0, cuts, shows_stop=shows_stop):
        for chunk, _ in rewriting.rewrite_chunk(payload(told), recomputed=False):
            rewritten_choice = chunk["choices"][0]
            sent += rewritten_choice["text"]
            if rewritten_choice["finish_reason"] is not None:
                return sent, rewritten_choice["stop_reason"]
    raise AssertionError("the answer has no end")


STOP_TEXTS = st.text("ab", max_size=14)
STOP_STRINGS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3, unique=True).filter(
    lambda stops: max(map(len, stops)) > 1
)


@given(STOP_TEXTS, st.integers(0, 14), STOP_STRINGS, st.lists(st.integers(0, 20), max_size=4), st.booleans())
@example("abab", 2, ["ba", "aba"], range(5), False)  # two that are complete together, one begins earlier
@example("ab", 1, ["ab", "b"], [], False)  # the next engine finds another stop string at the end of the first
@example("ab", 1, ["b", "ab"], [], True)
@example("aab", 2, ["aab"], [], False)
def test_stop_strings_across_a_seam_end_the_answer_as_if_there_were_none(
    text: str, at: int, stops: list[str], cuts: Sequence[int], shows_stop: bool
) -> None:
    seam = min(at, len(text))
    assume(naive_engine(text[:seam], stops, 0, shows_stop=shows_stop)[1] is None)
    assert joined(text, seam, stops, cuts, shows_stop=shows_stop) == naive_engine(text, stops, 0, shows_stop=shows_stop)


def test_stop_string_ends_the_answer() -> None:
    seam = chat_seam(stop_guard=StopGuard(["STOP"], "xST"), kept_ids=3)
    ((chunk, ids),) = rewritten(seam, payload(choice([7, 8], content="OPper")))
    assert seam.is_stopped
    assert chunk["choices"] == [choice([7, 8], "stop", content="x") | {"stop_reason": "STOP"}]
    assert ids == [7, 8]


def test_text_after_a_stop_string_is_dropped() -> None:
    seam = chat_seam(stop_guard=StopGuard(["STOP"], "xST"), channel="reasoning", kept_ids=3)
    tool = {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f"}}
    said = rewritten(seam, payload(choice([7, 8], reasoning="OP", content="Hi", tool_calls=[tool])))
    assert deltas(said) == [{"reasoning": "x"}]


@pytest.mark.parametrize("other", [{"content": "Hi"}, {"tool_calls": [{"index": 0, "id": "functions.f:0"}]}])
def test_text_of_another_kind_ends_the_waiting(other: dict[str, Any]) -> None:
    """A marker stands between them, which is not part of a stop string."""
    seam = chat_seam(stop_guard=StopGuard(["STOP"], "xST"), channel="reasoning", kept_ids=3)
    chunks = rewritten(seam, payload(choice([7], reasoning="O")), payload(choice([8], **other)))
    assert deltas(chunks) == [{"reasoning": "x"}, {**other, "reasoning": "STO"}]
    assert seam.withheld_text == ""


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["O", "P"], [{"reasoning": "x"}, {}]),
        (["O", "ne"], [{"reasoning": "x"}, {"reasoning": " STOne"}]),
        (["ay ", "by"], [{"reasoning": "x STay"}, {"reasoning": " by"}]),
    ],
)
def test_white_space_is_deferred_until_text_follows_a_guarded_seam(
    texts: list[str], shown: list[dict[str, str]]
) -> None:
    """Some engines defer it at the end of reasoning, because the text may end at a stop string."""
    guard = StopGuard(["STOP"], "x ST")
    seam = chat_seam(stop_guard=guard, channel="reasoning", defers_blanks=True, kept_ids=3)
    assert deltas(rewritten(seam, *(payload(choice([7], reasoning=text)) for text in texts))) == shown


def test_seam_knows_what_is_kept_back() -> None:
    seam = chat_seam(stop_guard=StopGuard(["STOP"], "xST"), kept_ids=3)
    rewritten(seam, payload(choice([7], content="O")))
    assert seam.withheld_text == "STO"
    assert chat_seam().withheld_text == ""


# A stream that repeats the answer


def replayed(transcript: Transcript, *told: dict[str, Any], api: Api = Api.CHAT) -> list[Chunk]:
    seam = Seam(SeamPlan(api=api, answer_head=HEAD, transcript=transcript, replays_answer=True))
    return rewritten(seam, *map(payload, told))


def said_together(chunks: Iterable[Chunk], transcript: Transcript) -> tuple[Any, ...]:
    """Everything the client has in the end."""
    for chunk, ids in chunks:
        transcript.add_choice(chunk["choices"][0], ids)
    calls = [(call.id, call.name, call.arguments) for call in transcript.tools]
    return transcript.reasoning_text, transcript.content_text, calls, transcript.ids.tolist()


def test_text_that_the_client_has_is_not_sent_again() -> None:
    transcript = transcript_of(
        *((choice(reasoning="Let"), [1]), (choice(reasoning=" me."), [2]), (choice(), [3]), (choice(content="Hi"), [4]))
    )
    chunks = replayed(
        transcript,
        choice([1, 2], reasoning="Let me."),
        choice([3]),
        choice([4, 5], content="Hi there"),
        choice([6], "stop", content="!"),
    )
    assert deltas(chunks) == [{}, {}, {"content": " there"}, {"content": "!"}]


TOOL_CHUNKS: list[dict[str, Any]] = [
    choice([1, 2], reasoning="Let."),
    choice([3]),
    choice([4, 5], content="so:"),
    choice([6], tool_calls=[{"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f"}}]),
    choice([7], tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
    choice([8, 9], tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
    choice([10], tool_calls=[{"index": 1, "id": "functions.g:1", "type": "function", "function": {"name": "g"}}]),
    choice([11], tool_calls=[{"index": 1, "function": {"arguments": "{}"}}]),
    choice([12], "tool_calls"),
]


@pytest.mark.parametrize("have", range(len(TOOL_CHUNKS)))
def test_answer_is_the_same_wherever_its_replay_begins_to_tell(have: int) -> None:
    whole = said_together(((payload(each), each["token_ids"]) for each in TOOL_CHUNKS), Transcript())
    transcript = transcript_of(*((each, each["token_ids"]) for each in TOOL_CHUNKS[:have]))
    assert said_together(replayed(transcript, *TOOL_CHUNKS), transcript) == whole


def chunks_of(reasoning: str, content: str, cuts: Iterable[int]) -> list[dict[str, Any]]:
    """Return a stream of these texts with one token per character, in chunks that end at the cuts."""
    text = reasoning + content
    marks = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    made = []
    for begin, end in pairwise(marks):
        parts = {"reasoning": reasoning[begin:end], "content": text[max(begin, len(reasoning)) : end]}
        made.append(choice(list(map(ord, text[begin:end])), **{name: part for name, part in parts.items() if part}))
    return [*made, choice([0], "stop")]


_cuts = st.lists(st.integers(0, 40), max_size=8)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9), _cuts, _cuts, st.integers(0, 20))
def test_replay_tells_the_rest_however_both_streams_are_cut(
    reasoning: str, content: str, first_cuts: list[int], second_cuts: list[int], have: int
) -> None:
    first = chunks_of(reasoning, content, first_cuts)[:-1]
    transcript = transcript_of(*((each, each["token_ids"]) for each in first[: have % (len(first) + 1)]))
    chunks = replayed(transcript, *chunks_of(reasoning, content, second_cuts))
    assert said_together(chunks, transcript) == (reasoning, content, [], [*map(ord, reasoning + content), 0])


@given(
    st.text("ab", max_size=6),
    st.text("ab", max_size=6),
    st.text("ab", max_size=6),
    st.text("ab", max_size=6),
    _cuts,
    st.booleans(),
)
@example("", "ab", "", "a", [], True)  # ends before what the client has
@example("a", "", "", "a", [], False)
def test_different_answer_is_never_sent_as_a_replay(
    reasoning: str, content: str, other_reasoning: str, other_content: str, cuts: list[int], tells_ids: bool
) -> None:
    has = (reasoning, content)
    says = (other_reasoning, other_content)
    is_continued = (
        other_content.startswith(content) and reasoning == other_reasoning
        if content
        else other_reasoning.startswith(reasoning)
    )
    assume(not is_continued)
    assert has != says
    ids = list(map(ord, reasoning + content)) if tells_ids else []
    transcript = transcript_of((choice(reasoning=reasoning, content=content), ids))
    again = chunks_of(other_reasoning, other_content, cuts)
    with pytest.raises(AnswerMismatch):
        replayed(transcript, *(each if tells_ids else each | {"token_ids": None} for each in again))


@pytest.mark.parametrize(
    "told",
    [
        {"tool_calls": [{"index": 0, "id": "functions.x:0", "function": {"name": "f"}}]},
        {"tool_calls": [{"index": 0, "id": "functions.f:0", "function": {"name": "x"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"b"'}}]},
        {"content": "x"},
    ],
)
def test_other_calls_than_the_client_has_are_no_replay(told: dict[str, Any]) -> None:
    call = {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    transcript = transcript_of((choice(content="so:", tool_calls=[call]), []))
    with pytest.raises(AnswerMismatch):
        replayed(transcript, choice(**told))


def test_completion_is_replayed() -> None:
    transcript = transcript_of((choice(text="Hel"), [1, 2, 3]))
    chunks = replayed(
        transcript,
        choice([1, 2], text="He"),
        choice([3, 4], text="ll"),
        choice([5], "stop", text="o"),
        api=Api.COMPLETIONS,
    )
    assert texts(chunks) == ["", "l", "o"]
    assert [ids for _, ids in chunks] == [[], [4], [5]]
    assert [chunk["choices"][0]["token_ids"] for chunk, _ in chunks] == [[], [4], [5]]
