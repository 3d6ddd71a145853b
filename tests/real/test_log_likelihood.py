"""Log probabilities of prompts are those of one ordinary engine, and only a prefiller is asked for them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.real.answers import CHAT, COMPLETIONS, ask, nearly, request
from tests.real.cluster import total
from tests.real.test_answers import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.cluster import Cluster

    Show = Callable[[str], None]

TOLD = ("input_token_logprobs", "output_token_logprobs", "prompt_tokens", "completion_tokens")
ECHOED: list[dict[str, Any]] = [
    *({"prompt": prompt, "max_tokens": 1, "logprobs": 1} for prompt in PROMPTS),
    {"prompt": PROMPTS[3], "max_tokens": 0, "logprobs": 0},
    {"prompt": [list(range(50, 90)), list(range(60, 140)), [30]], "max_tokens": 1, "logprobs": 1},
]


@pytest.mark.only("nixl", "mooncake", "store", "plain", "sglang")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echoed_prompts(cluster: Cluster, show: Show, stream: bool) -> None:
    before = decoded(cluster)
    tokens = 0
    is_sglang = cluster.stack.name == "sglang"
    for body in ECHOED:
        if is_sglang and (body["max_tokens"] == 0 or (stream and isinstance(body["prompt"][0], list))):
            continue  # it refuses the one, and names each answer of the other by an id of its own
        body = {**body, "echo": True, "stream": stream}
        answer, expected = (ask(program.port, COMPLETIONS, **body) for program in (cluster.gateway, cluster.single))
        assert answer == expected, body
        for index, choice in answer.choices.items():
            assert nearly(choice.logprobs, expected.choices[index].logprobs), body
            assert None not in [token["token_logprobs"] for token in choice.logprobs[1:]]
            tokens += len(choice.logprobs)
    asked_decoders(cluster, before)
    show(f"{tokens} log probabilities")


@pytest.mark.only("nixl", "mooncake", "store", "plain")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completion"])
def test_prompt_logprobs(cluster: Cluster, show: Show, path: str) -> None:
    before = decoded(cluster)
    prompt = {"messages": [{"role": "user", "content": PROMPTS[3]}]} if path == CHAT else {"prompt": PROMPTS[3]}
    answers = []
    for program in (cluster.gateway, cluster.single):
        with request(program.port, path, {**prompt, "max_tokens": 1, "prompt_logprobs": 2}) as response:
            answer = json.load(response)
            assert response.status == 200, answer
            answers.append((answer if path == CHAT else answer["choices"][0])["prompt_logprobs"])
    assert nearly(*answers)
    assert None not in answers[0][1:]
    asked_decoders(cluster, before)
    show(f"{len(answers[0])} log probabilities")


@pytest.mark.only("sglang")
@pytest.mark.parametrize("new_tokens", [0, 1])
def test_input_logprobs_of_sglangs_own_api(cluster: Cluster, show: Show, new_tokens: int) -> None:
    before = decoded(cluster)
    body: dict[str, Any] = {"input_ids": [list(range(20, 120)), list(range(30, 90))], "return_logprob": True}
    body |= {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}}
    answers = []
    for program in (cluster.gateway, cluster.single):
        with request(program.port, "/generate", body) as response:
            answer = json.load(response)
            assert response.status == 200, answer
            answers.append(
                [{name: item["meta_info"][name] for name in TOLD} | {"text": item["text"]} for item in answer]
            )
    assert nearly(*answers)
    asked_decoders(cluster, before)
    show(f"{sum(len(item['input_token_logprobs']) for item in answers[0])} log probabilities")


def decoded(cluster: Cluster) -> float:
    """Tokens that the decoders have had as prompts."""
    return total(cluster.decoders, cluster.stack.family.prompted, if_none=0)


def asked_decoders(cluster: Cluster, before: float) -> None:
    """None, if there are prefillers."""
    assert (decoded(cluster) > before) == (not cluster.prefillers)
    cluster.nothing_is_left()
