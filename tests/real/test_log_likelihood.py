"""Log probabilities of prompts equal those of a single engine, and only prefillers are asked for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.answers import CHAT, COMPLETIONS, ask, nearly_equal, request
from tests.real.cluster import Cluster, total
from tests.real.report import Show
from tests.real.test_answers import PROMPTS

TOLD = ("input_token_logprobs", "output_token_logprobs", "prompt_tokens", "completion_tokens")
ECHOED: list[dict[str, Any]] = [
    *({"prompt": prompt, "max_tokens": 1, "logprobs": 1} for prompt in PROMPTS),
    {"prompt": PROMPTS[3], "max_tokens": 0, "logprobs": 0},
    {"prompt": [list(range(50, 90)), list(range(60, 140)), [30]], "max_tokens": 1, "logprobs": 1},
]


@pytest.mark.only("nixl", "mooncake", "store", "plain", "sglang")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_echoed_prompts_equal_those_of_a_single_engine(
    cluster: Cluster, show: Show, stream: bool
) -> None:
    before = decoder_prompt_tokens(cluster)
    tokens = 0
    is_sglang = cluster.stack.name == "sglang"
    for body in ECHOED:
        if is_sglang and (body["max_tokens"] == 0 or (stream and isinstance(body["prompt"][0], list))):
            continue  # it refuses max_tokens 0, and streams each answer of a list under its own id
        body = {**body, "echo": True, "stream": stream}
        answer, expected = (ask(program.port, COMPLETIONS, **body) for program in (cluster.gateway, cluster.single))
        assert answer == expected, body
        for index, choice in answer.choices.items():
            assert nearly_equal(choice.logprobs, expected.choices[index].logprobs), body
            assert None not in [token["token_logprobs"] for token in choice.logprobs[1:]]
            tokens += len(choice.logprobs)
    assert_only_prefillers_were_asked(cluster, before)
    show(f"{tokens} log probabilities")


@pytest.mark.only("nixl", "mooncake", "store", "plain")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completion"])
def test_prompt_logprobs_equal_those_of_a_single_engine(cluster: Cluster, show: Show, path: str) -> None:
    before = decoder_prompt_tokens(cluster)
    prompt = {"messages": [{"role": "user", "content": PROMPTS[3]}]} if path == CHAT else {"prompt": PROMPTS[3]}
    answers = []
    for program in (cluster.gateway, cluster.single):
        with request(program.port, path, {**prompt, "max_tokens": 1, "prompt_logprobs": 2}) as response:
            answer = json.load(response)
            assert response.status == 200, answer
            answers.append((answer if path == CHAT else answer["choices"][0])["prompt_logprobs"])
    assert nearly_equal(*answers)
    assert None not in answers[0][1:]
    assert_only_prefillers_were_asked(cluster, before)
    show(f"{len(answers[0])} log probabilities")


@pytest.mark.only("sglang")
@pytest.mark.parametrize("new_tokens", [0, 1])
def test_input_logprobs_of_generate_equal_those_of_a_single_engine(
    cluster: Cluster, show: Show, new_tokens: int
) -> None:
    before = decoder_prompt_tokens(cluster)
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
    assert nearly_equal(*answers)
    assert_only_prefillers_were_asked(cluster, before)
    show(f"{sum(len(item['input_token_logprobs']) for item in answers[0])} log probabilities")


def decoder_prompt_tokens(cluster: Cluster) -> float:
    """Return the decoders' count of prompt tokens."""
    return total(cluster.decoders, cluster.stack.family.prompt_tokens, if_none=0)


def assert_only_prefillers_were_asked(cluster: Cluster, before: float) -> None:
    """No decoder got a prompt since `before`, unless there are no prefillers; and nothing is left."""
    assert (decoder_prompt_tokens(cluster) > before) == (not cluster.prefillers)
    cluster.wait_until_nothing_is_left()
