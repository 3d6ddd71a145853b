"""Engines that are incompatible with each other or with the gateway's connector: one warning for each.

Clients do not always get an error. Engines without a connector, or with another one, serve normally, but every prompt
is computed twice.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from threading import Thread
from typing import Literal

import pytest

from tests.real.answers import COMPLETIONS, request
from tests.real.cluster import Cluster, wait_until
from tests.real.programs import HOST, Program, endpoints, start_gateway, stop
from tests.real.report import Show
from tests.real.stacks import SIZES, Kind

# More tokens than MIN_STORED_TOKENS of handoff_verdicts.py: shorter prompts through a store are not judged.
PROMPT = "over the lazy dog, and again, " * 90


@dataclass(frozen=True, slots=True)
class Misfit:
    name: str
    stack: str
    connector: str
    """The connector that the gateway is configured with."""
    kind: str
    """Kind of incompatibility that the gateway finds."""
    role: Literal["prefill", "decode"]
    """The role of the instance that the warning is about."""
    prefill: Kind = "prefill"
    """The engine that the gateway is given as prefiller."""
    decode: Kind = "decode"
    """The engine that the gateway is given as decoder."""
    bootstrap: Literal["own", "closed", "another's"] = "own"
    """The configured bootstrap port. `another's` is that of a second prefiller. `closed`: nothing listens there."""
    statuses: tuple[int, ...] = (200,)
    """The statuses that clients may get."""


MISFITS = [
    Misfit("a decoder without connector", "nixl", "vllm_pull", "kv_not_fetched", "decode", decode="single"),
    Misfit("a prefiller without connector", "nixl", "vllm_pull", "no_kv_params", "prefill", prefill="single"),
    Misfit("sglang_bootstrap before vLLM", "nixl", "sglang_bootstrap", "connector", "prefill"),
    Misfit(
        "a decoder without connector", "mooncake", "mooncake_bootstrap", "kv_not_fetched", "decode", decode="single"
    ),
    Misfit(
        "a prefiller without connector",
        "mooncake",
        "mooncake_bootstrap",
        "bootstrap",
        "prefill",
        prefill="single",
        bootstrap="closed",
        statuses=(503,),
    ),
    Misfit(
        "swapped roles",
        "mooncake",
        "mooncake_bootstrap",
        "bootstrap",
        "prefill",
        prefill="decode",
        decode="prefill",
        bootstrap="closed",
        statuses=(503,),
    ),
    Misfit(
        "closed bootstrap port",
        "mooncake",
        "mooncake_bootstrap",
        "bootstrap",
        "prefill",
        bootstrap="closed",
        statuses=(503,),
    ),
    Misfit(
        "another's bootstrap port",
        "mooncake",
        "mooncake_bootstrap",
        "bootstrap",
        "prefill",
        bootstrap="another's",
        statuses=(200, 500, 502, 503),
    ),
    Misfit("vllm_pull before Mooncake", "mooncake", "vllm_pull", "no_kv_params", "prefill"),
    Misfit("vllm_store before Mooncake", "mooncake", "vllm_store", "kv_not_fetched", "decode"),
    Misfit("a decoder without store", "store", "vllm_store", "kv_not_fetched", "decode", decode="single"),
    Misfit(
        "closed bootstrap port",
        "sglang",
        "sglang_bootstrap",
        "bootstrap",
        "prefill",
        bootstrap="closed",
        statuses=(500, 502, 503),
    ),
    Misfit(
        "another's bootstrap port",
        "sglang",
        "sglang_bootstrap",
        "bootstrap",
        "prefill",
        bootstrap="another's",
        statuses=(200, 500, 502, 503, 504),
    ),
    Misfit(
        "swapped roles",
        "sglang",
        "sglang_bootstrap",
        "role",
        "prefill",
        prefill="decode",
        decode="prefill",
        statuses=(500, 502, 503),
    ),
    Misfit("vllm_pull before SGLang", "sglang", "vllm_pull", "connector", "prefill", statuses=(400,)),
]


@pytest.mark.parametrize(
    ("cluster", "misfit"),
    [
        pytest.param(
            next(size for size in SIZES if size.stack.name == misfit.stack), misfit, id=f"{misfit.stack}: {misfit.name}"
        )
        for misfit in MISFITS
    ],
    indirect=["cluster"],
    scope="session",
)
def test_incompatible_engine_is_warned_about_once(cluster: Cluster, misfit: Misfit, show: Show) -> None:
    prefiller, decoder = engine_of(cluster, misfit.prefill), engine_of(cluster, misfit.decode)
    words: list[object] = ["--connector", misfit.connector, "--prefill", f"http://{HOST}:{prefiller.port}"]
    if misfit.bootstrap == "another's":
        cluster.engines.need(2, 1)
        other = cluster.engines.prefillers[1]
        words += [other.bootstrap_port, *endpoints([other], [])]
    elif misfit.connector.endswith("bootstrap"):
        own = prefiller.bootstrap_port if misfit.bootstrap == "own" else None
        words.append(own or next(cluster.engines.ports))
    log = cluster.engines.directory / f"gateway-{misfit.name.replace(' ', '-')}.log"
    words += endpoints([], [decoder])
    variables = {"PROXY_HEALTH__TRANSFER_INTERVAL_SECONDS": "1"}
    gateway = start_gateway(next(cluster.engines.ports), log, *words, ready_path="/livez", **variables)
    engine = prefiller if misfit.role == "prefill" else decoder
    client = Client(gateway)
    try:
        wait_until(lambda: misfit.kind in hints_about(gateway, engine), f"{misfit.kind} at {engine.name} is found")
        warning = f"inspector: {misfit.role} instance {HOST}:{engine.port} {hints_about(gateway, engine)[misfit.kind]}"
    finally:
        stop([gateway])
        client.join()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    warnings = [line["message"] for line in lines if line["level"] == "WARNING"]
    assert warnings.count(warning) == 1, warnings
    assert set(client.statuses) <= set(misfit.statuses)
    answers = ", ".join(f"{count} times {status}" for status, count in client.statuses.items())
    show(f"{answers or 'no answer'}; {warning}")


@pytest.mark.only("nixl", "mooncake", "store", "sglang")
def test_incompatible_engines_keep_no_state_after_requests(cluster: Cluster) -> None:
    cluster.wait_until_nothing_is_left()


def engine_of(cluster: Cluster, kind: Kind) -> Program:
    return {"single": cluster.single, "prefill": cluster.prefillers[0], "decode": cluster.decoders[0]}[kind]


class Client(Thread):
    """Asks the gateway for one answer after another until it stops. A thread, because misfits may never answer."""

    def __init__(self, gateway: Program) -> None:
        super().__init__()
        self.statuses: Counter[int] = Counter()
        self._gateway = gateway
        self.start()

    def run(self) -> None:
        with suppress(OSError, HTTPException):
            for number in count():
                body = {"prompt": f"{self._gateway.port} {number} {PROMPT}", "max_tokens": 2}
                with request(self._gateway.port, COMPLETIONS, body) as response:
                    response.read()
                    self.statuses[response.status] += 1
                if response.status != 200:
                    time.sleep(0.5)  # an error comes at once: do not ask in a tight loop


def hints_about(gateway: Program, engine: Program) -> dict[str, str]:
    """Return the hints that this gateway lists for an engine, by kind."""
    with request(gateway.port, "/instances") as response:
        instances = json.load(response)["instances"]
    (found,) = (instance for instance in instances if instance["address"] == f"{HOST}:{engine.port}")
    return {misfit["kind"]: misfit["hint"] for misfit in found["misfits"]}
