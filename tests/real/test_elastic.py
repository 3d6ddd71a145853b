"""Engines exchange their roles while clients are served, and their answers equal those of a single engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from threading import Event
from typing import Any

import pytest

from tests.real.answers import COMPLETIONS, Answer, ask, difference, request
from tests.real.cluster import Cluster, total, wait_until
from tests.real.programs import HOST
from tests.real.report import Show

MOVES = 10
CLIENTS = 6
TOKENS = 600


def body_of(number: int) -> dict[str, Any]:
    """Return a request whose prompt fills some blocks of KV cache."""
    prompt = f"Story {number}. " + "Once upon a time there was a gateway. " * (2 + number % 5)
    return {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": bool(number % 2)}


def role_of(cluster: Cluster, port: int) -> str | None:
    """Return the role in which an instance gets requests, or None."""
    with request(cluster.gateway.port, "/instances") as response:
        told = json.load(response)["instances"]
    (mine,) = [one for one in told if one["address"] == f"{HOST}:{port}"]
    is_serving = mine["states"] == {"up": 1} and mine["elastic"]["moves_to"] is None
    return str(mine["role"]) if is_serving else None


@pytest.mark.timeout(2400)
def test_answers_are_equal_during_ten_moves(elastic: Cluster, show: Show) -> None:
    """The second decoder prefills and decodes in turn, and then the prefiller decodes."""
    is_over = Event()
    numbers = iter(range(10_000))
    answers: dict[int, Answer] = {}

    def client() -> None:
        while not is_over.is_set():
            number = next(numbers)
            answers[number] = ask(elastic.gateway.port, COMPLETIONS, **body_of(number))

    mover = elastic.decoders[1]
    moved = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            for role in islice(cycle(("prefill", "decode")), MOVES):
                count = len(answers)
                order = {"role": role, "instances": f"{HOST}:{mover.port}", "evacuate_after": 0}
                with request(elastic.gateway.port, "/instances/role", order) as response:
                    assert response.status == 200, response.read()
                wait_until(lambda role=role: role_of(elastic, mover.port) == role, f"{mover.name} has the role {role}")
                moved += 1
                wait_until(lambda count=count: len(answers) >= count + CLIENTS, "answers with the new roles")
        finally:
            is_over.set()
        for each in clients:
            each.result()
    for number, answer in answers.items():
        alone = ask(elastic.single.port, COMPLETIONS, **body_of(number))
        assert answer == alone, f"request {number}: {difference(answer, alone)}"
    elastic.wait_until_nothing_is_left()
    resumed = total([elastic.gateway], "pdproxy_resumes_total", if_none=0)
    both = [*elastic.prefillers, *elastic.decoders]
    transferred = total(both, "vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}, if_none=0)
    assert transferred > 0
    show(
        f"{moved} moves, {len(answers)} of {len(answers)} answers equal, {resumed:.0f} resumed, "
        f"{transferred:.0f} prompt tokens transferred"
    )
