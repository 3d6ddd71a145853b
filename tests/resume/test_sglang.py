"""Properties of SGLang: its requests, the text of half tokens, and answers that cannot be continued exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from proxy.balancer.engines import CHAT_STREAM_TOKEN_IDS, TOKEN_IDS, Capability
from proxy.common.terms import Action
from proxy.resume.engines import SGLANG, WatchLevel
from proxy.resume.overlap import AnswerMismatch
from proxy.resume.seam import Seam
from proxy.resume.situation import ChatTokenApi, Resumption
from proxy.resume.transcript import Transcript
from proxy.sim.model.tokenizer import ASSISTANT, MIDDLE, THINK_END
from proxy.wire.document import join_body
from proxy.wire.openai import Api
from tests.asking import request
from tests.gateway.test_delivery import call_of
from tests.resume.test_plan import CHAT, COMPLETION, body_of, decided, situation

GREEDY: dict[str, Any] = {"temperature": 0}
WHOLE = request(Api.CHAT)


@pytest.mark.parametrize(
    ("body", "capability", "watch"),
    [
        (COMPLETION, TOKEN_IDS, WatchLevel.CONTINUE_FROM_IDS),
        (COMPLETION, None, WatchLevel.REPEAT_UNSEEN),
        (COMPLETION | {"echo": True}, TOKEN_IDS, WatchLevel.REPEAT_UNSEEN),
        (COMPLETION | {"return_hidden_states": True}, TOKEN_IDS, WatchLevel.REPEAT_UNSEEN),
        (CHAT, TOKEN_IDS, WatchLevel.REPEAT_UNSEEN),
        (CHAT, CHAT_STREAM_TOKEN_IDS, WatchLevel.CONTINUE_FROM_IDS),
        (CHAT | GREEDY, TOKEN_IDS, WatchLevel.REPEAT_AND_COMPARE),
        (CHAT | GREEDY, None, WatchLevel.REPEAT_AND_COMPARE),
        (CHAT | GREEDY | {"logprobs": True}, TOKEN_IDS, WatchLevel.REPEAT_UNSEEN),
        (CHAT | {"seed": 7}, TOKEN_IDS, WatchLevel.REPEAT_UNSEEN),
        (WHOLE | GREEDY, TOKEN_IDS, WatchLevel.REPEAT_UNSEEN),
        (WHOLE, CHAT_STREAM_TOKEN_IDS, WatchLevel.CONTINUE_FROM_IDS),
    ],
)
def test_sglang_answers_are_watched_by_token_ids(
    body: dict[str, Any], capability: Capability | None, watch: WatchLevel
) -> None:
    assert SGLANG.watch_level(call_of(body), lambda asked: asked is capability) is watch


def test_chat_that_may_be_replayed_is_asked_for_as_ever() -> None:
    call = call_of(CHAT | GREEDY)
    assert SGLANG.watching[WatchLevel.REPEAT_AND_COMPARE].make_observable_call(call) is call
    body = orjson.loads(
        join_body(SGLANG.watching[WatchLevel.CONTINUE_FROM_IDS].make_observable_call(call_of(COMPLETION)).make_body({}))
    )
    assert body["return_token_ids"] is body["stream"] is True


# A token that is shown in part: its text is ` ` and the first byte of a quotation mark, which SGLang shows up to the
# space (`find_printable_text`).
TEXTS = {1: b"He", 2: b" said", 3: b" \xe2\x80", 4: b"\x9cyes"}


def text_of(ids: Sequence[int]) -> str:
    return b"".join(TEXTS[token] for token in ids).decode(errors="replace")


def shown(*parts: tuple[str, list[int]]) -> Transcript:
    transcript = Transcript()
    transcript.prompt_ids = b"[7,8]"
    for text, ids in parts:
        transcript.add_choice({"text": text}, ids)
    return transcript


def resumed(transcript: Transcript, **body: Any) -> Resumption:
    return decided(situation(COMPLETION | body, [], engine=SGLANG, transcript=transcript), text_of)[0]


@pytest.mark.parametrize(
    ("parts", "prompt", "rest", "new"),
    [
        ([("He", [1]), (" said", [2])], [7, 8, 1, 2], [(" “yes", [3, 4])], " “yes"),
        ([("He", [1]), (" said", [2]), (" ", [3])], [7, 8, 1, 2], [(" ", [3]), ("“yes", [4])], "“yes"),
        ([("He", [1]), (" said ", [2, 3])], [7, 8, 1, 2], [(" “yes", [3, 4])], "“yes"),
        ([("He", [1]), (" said", [2]), (" ", [3]), ("“yes", [4])], [7, 8, 1, 2, 3, 4], [("!", [1])], "!"),
        ([("He", [1]), (" said", [2]), ("", [3])], [7, 8, 1, 2], [(" “yes", [3, 4])], " “yes"),
    ],
)
def test_text_of_half_a_token_is_generated_again_and_sent_once(
    parts: list[tuple[str, list[int]]], prompt: list[int], rest: list[tuple[str, list[int]]], new: str
) -> None:
    transcript = shown(*parts)
    resumption = resumed(transcript)
    assert resumption.action is Action.COMPLETION_TOKENS
    assert body_of(resumption)["prompt"] == prompt
    assert resumption.seam is not None
    transcript.truncate_to_ids(resumption.kept_ids)
    told = ""
    for text, ids in rest:
        for chunk, _ in resumption.seam.rewrite_chunk(_chunk(text, ids), recomputed=False):
            told += chunk["choices"][0]["text"]
    assert told == new


def test_text_of_half_a_token_is_sent_once_in_a_chat_sent_as_a_completion() -> None:
    transcript = Transcript("reasoning_content")
    transcript.prompt_ids = b"[%d,%d]" % (ASSISTANT, MIDDLE)
    transcript.add_choice({"delta": {"reasoning_content": "He"}}, [1])
    transcript.add_choice({"delta": {}}, [THINK_END])
    for text, ids in [(" said", [2]), (" ", [3])]:
        transcript.add_choice({"delta": {"content": text}}, ids)
    facts: dict[str, Any] = {"chat_token_api": ChatTokenApi.COMPLETIONS_API, "chat_sampling": {"top_k": 20}}

    def tell(ids: Sequence[int]) -> str:
        markers = {MIDDLE: "<think>", THINK_END: "</think>"}
        return "".join(markers.get(token) or text_of([token] if token in TEXTS else []) for token in ids)

    resumption, _ = decided(situation(CHAT, [], engine=SGLANG, transcript=transcript, **facts), tell)
    assert resumption.action is Action.RAW_TOKENS
    body = body_of(resumption)
    assert (body["prompt"], body["top_k"]) == ([ASSISTANT, MIDDLE, 1, THINK_END, 2], 20)
    assert resumption.seam is not None
    chunks = [chunk for text, ids in [(" ", [3]), ("“yes", [4])] for chunk in _rewritten(resumption.seam, text, ids)]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "“yes"


def _rewritten(seam: Seam, text: str, ids: list[int]) -> list[dict[str, Any]]:
    return [chunk for chunk, _ in seam.rewrite_chunk(_chunk(text, ids), recomputed=False)]


@pytest.mark.parametrize(("text", "finish"), [("-", None), ("", "length")])
def test_engine_that_does_not_say_it_again_has_not_gone_on(text: str, finish: str | None) -> None:
    seam = resumed(shown(("He", [1]), (" said", [2]), (" ", [3]))).seam
    assert seam is not None
    with pytest.raises(AnswerMismatch):
        seam.rewrite_chunk(_chunk(text, [5], finish), recomputed=False)


def _chunk(text: str, ids: list[int], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {"id": "y", "choices": [{**choice, "token_ids": ids}], "usage": None}


def test_no_text_is_asked_for_but_that_of_the_last_character() -> None:
    asked: list[Sequence[int]] = []

    def tell(ids: Sequence[int]) -> str:
        asked.append(list(ids))
        return text_of(ids)

    transcript = shown(*[("He", [1])] * 100)
    decided(situation(COMPLETION, [], engine=SGLANG, transcript=transcript), tell)
    assert asked == [[1] * 8]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.05},
        {"stop_regex": "a+"},
        {"custom_logit_processor": "x"},
        {"ebnf": "root ::= x"},
        {"json_schema": "{}"},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_irreproducible_sglang_answer_is_only_replayed(fields: dict[str, Any]) -> None:
    parts = [("He", [1]), (" said", [2])]
    assert resumed(shown(*parts), **fields, **GREEDY).action is Action.REPLAY


@pytest.mark.parametrize("fields", [{"presence_penalty": 0}, {"repetition_penalty": 1.0}, {"frequency_penalty": None}])
def test_penalty_without_effect_allows_resume(fields: dict[str, Any]) -> None:
    assert resumed(shown(("He", [1])), **fields).action is Action.COMPLETION_TOKENS


@pytest.mark.parametrize(("seeds_repeat", "action"), [(True, Action.REPLAY), (False, None)])
def test_seed_counts_where_engines_say_so(seeds_repeat: bool, action: Action | None) -> None:
    assert SGLANG.is_reproducible(call_of(COMPLETION | {"seed": 7}), seeds_repeat=seeds_repeat) is (action is not None)


def test_seed_stays_the_same() -> None:
    assert body_of(resumed(shown(("He", [1])), seed=7))["seed"] == 7
