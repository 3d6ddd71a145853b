"""The log probabilities of a completion are those that the chat would have had."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.resume.chat_as_completion import make_chat_logprobs
from proxy.sim.dialects import vllm_answers as sim_logprobs
from proxy.sim.dialects.vllm_answers import TokenSpeller


@given(st.lists(st.integers(0, 127), max_size=6), st.integers(0, 5))
def test_log_probabilities_of_a_completion_become_those_of_a_chat(ids: list[int], top: int) -> None:
    as_completion = sim_logprobs.make_completion_logprobs(ids, top, 0, TokenSpeller())
    assert make_chat_logprobs(as_completion, top) == sim_logprobs.make_chat_logprobs(ids, top, TokenSpeller())


def test_characters_of_several_tokens_have_log_probabilities() -> None:
    ids = list("日a".encode())
    as_completion = sim_logprobs.make_completion_logprobs(ids, 2, 0, TokenSpeller())
    assert make_chat_logprobs(as_completion, 2) == sim_logprobs.make_chat_logprobs(ids, 2, TokenSpeller())


def test_completion_without_alternatives_is_a_chat_without() -> None:
    told = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": None}
    assert make_chat_logprobs(told, 0) == {
        "content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    }


def test_all_alternatives_are_all() -> None:
    """`top_logprobs: -1` asks for the whole detokenizer."""
    told = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5, "c": -2.5}]}
    (entry,) = make_chat_logprobs(told, -1)["content"]
    assert [other["token"] for other in entry["top_logprobs"]] == ["a", "b", "c"]
