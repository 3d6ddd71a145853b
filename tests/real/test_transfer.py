"""Where the decoders' KV cache came from, and that nothing is left of any request, of the tests before included."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.real.answers import COMPLETIONS, ask, request
from tests.real.cluster import total, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.cluster import Cluster

    Show = Callable[[str], None]

TRANSFERRED = "external_kv_transfer"
COMPUTED = "local_compute"
CACHED = "local_cache_hit"


def test_decoders_get_every_prompt_by_transfer(cluster: Cluster, show: Show) -> None:
    """No part of these prompts was seen before, or a decoder would have it in its prefix cache."""
    before = {source: cluster.prompt_tokens(source) for source in (TRANSFERRED, COMPUTED, CACHED)}
    prompts = [f"{cluster.gateway.port} {length} " + "over the lazy dog " * length for length in (1, 5, 20, 60)]
    tokens = sum(
        ask(cluster.gateway.port, COMPLETIONS, prompt=prompt, max_tokens=4, stream=bool(i % 2)).prompt_tokens
        for i, prompt in enumerate(prompts)
    )

    def grown(source: str) -> int:
        return cluster.prompt_tokens(source) - before[source]

    # Every prompt's last token is computed again for its first output; vLLM 0.32 does not count that.
    wait_until(lambda: sum(map(grown, before)) == tokens, "the decoders have counted the prompts")
    assert grown(COMPUTED) <= len(prompts)
    assert grown(TRANSFERRED) == tokens - grown(COMPUTED)
    show(f"{len(prompts)} prompts, {tokens} tokens: {grown(TRANSFERRED)} transferred, {grown(COMPUTED)} computed")


def test_decoders_have_computed_no_prompt_of_this_run(cluster: Cluster, show: Show) -> None:
    sources = {source: cluster.prompt_tokens(source) for source in (TRANSFERRED, COMPUTED, CACHED)}
    prompts = total(cluster.decoders, "vllm:request_prompt_tokens_count")
    assert sources[COMPUTED] <= prompts
    assert sources[TRANSFERRED] > 100 * sources[COMPUTED]
    show(f"{prompts:.0f} prompts: " + ", ".join(f"{source} {tokens}" for source, tokens in sources.items()))


def test_a_prefiller_pins_blocks_until_a_decoder_has_them(cluster: Cluster, show: Show) -> None:
    """Without the gateway: shows that the number which the next test wants to be 0 is another one meanwhile."""
    prefiller, decoder = cluster.prefillers[0], cluster.decoders[0]
    wait_until(lambda: pinned(cluster) == 0, "nothing is pinned")
    prompt = {"prompt": f"{cluster.gateway.port} is pinned " * 20, "temperature": 0}
    leg = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    params = post(prefiller.port, {**prompt, **leg})["kv_transfer_params"]
    wait_until(lambda: pinned(cluster) > 0, "blocks are pinned")
    usage = pinned(cluster)
    post(decoder.port, {**prompt, "max_tokens": 4, "kv_transfer_params": params})
    wait_until(lambda: pinned(cluster) == 0, "the blocks are free")
    show(f"{usage:.2%} of the cache, then nothing")


def test_nothing_stays_pinned_on_the_prefillers(cluster: Cluster, show: Show) -> None:
    ask(cluster.gateway.port, COMPLETIONS, prompt=f"{cluster.gateway.port} leaves nothing", max_tokens=4)
    wait_until(lambda: pinned(cluster) == 0, "the blocks are free")
    expired = total(cluster.prefillers, "vllm:nixl_num_kv_expired_reqs_total")
    show(f"{expired:.0f} leases have expired in this run")


def test_the_gateway_holds_no_load(cluster: Cluster) -> None:
    def held() -> float:
        names = ("pdproxy_instance_inflight", "pdproxy_instance_load_tokens", "pdproxy_inflight_requests")
        return sum(total([cluster.gateway], name) for name in names)

    wait_until(lambda: held() == 0, "the gateway holds nothing")


def test_the_gateway_has_logged_no_error(cluster: Cluster, show: Show) -> None:
    lines = [json.loads(line) for line in cluster.gateway.log.read_text().splitlines()]
    assert [line for line in lines if line["level"] not in ("INFO", "DEBUG")] == []
    requests = [line for line in lines if line["logger"] == "proxy.access" and "term" in line]
    repeated = sum(line["attempts"] - line["units"] for line in requests)
    show(f"{len(requests)} requests, {repeated} repeated attempts")


def pinned(cluster: Cluster) -> float:
    """Blocks in use on the prefillers, as parts of their caches. They are idle, so these are kept for a decoder."""
    return total(cluster.prefillers, "vllm:kv_cache_usage_perc")


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    with request(port, COMPLETIONS, body) as response:
        answer: dict[str, Any] = json.load(response)
        assert response.status == 200, answer
        return answer
