"""Prefillers that read the KV cache of the previous answer from its decoder."""

from __future__ import annotations

import pytest

from tests.real.answers import COMPLETIONS, ask, request
from tests.real.cluster import Cluster, count_sources, total, wait_until
from tests.real.report import Show

_READS = 3
_MAX_TURNS = 20


@pytest.mark.only("read-back")
def test_next_turn_reads_the_kv_cache_of_the_previous_answer(cluster: Cluster, show: Show) -> None:
    """Turns go to the two prefillers alternately, so that the other one has the previous prompt in its cache.

    VLLM 0.32 names the cache in whole answers only, and the gateway streams longer ones. The gateway has asked for the
    engines' options before, and their first answer takes seconds.
    """
    for program in (*cluster.prefillers, *cluster.decoders):
        with request(program.port, "/server_info?config_format=json") as response:
            response.read()
    before = count_sources(cluster.stack, [], cluster.prefillers)
    prompt = [20 + cluster.gateway.port % 100 + 2 * number for number in range(150)]
    turns = read = 0
    while read < _READS and turns < _MAX_TURNS:
        turns += 1
        answer = ask(cluster.gateway.port, COMPLETIONS, prompt=prompt, max_tokens=24, ignore_eos=True)
        expected = ask(cluster.single.port, COMPLETIONS, prompt=prompt, max_tokens=24, ignore_eos=True)
        assert answer.choices[0].token_ids == expected.choices[0].token_ids
        prompt = [*prompt, *answer.choices[0].token_ids, *range(40, 50)]
        read = int(total([cluster.gateway], "pdproxy_read_backs_total", {"result": "read"}))
    assert read == _READS
    assert total([cluster.gateway], "pdproxy_read_backs_total", {"result": "failed"}) == 0
    wait_until(
        lambda: (count_sources(cluster.stack, [], cluster.prefillers) - before).transferred > 0,
        "the prefillers have counted the cache of a decoder",
    )
    grown = count_sources(cluster.stack, [], cluster.prefillers) - before
    show(f"{turns} turns, {read} caches read: prefillers: {grown}")
