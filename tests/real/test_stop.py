"""Engines that are stopped while they work, as Kubernetes and systemd do it: by SIGTERM, and without notice.

There are one prefiller and two decoders. Twenty answers are under way, streamed and whole, chats and completions, when
one decoder has written a fifth of its answers and gets the signal. Those that it works on must be continued by the
other one, and equal the single engine's.
Each decoder is stopped once, so that about twenty answers are interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.real.answers import CHAT, COMPLETIONS, Answer, ask, assemble, assert_seamless, difference, events, request
from tests.real.cluster import Cluster, total, wait_until
from tests.real.programs import Program
from tests.real.report import Show

ANSWERS = 20
TOKENS = 1500
WRITTEN = 300
"""Average number of tokens of each answer that the decoder has generated when it is stopped."""


def stop_server(program: Program) -> None:
    """Stop the API server, which then stops its engine core. vLLM may leave its answers open without a word."""
    program.terminate()


def stop_core(program: Program) -> None:
    """Stop the engine core alone, which then ends its answers with `abort`."""
    os.kill(program.child("EngineCore"), signal.SIGTERM)


def kill_core(program: Program) -> None:
    """Kill the engine core: the API server ends its answers with an error."""
    os.kill(program.child("EngineCore"), signal.SIGKILL)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("stop", [stop_server, stop_core, kill_core])
@pytest.mark.parametrize("resuming", ["auto"], indirect=True)
def test_answers_of_a_stopped_decoder_are_continued(
    resuming: Cluster, show: Show, stop: Callable[[Program], None]
) -> None:
    cluster = resuming
    bodies = [body(number) for number in range(ANSWERS)]
    alone = [ask(cluster.single.port, path, **fields) for path, fields in bodies]
    seen = []
    for victim in cluster.decoders:
        try:
            seen.append(interrupt(cluster, victim, stop, bodies, alone))
            print(f"  {victim.name}: {seen[-1]}", flush=True)
        finally:
            victim.kill()
            victim.start()
            victim.wait_until_ready("/health")
            wait_until(lambda: is_used_again(cluster), "the gateway uses the engine again")
    show(f"{len(seen)} x {ANSWERS} answers equal; {'; '.join(seen)}")


def interrupt(
    cluster: Cluster,
    victim: Program,
    stop: Callable[[Program], None],
    bodies: list[tuple[str, dict[str, Any]]],
    alone: list[Answer],
) -> str:
    """Ask for all answers at once, stop a decoder in the middle of its answers, and compare. Return a summary."""
    before, times = resumes(cluster), [list[float]() for _ in bodies]
    tokens = written(cluster, victim)
    with ThreadPoolExecutor(len(bodies)) as pool:
        asking = [
            pool.submit(timed, cluster.gateway.port, path, fields, arrivals)
            for (path, fields), arrivals in zip(bodies, times, strict=True)
        ]
        wait_until(
            lambda: written(cluster, victim) - tokens >= WRITTEN * max(1, running(cluster, victim)),
            "the decoder is in the middle of its answers",
        )
        stop(victim)
        stopped_at = time.monotonic()
        answers = [task.result() for task in asking]
    wrong = {
        number: difference(answer, alone[number]) for number, answer in enumerate(answers) if answer != alone[number]
    }
    assert not wrong
    resumed = resumes(cluster) - before
    assert resumed, "the signal came too late"
    streams = [arrivals for (_, fields), arrivals in zip(bodies, times, strict=True) if fields["stream"]]
    gaps = [later - earlier for arrivals in streams for earlier, later in pairwise(arrivals) if later > stopped_at]
    return f"{resumed:.0f} resumed, longest gap {max(gaps):.2f} s"


def is_used_again(cluster: Cluster) -> bool:
    """Return whether the gateway uses all engines, after one request for an engine that failed many answers."""
    if cluster.all_are_up():
        return True
    ask(cluster.gateway.port, COMPLETIONS, prompt="Next", max_tokens=2)
    return False


def body(number: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request: a chat or a completion, streamed or not, in turn."""
    text = f"{number}: a proxy sends the prompt to a prefill engine. " * (1 + number % 5)
    prompt = {"prompt": text} if number % 2 else {"messages": [{"role": "user", "content": text}]}
    path = COMPLETIONS if number % 2 else CHAT
    return path, {**prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": number % 4 < 2}


def timed(port: int, path: str, fields: dict[str, Any], arrivals: list[float]) -> Answer:
    """Return the answer to a request like `ask`, and note the arrival of each chunk."""
    if not fields["stream"]:
        return ask(port, path, **fields)
    request_body = {"temperature": 0, "return_token_ids": True, **fields, "stream_options": {"include_usage": True}}
    with request(port, path, request_body) as response:
        assert response.status == 200, json.dumps(fields)
        chunks = []
        for chunk in events(response):
            chunks.append(chunk)
            arrivals.append(time.monotonic())
    assert_seamless(chunks)
    return assemble(chunks)


def written(cluster: Cluster, decoder: Program) -> float:
    """Return the tokens that an engine has generated since it was started."""
    return total([decoder], cluster.stack.family.generation_tokens, if_none=0)


def running(cluster: Cluster, decoder: Program) -> float:
    """Return the number of answers that an engine is generating."""
    return total([decoder], cluster.stack.family.request_gauges[0], if_none=0)


def resumes(cluster: Cluster) -> float:
    return total([cluster.gateway], "pdproxy_resumes_total")
