"""The OpenAI SDK and `vllm bench serve` work with the gateway, and clients that leave free the engines."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.real.answers import CHAT, COMPLETIONS, TIMEOUT_SECONDS, ask, events, request, sent_request
from tests.real.cluster import Cluster, total, wait_until
from tests.real.programs import HOST, MODEL
from tests.real.report import Show


def test_openai_sdk_streams(cluster: Cluster, show: Show) -> None:
    messages: list[Any] = [{"role": "user", "content": "A proxy sends the prompt to a prefill engine."}]
    with OpenAI(
        base_url=f"http://{HOST}:{cluster.gateway.port}/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        with client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=32, temperature=0, stream=True
        ) as stream:
            choices = [choice for chunk in stream for choice in chunk.choices]
    alone = ask(cluster.single.port, CHAT, messages=messages, max_tokens=32)
    assert "".join(choice.delta.content or "" for choice in choices) == alone.choices[0].text
    assert choices[-1].finish_reason == alone.choices[0].finish_reason
    show(f"{len(choices)} chunks")


def test_vllm_bench_serve_has_no_failed_request(cluster: Cluster, tmp_path: Path, show: Show) -> None:
    options = {
        "--backend": "openai",
        "--base-url": f"http://{HOST}:{cluster.gateway.port}",
        "--endpoint": COMPLETIONS,
        "--model": MODEL,
        "--tokenizer": cluster.engines.model,
        "--dataset-name": "random",
        "--random-input-len": 100,
        "--random-output-len": 16,
        "--num-prompts": 60,
        "--max-concurrency": 8,
        "--result-dir": tmp_path,
        "--result-filename": "result.json",
    }
    words = [word for option in options.items() for word in option]
    cluster.engines.run(
        ["-m", "vllm.entrypoints.cli.main", "bench", "serve", "--ignore-eos", "--disable-tqdm", "--save-result", *words]
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (60, 0)
    assert result["total_output_tokens"] == 60 * 16
    show(
        "{completed} completed, {failed} failed, {total_input_tokens} tokens in, {total_output_tokens} out".format_map(
            result
        )
    )


def test_all_engines_take_part(cluster: Cluster, show: Show) -> None:
    engines = [*cluster.prefillers, *cluster.decoders]
    family = cluster.stack.family
    names = [family.prompt_tokens] * len(cluster.prefillers) + [family.generation_tokens] * len(cluster.decoders)

    def counts() -> list[int]:
        return [int(total([engine], name, if_none=0)) for engine, name in zip(engines, names, strict=True)]

    before = counts()
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda i: ask(cluster.gateway.port, COMPLETIONS, prompt=f"{i} takes part"), range(12)))
    grown = [after - count for after, count in zip(counts(), before, strict=True)]
    assert all(grown)
    show(", ".join(f"{engine.name} {tokens} tokens" for engine, tokens in zip(engines, grown, strict=True)))


def test_leaving_client_frees_the_decoder(cluster: Cluster, show: Show) -> None:
    def written() -> float:
        return total(cluster.decoders, cluster.stack.family.generation_tokens, if_none=0)

    before = written()
    body = {"prompt": "Tell me everything", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with request(cluster.gateway.port, COMPLETIONS, body) as response:
        assert len(list(islice(events(response), 5))) == 5
        wait_until(lambda: cluster.running_requests() == 1, "the decoder counts the request as running")
    seconds = wait_until(lambda: cluster.running_requests() == 0, "the decoder has nothing to do any more")
    assert written() - before < 4000
    show(f"after {seconds:.1f} s and {written() - before:.0f} of 4000 tokens")


def test_clients_that_leave_at_any_time_leave_nothing_behind(cluster: Cluster, show: Show) -> None:
    """Clients leave right after sending a long prompt, while an engine works on it, or after the first event."""
    body = {"max_tokens": 2000, "ignore_eos": True}
    for number in range(12):
        prompt = f"{cluster.gateway.port} {number} " + "over the lazy dog " * 200
        with sent_request(
            cluster.gateway.port, COMPLETIONS, {**body, "prompt": prompt, "stream": number % 2 == 1}
        ) as leaving:
            if number % 3 == 1:
                wait_until(lambda: cluster.running_requests() > 0, "an engine works on it")
            elif number == 5:
                next(events(leaving.getresponse()))
    cluster.wait_until_nothing_is_left()
    lines = [json.loads(line) for line in cluster.gateway.log.read_text().splitlines()]
    ends = Counter(line["term"] for line in lines if line.get("term", "").startswith("C"))
    show(", ".join(f"{term} {count}" for term, count in sorted(ends.items())))
