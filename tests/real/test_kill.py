"""Engines that are killed while they work.

There are one prefiller and two decoders. The decoder that writes an answer is killed (`kill -9`) after a random chunk.
Where the engines can continue an answer, the other decoder does, and the client notices nothing. The killed decoder is
started again on its port before the next answer is asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any, Self

import pytest
from openai import APIError, OpenAI

from tests.real.answers import (
    COMPLETIONS,
    TIMEOUT_SECONDS,
    Answer,
    ask,
    assemble,
    assert_seamless,
    difference,
    late_piece,
    request,
)
from tests.real.cluster import Cluster, total, wait_until
from tests.real.programs import HOST, MODEL, Program
from tests.real.report import Show

SEED = 20
TOKENS = 400
MANY_TOKENS = 2500
"""Length of answers with SGLang, which finishes shorter ones before the kill arrives on a busy machine."""
LAST_KILL = 250
"""The latest chunk to kill after: the decoder goes on writing until the kill arrives, and must not finish before."""


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("resuming", "kills"), [("auto", 20), ("completions", 4)], indirect=["resuming"])
def test_no_client_notices_that_a_decoder_was_killed(resuming: Cluster, kills: int, show: Show) -> None:
    show(kill_decoders(resuming, kills))


@pytest.mark.only("push", "mooncake", "store", "mooncake-store", "plain")
def test_another_decoder_continues_after_a_kill(cluster: Cluster, show: Show) -> None:
    show(kill_decoders(cluster, 4))


def kill_decoders(cluster: Cluster, kills: int, make: Callable[[Random, int], dict[str, Any]] | None = None) -> str:
    """Kill a decoder in each answer, compare the answers with the single engine's, and return a summary.

    `kills`: number of answers. `make`: creates the request of each number; None: `random_body`.
    """
    random = Random(SEED)
    before = resume_counts(cluster)
    seams = []
    for number in range(kills):
        body = (make or random_body)(random, number)
        alone = streamed(cluster.single, body)
        if number % 4 > 1:
            body["stop"], alone = stopped(cluster.single, body, alone.choices[0].text)
        resumed = resume_counts(cluster)["resumes"]
        with Kill(cluster, random.randint(1, LAST_KILL)) as kill:
            answer = streamed(cluster.gateway, body, kill.on_chunk)
            assert answer == alone, f"{difference(answer, alone)}: {body} after {kill.chunks} chunks"
            assert resume_counts(cluster)["resumes"] > resumed, "the kill came too late"
            seams.append(kill.seam_seconds())
            print(f"  {number + 1}: {kill.victim.name} after {kill.chunks} chunks, {seams[-1]:.2f} s", flush=True)
        if number % 2:
            # Equally loaded decoders take turns, and a resumed answer has used both: one more request changes the turn.
            streamed(cluster.gateway, {"prompt": "Next", "max_tokens": 1})
    grown = {name: count - before[name] for name, count in resume_counts(cluster).items()}
    assert grown["resume_failures"] == 0
    return (
        f"{kills} of {kills} answers equal; from the kill to the next token {median(seams):.2f} s (median),"
        f" {max(seams):.2f} s (at most); {grown['resumed_tokens'] / grown['resumes']:.0f} tokens computed again (mean)"
    )


@pytest.mark.only("sglang")
@pytest.mark.timeout(3600)
def test_completions_of_sglang_are_resumed_after_a_kill(cluster: Cluster, show: Show) -> None:
    """They are resumed from their token ids, even if the client has not requested these."""
    show(kill_decoders(cluster, 20, random_completion))


@pytest.mark.only("sglang")
@pytest.mark.timeout(3600)
def test_greedy_chats_of_sglang_are_replayed_after_a_kill(cluster: Cluster, show: Show) -> None:
    """Another decoder writes the whole answer, and the client gets the missing part."""
    show(kill_decoders(cluster, 8, random_chat))


@pytest.mark.only("sglang")
def test_rest_of_an_answer_differs_after_a_different_token(cluster: Cluster, show: Show) -> None:
    """This is the negative control, without the gateway: one wrong token at the break would be visible."""
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choice = _completed(cluster.single, {**body, "prompt": "What is decoded here?", "max_tokens": 200})
    ids, prompt = choice["token_ids"], choice["prompt_token_ids"]
    differ = []
    for count in range(20, 180, 20):
        rest = {**body, "max_tokens": len(ids) - count}
        assert _completed(cluster.single, {**rest, "prompt": prompt + ids[:count]})["token_ids"] == ids[count:]
        wrong = [*prompt, *ids[: count - 1], ids[count - 1] ^ 1]
        differ.append(_completed(cluster.single, {**rest, "prompt": wrong})["token_ids"] != ids[count:])
    assert all(differ)
    show(f"{len(differ)} rests equal behind the right token, and {sum(differ)} different behind a wrong one")


def _completed(engine: Program, body: dict[str, Any]) -> Any:
    with request(engine.port, COMPLETIONS, {"model": MODEL, **body}) as response:
        return json.load(response)["choices"][0]


@pytest.mark.only("sglang")
def test_answer_that_cannot_be_resumed_never_looks_complete(cluster: Cluster, show: Show) -> None:
    """SGLang returns no token ids of chats, and a sampled answer cannot be repeated, so the client gets an error."""
    body = {**random_chat(Random(SEED), 0), "temperature": 1}
    with Kill(cluster, 50) as kill, pytest.raises(APIError) as error:
        streamed(cluster.gateway, body, kill.on_chunk)
    body["temperature"] = 0
    assert streamed(cluster.gateway, body) == streamed(cluster.single, body)
    show(f"after {kill.received} of {MANY_TOKENS} tokens: {error.value}")


@pytest.mark.only("push", "nixl", "mooncake", "store", "mooncake-store", "sglang")
def test_killed_prefiller_does_not_interrupt_running_answers(cluster: Cluster, show: Show) -> None:
    """The answer being decoded continues. The next requests use another prefiller, or are refused if there is none."""
    bodies = [{"prompt": f"{cluster.gateway.port} {i}: what is prefilled?", "max_tokens": TOKENS} for i in range(6)]
    bodies = [{**body, "temperature": 0, "extra_body": {"ignore_eos": True}} for body in bodies]
    alone = [streamed(cluster.single, body) for body in bodies]
    first, *others = bodies
    with Kill(cluster, 50, cluster.prefillers[0]) as kill:
        assert streamed(cluster.gateway, first, kill.on_chunk) == alone[0]
        if len(cluster.prefillers) > 1:
            assert [streamed(cluster.gateway, body) for body in others] == alone[1:]
            seen = "served by the other"
        else:
            seen = ", ".join(sorted({error_code_of(cluster.gateway, body) for body in others}))
    assert [streamed(cluster.gateway, body) for body in bodies] == alone
    show(f"{len(others)} requests meanwhile: {seen}")


@pytest.mark.only("mooncake-store")
def test_blocks_lost_with_a_killed_engine_are_recomputed(cluster: Cluster, show: Show) -> None:
    """Blocks in the memory of a killed prefiller are lost, without the gateway.

    Mooncake's master offers them for 10 s. During that time, vLLM 0.32 tries to load them, and then computes them.
    """
    prompts = [f"{cluster.gateway.port} {i} is lost " + "over the lazy dog " * 20 for i in range(8)]
    prefiller, decoder = cluster.prefillers[0], cluster.decoders[0]
    alone = [ask(cluster.single.port, COMPLETIONS, prompt=prompt) for prompt in prompts]
    before = cluster.sources()
    for prompt in prompts:
        ask(prefiller.port, COMPLETIONS, prompt=prompt)
    with Kill(cluster, 1, prefiller) as kill:
        kill.on_chunk()
        assert [ask(decoder.port, COMPLETIONS, prompt=prompt) for prompt in prompts] == alone
        wait_until(lambda: (cluster.sources() - before).total > 0, "the decoder has counted the prompts")
        show(str(cluster.sources() - before))


@pytest.mark.only("push", "mooncake", "store", "mooncake-store", "plain", "sglang")
def test_engines_keep_no_state_after_kills(cluster: Cluster) -> None:
    cluster.wait_until_nothing_is_left()


def error_code_of(program: Program, body: dict[str, Any]) -> str:
    """Return the error code of a rejected request."""
    with pytest.raises(APIError) as error:
        streamed(program, body)
    return f"{error.value.code}"


class Kill:
    """Kills an engine after a number of chunks: the decoder of the answer, unless a `victim` is given.

    Leaving the block starts the engine again, and waits until the gateway uses it.
    """

    def __init__(self, cluster: Cluster, chunks: int, victim: Program | None = None) -> None:
        self.chunks = chunks
        self._cluster = cluster
        self._victim = victim
        self._arrivals: list[float] = []
        """The time at which each chunk arrived."""
        self._killed_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._killed_at:
            self.victim.start()
            self.victim.wait_until_ready("/health")
            wait_until(self._cluster.all_are_up, "the gateway uses the engine again")

    @property
    def victim(self) -> Program:
        assert self._victim
        return self._victim

    @property
    def received(self) -> int:
        return len(self._arrivals)

    def on_chunk(self) -> None:
        self._arrivals.append(time.monotonic())
        if not self._victim:
            self._find_serving()
        if len(self._arrivals) == self.chunks:
            self._killed_at = time.monotonic()
            self.victim.kill()

    def seam_seconds(self) -> float:
        """Return the seconds from the kill to the first chunk of the other decoder, which follows the longest pause."""
        arrivals = [self._killed_at, *self._arrivals[self.chunks :]]
        _, end = max(pairwise(arrivals), key=lambda pause: pause[1] - pause[0])
        return end - self._killed_at

    def _find_serving(self) -> None:
        """Ask the gateway which decoder works; the metrics of engines lag behind."""
        labels = ({"role": "decode", "address": f"{HOST}:{decoder.port}"} for decoder in self._cluster.decoders)
        requests = [total([self._cluster.gateway], "pdproxy_instance_inflight", label) for label in labels]
        ((_, self._victim),) = (pair for pair in zip(requests, self._cluster.decoders, strict=True) if pair[0])


def random_body(random: Random, number: int) -> dict[str, Any]:
    """Return the body of a chat or a completion, in turn, some of them with token ids in the answer."""
    text = f"{number}: a proxy sends the prompt to a prefill engine. " * random.randint(1, 10)
    prompt = {"prompt": text} if number % 2 else {"messages": [{"role": "user", "content": text}]}
    return {
        **prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": number % 3 == 0},
    }


def random_completion(random: Random, number: int) -> dict[str, Any]:
    """Return the body of a completion, some of them with token ids in the answer."""
    text = f"{number}: a proxy sends the prompt to a prefill engine. " * random.randint(1, 10)
    extra = {"ignore_eos": True, "return_token_ids": number % 3 == 0}
    return {"prompt": text, "max_tokens": MANY_TOKENS, "temperature": 0, "extra_body": extra}


def random_chat(random: Random, number: int) -> dict[str, Any]:
    """Return the body of a greedy chat."""
    text = f"{number}: a proxy sends the prompt to a prefill engine. " * random.randint(1, 10)
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": MANY_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}


def stopped(engine: Program, body: dict[str, Any], text: str) -> tuple[str, Answer]:
    """Return a stop string that ends an answer late in this text, and the answer.

    SGLang searches for it in as many of the last tokens as its own tokens, and one more (`tail_str` in
    schedule_batch.py). A random model may spell it in more tokens, and then the answer does not end.
    """
    for percent in range(80, 95, 2):
        stop = late_piece(text, percent / 100)
        answer = streamed(engine, {**body, "stop": stop})
        if answer.choices[0].finish_reason == "stop":
            return stop, answer
    raise AssertionError(f"no stop string ends the answer: {body}")


def streamed(program: Program, body: dict[str, Any], on_chunk: Callable[[], None] = lambda: None) -> Answer:
    """Stream an answer with the OpenAI SDK, whose own retries are off."""
    chunks = []
    with OpenAI(
        base_url=f"http://{HOST}:{program.port}/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0
    ) as client:
        api: Any = client.chat.completions if "messages" in body else client.completions
        with api.create(model=MODEL, stream=True, stream_options={"include_usage": True}, **body) as stream:
            for chunk in stream:
                chunks.append(chunk.to_dict())
                on_chunk()
    assert_seamless(chunks)
    return assemble(chunks)


def resume_counts(cluster: Cluster) -> dict[str, float]:
    names = ("resumes", "resumed_tokens", "resume_failures")
    return {name: total([cluster.gateway], f"pdproxy_{name}_total") for name in names}
