"""Simulates embeddings, scores, classes and rankings. The values are made up, but equal texts always get equal values.

The bodies follow vLLM `entrypoints/pooling/`: embed, pooling, classify and scoring.
"""

from __future__ import annotations

import base64
import struct
import time
import uuid
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from aiohttp import web

from proxy.sim.dialects.vllm_requests import read_vllm_request
from proxy.sim.engine.stream import json_response, read_json, refuse_request
from proxy.sim.model.request import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proxy.sim.engine.core import EngineCore

_VECTOR_LENGTH: Final = 16
_CLASS_LABELS: Final = ("LABEL_0", "LABEL_1", "LABEL_2")
# Members of a pair: each has a text, or a list of texts.
_PAIR_MEMBERS: Final = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))

_PoolingAnswer = tuple[str, dict[str, Any], int]
"""The prefix of the ID, the members of the answer, and the number of prompt tokens."""


class PoolingRoutes:
    """The routes of one engine that generate no text."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/embeddings", self._make_handler(self._answer_embeddings))]

    def routes_of_vllm(self) -> list[web.RouteDef]:
        """Return the routes that only vLLM has, or that have another form in SGLang."""
        score, rerank = self._make_handler(self._answer_scores), self._make_handler(self._answer_ranking)
        return [
            web.post("/pooling", self._make_handler(self._answer_pooling)),
            web.post("/classify", self._make_handler(self._answer_classification)),
            *(web.post(path, score) for path in ("/score", "/v1/score")),
            *(web.post(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ]

    def _make_handler(
        self, make: Callable[[Mapping[str, Any]], _PoolingAnswer]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            body, _ = await read_json(request)
            try:
                if not isinstance(body, dict):
                    raise _make_invalid_error("Input should be a valid dictionary", "body")
                prefix, members, tokens = make(body)
            except EngineError as error:
                return refuse_request(error)
            request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
            usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
            if "results" not in members:
                members = {"object": "list", "created": int(time.time()), **members}
                usage |= {"completion_tokens": 0, "prompt_tokens_details": None}
            head = {"id": f"{prefix}-{request_id}", "model": self._core.options.model}
            return json_response(head | members | {"usage": usage})

        return answer

    def _answer_embeddings(self, body: Mapping[str, Any]) -> _PoolingAnswer:
        return self._make_vectors_answer(body, "embd", "embedding", "embedding")

    def _answer_pooling(self, body: Mapping[str, Any]) -> _PoolingAnswer:
        return self._make_vectors_answer(body, "pool", "pooling", "data")

    def _make_vectors_answer(self, body: Mapping[str, Any], prefix: str, kind: str, member: str) -> _PoolingAnswer:
        encoding = body.get("encoding_format", "float")
        if encoding not in ("float", "base64"):
            raise _make_invalid_error("Input should be 'float' or 'base64'", "body.encoding_format")
        prompts = self._read_prompts(body, body.get("input"))
        data = [
            {"index": index, "object": kind, member: _encode_vector(make_embedding(prompt), encoding)}
            for index, prompt in enumerate(prompts)
        ]
        return prefix, {"data": data}, sum(map(len, prompts))

    def _answer_classification(self, body: Mapping[str, Any]) -> _PoolingAnswer:
        prompts = self._read_prompts(body, body.get("input"))
        data = []
        for index, prompt in enumerate(prompts):
            weights = [1 + _vector_similarity(prompt, list(label.encode())) for label in _CLASS_LABELS]
            probs = [weight / sum(weights) for weight in weights]
            label = _CLASS_LABELS[probs.index(max(probs))]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(_CLASS_LABELS)})
        return "classify", {"data": data}, sum(map(len, prompts))

    def _answer_scores(self, body: Mapping[str, Any]) -> _PoolingAnswer:
        names = next((pair for pair in _PAIR_MEMBERS if all(body.get(name) for name in pair)), None)
        if names is None:
            raise _make_invalid_error("Field required", "body.queries")
        firsts, seconds = (self._read_prompts(body, body[name]) for name in names)
        if len(firsts) not in (1, len(seconds)):
            raise _make_invalid_error("Input lengths must be either 1:1, 1:N or N:N", None)
        pairs = list(zip(repeat(firsts[0]) if len(firsts) == 1 else firsts, seconds, strict=False))
        data = [
            {"index": index, "object": "score", "score": _vector_similarity(first, second)}
            for index, (first, second) in enumerate(pairs)
        ]
        return "score", {"data": data}, sum(len(first) + len(second) for first, second in pairs)

    def _answer_ranking(self, body: Mapping[str, Any]) -> _PoolingAnswer:
        query, given = body.get("query"), body.get("documents")
        if not isinstance(query, str) or not isinstance(given, list) or not given:
            raise _make_invalid_error("Field required", "body.documents" if isinstance(query, str) else "body.query")
        texts = [document.get("text") if isinstance(document, dict) else document for document in given]
        (asked,), documents = self._read_prompts(body, query), self._read_prompts(body, texts)
        results: list[dict[str, Any]] = [
            {
                "index": index,
                "document": {"text": text, "multi_modal": None},
                "relevance_score": _vector_similarity(asked, document),
            }
            for index, (text, document) in enumerate(zip(texts, documents, strict=True))
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        most = body.get("top_n") or len(results)
        return "rerank", {"results": results[:most]}, sum(len(asked) + len(document) for document in documents)

    def _read_prompts(self, body: Mapping[str, Any], given: Any) -> list[list[int]]:
        """Return the token IDs of one text, or of each text in a list.

        Checks the model's name, too. Raises EngineError.
        """
        as_completion = {"prompt": given, "model": body.get("model"), "max_tokens": 1}
        return read_vllm_request(as_completion, is_chat=False, options=self._core.options, headers={}).prompts


def make_embedding(prompt: list[int]) -> list[float]:
    """Return the vector of a text."""
    seed = crc32(bytes(token % 256 for token in prompt))
    return [crc32(bytes((index,)), seed) / 2**31 - 1.0 for index in range(_VECTOR_LENGTH)]


def _encode_vector(vector: list[float], encoding: str) -> list[float] | str:
    """Return a vector as numbers, or as base64 of its 32-bit floats in little-endian order."""
    return vector if encoding == "float" else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _vector_similarity(first: list[int], second: list[int]) -> float:
    """Return the similarity of two texts, between 0 and 1."""
    product = sum(a * b for a, b in zip(make_embedding(first), make_embedding(second), strict=True))
    return (1 + product / _VECTOR_LENGTH) / 2


def _make_invalid_error(message: str, param: str | None) -> EngineError:
    return EngineError(400, f"1 validation error:\n  {message}", "Bad Request", param)
