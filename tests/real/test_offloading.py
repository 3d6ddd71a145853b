"""Prefillers that keep blocks in host memory when these leave the device (vLLM's OffloadingConnector)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.answers import COMPLETIONS, ask
from tests.real.cluster import Cluster, total, wait_until
from tests.real.kv_event_listener import count_media
from tests.real.report import Show
from tests.real.stacks import events_port

_TOKENS = 900
_PROMPTS = 8
"""Their 7,200 tokens fit into the host tier, but not into the device's cache."""
_MANY = 40
"""A number of prompts whose tokens do not fit into the host tier."""
_ROUNDS = 2
_SOURCES = ("device", "host", "external_unspecified")


def prompt(number: int) -> list[int]:
    return [20 + (number * 31 + place * (7 + number)) % 100 for place in range(_TOKENS)]


def cached_by_source(cluster: Cluster) -> dict[str, int]:
    """Return the prompt tokens that the prefiller found in each tier since it started."""
    name = "vllm:prompt_tokens_cached_by_source_total"
    return {source: int(total(cluster.prefillers, name, {"source": source}, if_none=0)) for source in _SOURCES}


def ask_all(cluster: Cluster, numbers: range) -> list[Any]:
    return [ask(cluster.gateway.port, COMPLETIONS, prompt=prompt(number), max_tokens=4) for number in numbers]


@pytest.mark.only("offload")
def test_prompts_that_left_the_device_are_found_in_host_memory(cluster: Cluster, show: Show) -> None:
    numbers = range(_PROMPTS)
    expected = [ask(cluster.single.port, COMPLETIONS, prompt=prompt(number), max_tokens=4) for number in numbers]
    with count_media(events_port(cluster.prefillers[0].port)) as media:
        before = cached_by_source(cluster)
        assert ask_all(cluster, numbers) == expected
        first = cached_by_source(cluster)
        assert ask_all(cluster, numbers) == expected
        wait_until(lambda: cached_by_source(cluster)["host"] > first["host"], "hits in host memory are counted")
        grown = {source: tokens - first[source] for source, tokens in cached_by_source(cluster).items()}
        wait_until(lambda: media.get(("BlockStored", "CPU"), 0) > 0, "an event names the host tier")
    assert first == before
    assert grown["host"] > grown["device"]
    events = ", ".join(f"{count} {kind} {medium}" for (kind, medium), count in sorted(media.items()))
    show(f"cached tokens of {_PROMPTS} prompts by source: {grown}; blocks in KV events: {events}")


@pytest.mark.only("offload")
def test_gateway_learns_the_reach_of_the_host_tier(cluster: Cluster, show: Show) -> None:
    """A prompt that left the device is predicted to be cached, and one that left the host tier is not.

    Events and answers race, so more prompts follow until the prediction about the older prompt is right.
    """
    cluster.wait_until_nothing_is_left()
    for first in range(20, 20 + _ROUNDS * _MANY, _MANY):
        ask_all(cluster, range(first, first + _MANY))
        newer, older = predictions(cluster, first + _MANY - 10), predictions(cluster, first)
        if older[0] == 0:
            break
    assert newer[0] > _TOKENS // 2
    assert newer[1] > _TOKENS // 2
    assert older == (0, 0)
    events = total([cluster.gateway], "pdproxy_kv_events_total")
    show(
        f"predicted and found tokens of {_TOKENS}, after {first + _MANY - 20} prompts and {events:.0f} events:"
        f" {newer[0]} and {newer[1]} ten prompts ago, {older[0]} and {older[1]} {_MANY} prompts ago"
    )


def predictions(cluster: Cluster, number: int) -> tuple[int, int]:
    """Ask for a prompt again. Return its predicted and its actual cached tokens, from the access log.

    The number of output tokens tells its line from those of other prompts.
    """
    tokens = 10 + len(answers_of(cluster))
    ask(cluster.gateway.port, COMPLETIONS, prompt=prompt(number), max_tokens=tokens, ignore_eos=True)
    wait_until(lambda: tokens in answers_of(cluster), "the answer is logged")
    fields = answers_of(cluster)[tokens]
    return round(fields["p_cached"]), fields["tokens_cached"]


def answers_of(cluster: Cluster) -> dict[int, dict[str, Any]]:
    """Return the lines of the access log, the last one for each number of output tokens."""
    lines = [json.loads(line) for line in cluster.gateway.log.read_text().splitlines() if "p_cached" in line]
    return {line["tokens_out"]: line for line in lines}
