"""Embeddings, scores, classes and rankings, as vLLM serves them."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from proxy.api.passthrough import ROUTES
from proxy.sim.engine import SimulatedEngine
from tests.conftest import Deploy
from tests.sim.conftest import Client

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["one", "two"]},
    "/pooling": {"input": ["one", "two"]},
    "/classify": {"input": ["one", "two"]},
    "/score": {"text_1": "one", "text_2": ["two", "three"]},
    "/v1/score": {"queries": ["one", "two"], "documents": ["two", "three"]},
    "/rerank": {"query": "one", "documents": ["two", {"text": "three"}, "four"], "top_n": 2},
}
BODIES |= dict.fromkeys(("/v1/rerank", "/v2/rerank"), BODIES["/rerank"])


async def test_embeddings_are_the_same_every_time(client: Client, engine: SimulatedEngine) -> None:
    _, first = await client.post(engine, "/v1/embeddings", {"model": "sim", "input": ["one", "two"]})
    _, second = await client.post(engine, "/v1/embeddings", {"model": "sim", "input": "one"})
    assert first["data"][0]["embedding"] == second["data"][0]["embedding"]
    assert first["data"][0]["embedding"] != first["data"][1]["embedding"]


@pytest.mark.parametrize("profile_name", ["v0.33", "sglang"])
async def test_embeddings_as_base64_are_the_same_numbers(client: Client, profile_name: str) -> None:
    """Openai's clients ask for nothing else, unless they are told to."""
    body = {"input": "one"}
    async with SimulatedEngine(profile_name=profile_name) as engine:
        _, plain = await client.post(engine, "/v1/embeddings", body)
        _, coded = await client.post(engine, "/v1/embeddings", body | {"encoding_format": "base64"})
    numbers = plain["data"][0]["embedding"]
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert struct.unpack(f"<{len(numbers)}f", raw) == pytest.approx(numbers)


async def test_pairs_are_scored_and_rankings_begin_with_the_best(client: Client, engine: SimulatedEngine) -> None:
    _, scored = await client.post(engine, "/score", BODIES["/score"])
    assert [(item["object"], item["index"]) for item in scored["data"]] == [("score", 0), ("score", 1)]
    assert len({item["score"] for item in scored["data"]}) == 2
    _, ranked = await client.post(engine, "/rerank", {"query": "one", "documents": ["two", "three"]})
    told = {result["document"]["text"]: result["relevance_score"] for result in ranked["results"]}
    assert list(told.values()) == sorted(told.values(), reverse=True)
    assert [told["two"], told["three"]] == [item["score"] for item in scored["data"]]
    _, classified = await client.post(engine, "/classify", {"input": "one"})
    (only,) = classified["data"]
    assert (sum(only["probs"]), only["num_classes"]) == (pytest.approx(1), len(only["probs"]))


REFUSED = [
    *("/v1/embeddings", {"input": None}),
    *("/v1/embeddings", {"input": "a", "encoding_format": "roman"}),
    *("/score", {"text_1": "a"}),
    *("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
    *("/rerank", {"query": "a", "documents": []}),
]


@pytest.mark.parametrize(("path", "body"), list(zip(REFUSED[::2], REFUSED[1::2], strict=True)), ids=str)
async def test_invalid_pooling_requests_are_refused(
    client: Client, engine: SimulatedEngine, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(engine, path, body))[0] == 400
    assert (await client.post(engine, "/pooling", {"input": "a", "model": "another"}))[0] == 404


@pytest.mark.parametrize("path", [path for _, path in ROUTES["pooling"]])
async def test_gateway_passes_all_of_them_through(deploy: Deploy, path: str) -> None:
    gateway = await deploy()
    (prefiller,) = gateway.prefillers
    async with gateway.session.post(gateway.url + path, json=BODIES[path], headers={"X-Request-Id": "a"}) as response:
        answer = await response.json()
        assert response.status == 200
    assert answer["usage"]["total_tokens"] > 0
    assert len(answer.get("data") or answer["results"]) == 2
    assert [seen.path for seen in prefiller.requests if seen.method == "POST"] == [path]
