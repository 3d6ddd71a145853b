"""NixlPushConnector beside NixlConnector, and prefillers that are killed before they have sent the KV cache."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from tests.real.answers import COMPLETIONS, ask, request, sent_request
from tests.real.cluster import Cluster, total
from tests.real.engines import Engines
from tests.real.engines import Engines as Pair
from tests.real.programs import Program, endpoints, start_gateway, stop
from tests.real.report import Show
from tests.real.stacks import NIXL
from tests.real.test_kill import Kill

_LENGTHS = (100, 1000, 3000)
_ROUNDS = 15


@contextmanager
def gateway_of(pair: Pair, connector: str, log: Path) -> Iterator[Program]:
    """Start a gateway in front of the first prefiller and the first decoder."""
    words = ("--connector", connector, *endpoints(pair.prefillers[:1], pair.decoders[:1]))
    gateway = start_gateway(next(pair.ports), log, *words)
    try:
        yield gateway
    finally:
        stop([gateway])


def first_token_seconds(gateway: Program, prompt: list[int]) -> float:
    began = time.monotonic()
    with request(gateway.port, COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "stream": True}) as response:
        assert response.readline().startswith(b"data: {")
        seconds = time.monotonic() - began
        response.read()
    return seconds


@pytest.mark.only("push")
@pytest.mark.timeout(2400)
def test_first_tokens_of_push_and_pull_are_compared(cluster: Cluster, tmp_path: Path, show: Show) -> None:
    """A pair of engines with NixlConnector runs beside that with NixlPushConnector. They get prompts alternately."""
    draw = random.Random(1)
    pull = Engines(NIXL, tmp_path)
    try:
        pull.need(1, 1, single=0)
        with (
            gateway_of(cluster.engines, "nixl_push", tmp_path / "push.log") as pushes,
            gateway_of(pull, "vllm_pull", tmp_path / "pull.log") as pulls,
        ):
            seconds: dict[tuple[Program, int], list[float]] = {}
            for turn, length in product(range(_ROUNDS + 1), _LENGTHS):
                for gateway in (pushes, pulls)[:: 1 if turn % 2 else -1]:
                    taken = first_token_seconds(gateway, [draw.randrange(20, 120) for _ in range(length)])
                    if turn:  # the first round opens connections, and the gateway learns the prefiller's engine
                        seconds.setdefault((gateway, length), []).append(taken)
    finally:
        pull.stop()
    rows = []
    for length in _LENGTHS:
        pushed, pulled = seconds[pushes, length], seconds[pulls, length]
        wins = sum(map(float.__lt__, pushed, pulled))
        rows.append(
            f"{length} tokens: push {1000 * median(pushed):.0f} ms (least {1000 * min(pushed):.0f}), pull"
            f" {1000 * median(pulled):.0f} ms ({1000 * min(pulled):.0f}), push first in {wins} of {_ROUNDS}"
        )
    show("TTFT, median: " + "; ".join(rows))


@pytest.mark.only("push")
@pytest.mark.timeout(2400)
def test_prompt_of_a_killed_prefiller_is_answered_or_fails_with_an_error(cluster: Cluster, show: Show) -> None:
    """The prefiller is killed while it computes or sends the prompt. After its restart all is as before."""
    outcomes = []
    for number in range(3):
        prompt = [20 + (number + 7 * place) % 100 for place in range(3000)]
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        with (
            Kill(cluster, 1, cluster.prefillers[0]) as kill,
            sent_request(cluster.gateway.port, COMPLETIONS, body) as connection,
        ):
            kill.on_chunk()
            response = connection.getresponse()
            error = json.load(response).get("error")
            outcomes.append(f"{response.status} {error['code']}" if error else f"{response.status}")
        assert ask(cluster.gateway.port, COMPLETIONS, **body) == ask(cluster.single.port, COMPLETIONS, **body)
    cluster.wait_until_nothing_is_left()
    repeated = total([cluster.gateway], "pdproxy_retries_total", if_none=0)
    show(f"{', '.join(outcomes)}; {repeated:.0f} repeated attempts")
