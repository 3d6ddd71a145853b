"""Handoffs without the gateway, in which a decoder gets the KV cache of another prompt than its own.

Its answer then shows which KV cache it has used.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import getrandbits
from typing import Any

from tests.real.answers import COMPLETIONS, request
from tests.real.cluster import Cluster, wait_until
from tests.real.programs import HOST


@dataclass(frozen=True, slots=True)
class Foreign:
    """The KV cache of another prompt, for the decode leg of a prompt."""

    members: dict[str, Any]
    """Members of the decode leg beside the prompt."""
    seen: list[int]
    """Effective prompt of the decoder: the tokens of the KV cache, and the tokens that it computes."""


def foreign_kv(cluster: Cluster, prompt: list[int], other: list[int]) -> AbstractContextManager[Foreign]:
    """Prefill `other` so that a decoder with the request for `prompt` uses its KV cache. Both have the same length."""
    by_stack: dict[str, Callable[[Cluster, list[int], list[int]], AbstractContextManager[Foreign]]] = {
        "nixl": _nixl,
        "mooncake": _mooncake,
        "store": _store,
        "sglang": _sglang,
    }
    return by_stack[cluster.stack.name](cluster, prompt, other)


@contextmanager
def _nixl(cluster: Cluster, prompt: list[int], other: list[int]) -> Iterator[Foreign]:
    params = _prefill(cluster, other, {"do_remote_decode": True, "do_remote_prefill": False})["kv_transfer_params"]
    yield Foreign({"kv_transfer_params": params}, other[:-1] + prompt[-1:])


@contextmanager
def _mooncake(cluster: Cluster, prompt: list[int], other: list[int]) -> Iterator[Foreign]:
    bootstrap_port = cluster.prefillers[0].bootstrap_port
    assert bootstrap_port
    with request(bootstrap_port, "/query") as response:
        engine_id = json.load(response)["0"]["engine_id"]
    transfer = {"transfer_id": f"by-hand-{uuid.uuid4().hex}"}
    answer = _prefill(cluster, other, {"do_remote_decode": True, "do_remote_prefill": False, **transfer})
    assert answer["kv_transfer_params"] is None
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://{HOST}:{bootstrap_port}",
        "remote_engine_id": engine_id,
        **transfer,
    }
    yield Foreign({"kv_transfer_params": params}, other[:-1] + prompt[-1:])


@contextmanager
def _store(cluster: Cluster, prompt: list[int], other: list[int]) -> Iterator[Foreign]:
    """Replace the directory of `prompt` in the store by that of `other`."""
    store = cluster.engines.directory / "store"

    def stored(tokens: list[int]) -> Any:
        before = set(store.iterdir()) if store.exists() else set()
        _prefill(cluster, tokens, None)
        wait_until(lambda: set(store.iterdir()) != before, "the prompt is in the store")
        (directory,) = set(store.iterdir()) - before
        return directory

    theirs, ours = stored(other), stored(prompt)
    shutil.rmtree(ours)
    theirs.rename(ours)
    whole = cluster.stack.transferred(len(prompt))
    yield Foreign({}, other[:whole] + prompt[whole:])


@contextmanager
def _sglang(cluster: Cluster, prompt: list[int], other: list[int]) -> Iterator[Foreign]:
    """Prefill until the decoder has the whole KV cache and the first token."""
    members = {
        "bootstrap_host": HOST,
        "bootstrap_port": cluster.prefillers[0].bootstrap_port,
        "bootstrap_room": getrandbits(62) + 1,
    }
    with ThreadPoolExecutor(1) as executor:
        leg = executor.submit(_post, cluster.prefillers[0].port, {"prompt": other, **members})
        yield Foreign(members, other)
        leg.result()


def _prefill(cluster: Cluster, prompt: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    return _post(cluster.prefillers[0].port, body)


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    with request(port, COMPLETIONS, {"temperature": 0, **body}) as response:
        answer: dict[str, Any] = json.load(response)
        assert response.status == 200, answer
        return answer
