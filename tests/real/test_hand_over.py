"""Sources of the KV cache of prompts in decoders, and the cleanup after all requests so far."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.answers import COMPLETIONS, ask
from tests.real.by_hand import foreign_kv
from tests.real.cluster import Cluster, total, wait_until
from tests.real.programs import Program
from tests.real.report import Show


def test_decoders_get_prompts_from_the_source_of_the_connector(cluster: Cluster, show: Show) -> None:
    """The prompts are new from their first block on, so that no decoder has any of them in its prefix cache."""
    before = cluster.sources()
    prompts = [f"{cluster.gateway.port} {length} " + "over the lazy dog " * length for length in (1, 5, 20, 60)]
    lengths = [
        ask(cluster.gateway.port, COMPLETIONS, prompt=prompt, max_tokens=4, stream=bool(i % 2)).prompt_tokens
        for i, prompt in enumerate(prompts)
    ]
    expected = sum(map(cluster.stack.transferred, lengths))
    wait_until(lambda: (cluster.sources() - before).total >= sum(lengths), "the decoders have counted the prompts")
    grown = cluster.sources() - before
    # A decoder computes each prompt's last token again to get the first output, and may count it; vLLM 0.32 does not.
    assert expected - len(prompts) <= grown.transferred <= expected
    assert grown.total == sum(lengths)
    show(f"{len(prompts)} prompts: {grown}")


@pytest.mark.only("nixl", "push", "mooncake", "sglang")
def test_decoders_have_computed_hardly_any_prompt_tokens(cluster: Cluster, show: Show) -> None:
    """The counts include all earlier tests with this gateway, and one new prompt."""
    ask(cluster.gateway.port, COMPLETIONS, prompt=f"{cluster.gateway.port} again " + "over the lazy dog " * 20)
    wait_until(lambda: cluster.sources().transferred > 0, "the decoders have counted a prompt")
    sources = cluster.sources()
    assert sources.transferred > 100 * sources.computed
    show(str(sources))


@pytest.mark.only("nixl", "mooncake", "store", "sglang")
def test_decoder_uses_the_kv_cache_that_it_was_given(cluster: Cluster, show: Show) -> None:
    """Without the gateway: a prompt that is given the KV cache of another gets the answer to the other."""

    def tokens(program: Program, prompt: list[int], **members: Any) -> list[int]:
        return ask(program.port, COMPLETIONS, prompt=prompt, max_tokens=24, **members).choices[0].token_ids

    prompt, other = new_prompts(cluster)
    with foreign_kv(cluster, prompt, other) as foreign:
        answer = tokens(cluster.decoders[0], prompt, **foreign.members)
    assert answer == tokens(cluster.single, foreign.seen)
    assert answer != tokens(cluster.single, prompt)
    show(f"{len(answer)} tokens")


@pytest.mark.only("nixl", "mooncake")
def test_prefiller_keeps_blocks_until_a_decoder_has_them(cluster: Cluster, show: Show) -> None:
    """Without the gateway: the measure that the next test expects to be 0 is above 0 while blocks are kept."""
    wait_until(lambda: cluster.kv_in_use() == 0, "no KV cache is in use")
    _, prompt = new_prompts(cluster)
    with foreign_kv(cluster, prompt, prompt) as own:
        wait_until(lambda: cluster.kv_in_use() > 0, "the prefiller keeps blocks")
        usage = cluster.kv_in_use()
        ask(cluster.decoders[0].port, COMPLETIONS, prompt=prompt, max_tokens=4, **own.members)
    wait_until(lambda: cluster.kv_in_use() == 0, "the blocks are free")
    show(f"{usage:.2%} of the cache, then nothing")


def test_engines_keep_no_state_of_any_request(cluster: Cluster, show: Show) -> None:
    ask(cluster.gateway.port, COMPLETIONS, prompt=f"{cluster.gateway.port} leaves nothing", max_tokens=4)
    cluster.wait_until_nothing_is_left()
    if cluster.stack.name == "nixl":
        expired = total(cluster.prefillers, "vllm:nixl_num_kv_expired_reqs_total")
        show(f"{expired:.0f} leases have expired in this run")


def test_gateway_has_logged_no_error(cluster: Cluster, show: Show) -> None:
    lines = [json.loads(line) for line in cluster.gateway.log.read_text().splitlines()]
    assert [line for line in lines if line["level"] not in ("INFO", "DEBUG")] == []
    requests = [line for line in lines if line["logger"] == "proxy.access" and "term" in line]
    repeated = sum(line["attempts"] - line["units"] for line in requests)
    show(f"{len(requests)} requests, {repeated} repeated attempts")


def new_prompts(cluster: Cluster) -> tuple[list[int], list[int]]:
    """Two prompts of 98 tokens that no other test uses, so that no decoder has their beginnings in its prefix cache.

    They depend on the gateway's port only. 98 tokens are three full blocks of 32 and a rest for the decoder to compute.
    """
    tokens = [20 + cluster.gateway.port % 100 + 2 * i for i in range(98)]
    return tokens, tokens[::-1]
