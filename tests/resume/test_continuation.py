"""The request with which an answer goes on: its prompt, and how long the answer may still be."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.common.terms import Action
from proxy.resume.engines import CannotResume, read_output_limit
from proxy.resume.situation import ChatTokenApi
from proxy.sim.model.tokenizer import encode_text
from proxy.wire.openai import Api
from tests.asking import request
from tests.gateway.test_delivery import TOOLS, call_of
from tests.resume.test_plan import (
    CHAT,
    COMPLETION,
    HELLO,
    PROMPT,
    answered,
    body_of,
    decided,
    situation,
)

# The prompt


@pytest.mark.parametrize(
    ("body", "chats"),
    [(COMPLETION, "native"), (CHAT, "native"), (CHAT, "ascend_private"), (CHAT, "completions")],
)
def test_answer_stands_behind_the_prompt(body: dict[str, Any], chats: str) -> None:
    resumption, _ = decided(situation(body, HELLO, chat_token_api=ChatTokenApi(chats)))
    ids = PROMPT + HELLO
    assert resumption.prompt_ids == orjson.dumps(ids)
    assert resumption.kept_ids == len(HELLO)
    call = resumption.call
    assert call is not None
    assert call.prompt_tokens == len(ids)
    sent = body_of(resumption)
    if body is CHAT and chats != "completions":
        key = "prompt_token_ids" if chats == "native" else "_vllm_ascend_recompute_token_ids"
        assert call.api is Api.CHAT
        assert sent["kv_transfer_params"] == {key: ids}
        assert sent["messages"] == CHAT["messages"]
    else:
        assert call.api is Api.COMPLETIONS
        assert sent["prompt"] == ids
        assert "messages" not in sent
        assert not call.kv_params


def test_empty_prompt_is_a_prompt() -> None:
    here = situation(COMPLETION, HELLO, transcript=answered(Api.COMPLETIONS, HELLO, prompt=[]))
    assert decided(here)[0].prompt_ids == orjson.dumps(HELLO)


def test_options_of_the_prompt_are_not_applied_again() -> None:
    applied = {"echo": True, "suffix": "x", "truncate_prompt_tokens": 5, "prompt_logprobs": None}
    kept = {"stop_token_ids": [1], "presence_penalty": 0.5, "logit_bias": {"7": 1}, "user": "u", "priority": 3}
    sent = body_of(decided(situation(COMPLETION | applied | kept, HELLO))[0])
    assert set(sent) & set(applied) == set()
    assert {name: sent[name] for name in kept} == kept


def test_chat_that_goes_on_as_a_completion_has_nothing_of_a_chat_left() -> None:
    chat = {
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"thinking": True},
        "reasoning_effort": "low",
        "add_generation_prompt": True,
        "include_reasoning": False,
        "top_logprobs": 2,
        "logprobs": True,
        "max_tokens": None,
        "max_completion_tokens": 50,
        "documents": [],
    }
    kept = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "ignore_eos": True, "cache_salt": "s", "bad_words": ["y"]}
    sent = body_of(decided(situation(CHAT | chat | kept, HELLO, chat_token_api=ChatTokenApi.COMPLETIONS_API))[0])
    assert sent == {
        "model": "sim",
        **kept,
        "prompt": PROMPT + HELLO,
        "max_tokens": 50 - len(HELLO),
        "logprobs": 2,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": None}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_log_probabilities_are_asked_for_as_completions_do(fields: dict[str, Any], expected: int | None) -> None:
    sent = body_of(decided(situation(CHAT | fields, HELLO, chat_token_api=ChatTokenApi.COMPLETIONS_API))[0])
    assert sent.get("logprobs") == expected
    assert "top_logprobs" not in sent


# How long it may be

LIMITS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # fields, facts; max_tokens and max_completion_tokens as they are sent: six ids are kept
    (CHAT | {"max_tokens": 50}, {}, {"max_tokens": 44}),
    (CHAT | {"max_tokens": 50, "max_completion_tokens": 30}, {}, {"max_tokens": 24, "max_completion_tokens": 24}),
    (CHAT | {"max_tokens": 50, "max_completion_tokens": None}, {}, {"max_tokens": 44, "max_completion_tokens": None}),
    (CHAT | {"max_tokens": None, "max_completion_tokens": 30}, {}, {"max_tokens": 24, "max_completion_tokens": 24}),
    (CHAT | {"max_tokens": None}, {}, {"max_tokens": None}),
    (CHAT | {"max_tokens": 50}, {"chat_token_api": "completions"}, {"max_tokens": 44}),
    (CHAT | {"max_tokens": 50, "max_completion_tokens": 30}, {"chat_token_api": "completions"}, {"max_tokens": 24}),
    (CHAT | {"max_tokens": None}, {"chat_token_api": "completions"}, {"max_tokens": 1000 - len(PROMPT) - 6}),
    (COMPLETION | {"max_tokens": 50}, {}, {"max_tokens": 44}),
    (COMPLETION | {"max_tokens": None}, {}, {"max_tokens": 10}),
    ({name: COMPLETION[name] for name in COMPLETION if name != "max_tokens"}, {}, {"max_tokens": 10}),
]


@pytest.mark.parametrize(("body", "facts", "expected"), LIMITS)
def test_continuation_has_the_remaining_token_limit(
    body: dict[str, Any], facts: dict[str, Any], expected: dict[str, Any]
) -> None:
    if "chat_token_api" in facts:
        facts = {"chat_token_api": ChatTokenApi(facts["chat_token_api"])}
    sent = body_of(decided(situation(body, HELLO, **facts))[0])
    assert {name: sent[name] for name in ("max_tokens", "max_completion_tokens") if name in sent} == expected


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (request(Api.CHAT, max_tokens=7), 7),
        (request(Api.CHAT, max_tokens=None), None),
        (request(Api.CHAT, max_tokens=7, max_completion_tokens=5), 5),
        (request(Api.CHAT, max_tokens=7, max_completion_tokens=None), 7),
        (request(Api.CHAT, max_tokens="7"), 7),
        (request(Api.COMPLETIONS, max_tokens=7, max_completion_tokens=5), 7),
        (request(Api.COMPLETIONS, max_tokens=None), 16),
        ({"prompt": "Hi"}, 16),
        ({"messages": []}, None),
    ],
)
def test_limit_an_engine_would_see(body: dict[str, Any], limit: int | None) -> None:
    """Completions take null for the default as well (vLLM `CompletionRequest.normalize_null_max_tokens`)."""
    assert read_output_limit(call_of(body)) == limit


def test_chat_without_a_limit_is_not_cut_off_by_that_of_completions() -> None:
    """The context length is not known, and a completion without a limit stops after 16 tokens."""
    here = situation(
        CHAT | {"max_tokens": None}, HELLO, chat_token_api=ChatTokenApi.COMPLETIONS_API, max_model_len=None
    )
    try:
        limit = body_of(decided(here)[0])["max_tokens"]
    except CannotResume:
        return
    assert isinstance(limit, int)
    assert limit > 16


@pytest.mark.parametrize(
    ("body", "facts", "is_over"),
    [
        (COMPLETION | {"max_tokens": 6}, {}, True),
        (COMPLETION | {"max_tokens": 5}, {}, True),
        (COMPLETION | {"max_tokens": 7}, {}, False),
        (CHAT | {"max_tokens": 6}, {}, True),
        (CHAT | {"max_tokens": 6}, {"chat_token_api": "completions"}, True),
        (CHAT | {"max_tokens": None}, {"max_model_len": len(PROMPT) + 6}, True),
        (CHAT | {"max_tokens": None}, {"max_model_len": len(PROMPT) + 7}, False),
        (CHAT | {"max_tokens": None}, {"max_model_len": len(PROMPT) + 6, "chat_token_api": "completions"}, True),
        (CHAT | {"max_tokens": None}, {"max_model_len": None}, False),
    ],
)
def test_answer_for_which_there_is_no_room_is_over(body: dict[str, Any], facts: dict[str, Any], is_over: bool) -> None:
    facts = facts | ({"chat_token_api": ChatTokenApi(facts["chat_token_api"])} if "chat_token_api" in facts else {})
    resumption, _ = decided(situation(body, HELLO, **facts))
    assert (resumption.call is None) is is_over
    assert (resumption.action is Action.FINISH) is is_over
    if is_over:
        assert resumption.seam is not None
        *_, (last, ids) = resumption.seam.make_ending_chunks()
        assert last["choices"][0]["finish_reason"] == "length"
        assert ids == []


@pytest.mark.parametrize(("least", "sent"), [(0, 0), (3, 0), (6, 0), (7, 1), (40, 34), (None, None), ("7", 1)])
def test_continuation_has_the_remaining_minimum_length(least: Any, sent: Any) -> None:
    body = COMPLETION | {"max_tokens": 50, "min_tokens": least}
    assert body_of(decided(situation(body, HELLO))[0])["min_tokens"] == sent


def test_seed_is_another_one_for_each_segment() -> None:
    seeds = [
        body_of(decided(situation(COMPLETION | {"seed": 7}, HELLO, decoder_count=n))[0])["seed"] for n in (1, 2, 3)
    ]
    assert len({7, *seeds}) == 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == body_of(decided(situation(COMPLETION | {"seed": 7}, HELLO, decoder_count=1))[0])["seed"]


def test_invalid_seed_stays() -> None:
    assert body_of(decided(situation(COMPLETION | {"seed": None}, HELLO))[0])["seed"] is None


@pytest.mark.parametrize(
    ("budget", "in_reasoning", "sent"),
    [(100, True, 94), (6, True, 0), (3, True, 0), (100, False, 100), (None, True, None)],
)
@pytest.mark.parametrize("chats", ["native", "completions"])
def test_continuation_has_the_remaining_thinking_budget(
    budget: int | None, in_reasoning: bool, sent: int | None, chats: str
) -> None:
    body = CHAT | {"thinking_token_budget": budget, "max_tokens": 50}
    text = encode_text("Hello.")
    here = situation(body, text, in_reasoning=in_reasoning, chat_token_api=ChatTokenApi(chats))
    assert body_of(decided(here)[0])["thinking_token_budget"] == sent
