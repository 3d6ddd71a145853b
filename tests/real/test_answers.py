"""Answers that went through the gateway, two engines and a KV transfer equal those of a single engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.answers import CHAT, COMPLETIONS, Answer, ask, request
from tests.real.cluster import Cluster
from tests.real.families import VLLM
from tests.real.report import Show

# Some are shorter than a KV block of 32 tokens, some longer than several; text beyond ASCII; token ids.
PROMPTS: list[Any] = [
    "Hi",
    "A proxy sends the prompt to a prefill engine and then to a decode engine.",
    "def main():\n    print('hello, world')\n    return 0\n",
    "The quick brown fox jumps over the lazy dog, and then again, but slowly. " * 12,
    "naïve café 日本語 🙂 Ωmega",
    list(range(20, 120)),
]
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "The future of AI is"}]}],
    [
        {"role": "system", "content": "You are the one who jumps over the lazy dog."},
        {"role": "user", "content": "What does a proxy send to the prefill engine? " * 8},
        {"role": "assistant", "content": "The prompt."},
        {"role": "user", "content": "And then?"},
    ],
]


def test_greedy_completions_equal_those_of_a_single_engine(cluster: Cluster, show: Show) -> None:
    show(compare(cluster, COMPLETIONS, [{"prompt": prompt, "max_tokens": 24} for prompt in PROMPTS]))


def test_streamed_greedy_completions_equal_those_of_a_single_engine(cluster: Cluster, show: Show) -> None:
    show(compare(cluster, COMPLETIONS, [{"prompt": prompt, "max_tokens": 24, "stream": True} for prompt in PROMPTS]))


def test_greedy_chats_equal_those_of_a_single_engine(cluster: Cluster, show: Show) -> None:
    show(compare(cluster, CHAT, [{"messages": talk, "max_tokens": 24} for talk in TALKS]))


def test_streamed_greedy_chats_equal_those_of_a_single_engine(cluster: Cluster, show: Show) -> None:
    options = token_ids_option(cluster, CHAT)
    show(
        compare(
            cluster,
            CHAT,
            [{"messages": talk, "max_completion_tokens": 24, "stream": True, **options} for talk in TALKS],
        )
    )


def test_lists_of_prompts_get_the_answers_of_a_single_engine(cluster: Cluster, show: Show) -> None:
    """Compared with the single engine's whole answer, because SGLang streams each answer of a list under its own id."""
    answers = []
    for prompts in [["Hi", "A proxy sends", "the prompt"], [[30, 31, 32], list(range(50, 150))]]:
        alone = ask(cluster.single.port, COMPLETIONS, prompt=prompts, max_tokens=16)
        for stream in (False, True):
            answers.append(ask(cluster.gateway.port, COMPLETIONS, prompt=prompts, max_tokens=16, stream=stream))
            assert answers[-1] == alone
    show(summary(answers))


@pytest.mark.only("nixl", "mooncake", "store", "mooncake-store", "plain")
def test_samples_with_a_seed_equal_those_of_a_single_engine(cluster: Cluster, show: Show) -> None:
    """SGLang ignores the seed unless it was started for deterministic inference."""
    drawn = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 16}
    show(
        compare(
            cluster, COMPLETIONS, [{"prompt": "A proxy sends", **drawn, "stream": stream} for stream in (False, True)]
        )
        + "; "
        + compare(cluster, CHAT, [{"messages": TALKS[1], **drawn, "stream": stream} for stream in (False, True)])
    )


@pytest.mark.only("nixl", "mooncake", "store", "mooncake-store", "sglang")
def test_greedy_samples_are_equal(cluster: Cluster, show: Show) -> None:
    """Compared with one sample, because vLLM refuses greedy requests with n > 1, which `plain` does not split."""
    answers = []
    for path, prompt in ((COMPLETIONS, {"prompt": PROMPTS[1]}), (CHAT, {"messages": TALKS[1]})):
        body = {**prompt, "max_tokens": 16, **token_ids_option(cluster, path)}
        alone = ask(cluster.single.port, path, **body)
        for stream in (False, True):
            answer = ask(cluster.gateway.port, path, **body, n=3, stream=stream)
            assert answer.choices == dict.fromkeys(range(3), alone.choices[0])
            assert answer.prompt_tokens == alone.prompt_tokens
            answers.append(answer)
    show(summary(answers))


def test_errors_are_those_of_the_engine(cluster: Cluster, show: Show) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "Hi", "max_tokens": 0},
        {"prompt": "Hi", "max_tokens": 5000},
        {"prompt": [5] * 5000},
        {"prompt": "Hi", "stream": True, "temperature": -1},
    ]
    if (
        cluster.stack.family is VLLM
    ):  # SGLang accepts any model, and quotes the request in its error for a missing member
        bodies += [{"model": "nobody", "prompt": "Hi"}, {}]
    statuses = []
    for body in bodies:
        refusals = []
        for program in (cluster.gateway, cluster.single):
            with request(program.port, COMPLETIONS, body) as response:
                refusals.append((response.status, json.loads(response.read())))
        assert refusals[0] == refusals[1], body
        statuses.append(refusals[0][0])
    assert set(statuses) <= {400, 404}
    show(f"statuses {statuses}")


def compare(cluster: Cluster, path: str, bodies: list[dict[str, Any]]) -> str:
    """Ask the gateway and the single engine with each body, assert that the answers are equal, and summarise them."""
    answers = []
    for body in bodies:
        answer = ask(cluster.gateway.port, path, **body)
        assert answer == ask(cluster.single.port, path, **body), body
        answers.append(answer)
    return summary(answers)


def summary(answers: list[Answer]) -> str:
    for answer in answers:
        count = sum(len(choice.token_ids) for choice in answer.choices.values())
        assert count in (answer.completion_tokens, 0)
    choices = sum(len(answer.choices) for answer in answers)
    return f"{choices} answers, {sum(answer.completion_tokens for answer in answers)} tokens"


def token_ids_option(cluster: Cluster, path: str) -> dict[str, bool]:
    """Asks for token ids, except in chats of SGLang, which has none in the stream of a chat."""
    return {"return_token_ids": path != CHAT or cluster.stack.family is VLLM}
