"""A gateway with its engines, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.real.answers import request
from tests.real.engines import Engines
from tests.real.families import SGLANG
from tests.real.programs import Program
from tests.real.stacks import KV_BYTES_PER_TOKEN, Stack

# Longer than a prefiller keeps KV cache that is never fetched: vLLM's lease is 30 s.
SETTLE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the KV cache of prompts in decoders, in tokens."""

    transferred: int
    computed: int
    cached: int
    """Found in the decoder's prefix cache."""

    def __sub__(self, other: Sources) -> Sources:
        return Sources(self.transferred - other.transferred, self.computed - other.computed, self.cached - other.cached)

    @property
    def total(self) -> int:
        return self.transferred + self.computed + self.cached

    def __str__(self) -> str:
        return f"{self.transferred} tokens transferred, {self.computed} computed, {self.cached} cached"


@dataclass(frozen=True, slots=True)
class Cluster:
    engines: Engines
    prefillers: list[Program]
    decoders: list[Program]
    gateway: Program
    sources_before: Sources
    """Counts of the engines when this gateway started, because they have served other gateways before."""
    chats: str = "auto"
    """The gateway's option `resume.chats`."""

    @property
    def stack(self) -> Stack:
        return self.engines.stack

    @property
    def single(self) -> Program:
        """Return the single engine, which prefills and decodes. Its answers are the expected ones."""
        return self.engines.single[0]

    def sources(self) -> Sources:
        """Return the sum over all prompts that the decoders got since this gateway was started."""
        return count_sources(self.stack, self.prefillers, self.decoders) - self.sources_before

    def running_requests(self) -> float:
        """Return the number of requests that the engines are running or have queued."""
        return self._engines_total(self.stack.family.request_gauges)

    def kv_in_use(self) -> float:
        """Return the KV cache in use, which idle engines keep for a decoder: a share with vLLM, tokens with SGLang."""
        return self._engines_total(self.stack.family.kv_gauges)

    def gateway_load(self) -> float:
        """Return the requests and load that the gateway accounts for; 0 when it is idle."""
        names = ("pdproxy_instance_inflight", "pdproxy_instance_load_tokens", "pdproxy_inflight_requests")
        return sum(total([self.gateway], name) for name in names)

    def all_are_up(self) -> bool:
        return total([self.gateway], "pdproxy_instance_up") == len(self.prefillers) + len(self.decoders)

    def wait_until_nothing_is_left(self) -> None:
        """Wait until neither the gateway nor an engine holds anything of a request."""
        wait_until(lambda: self.gateway_load() == 0, "the gateway holds nothing")
        wait_until(lambda: self.running_requests() == 0, "the engines have nothing to do")
        wait_until(lambda: self.kv_in_use() == 0, "the engines keep nothing")

    def _engines_total(self, names: Iterable[str]) -> float:
        return sum(total([*self.prefillers, *self.decoders], name) for name in names)


def count_sources(stack: Stack, prefillers: Sequence[Program], decoders: Sequence[Program]) -> Sources:
    """Return the sum over all prompts that these decoders got since they were started."""
    if stack.family is SGLANG:
        # SGLang's decoders do not count what they receive; its prefillers count what they send, in MiB.
        sent = total(prefillers, "sglang:kv_transfer_total_mb_sum", if_none=0)
        computed = total(decoders, "sglang:realtime_tokens_total", {"mode": "prefill_compute"}, if_none=0)
        return Sources(round(sent * 2**20 / KV_BYTES_PER_TOKEN), int(computed), 0)
    name = "vllm:prompt_tokens_by_source_total"
    sources = ("external_kv_transfer", "local_compute", "local_cache_hit")
    return Sources(*(int(total(decoders, name, {"source": source}, if_none=0)) for source in sources))


def total(
    programs: Iterable[Program], name: str, labels: Mapping[str, str] | None = None, *, if_none: float | None = None
) -> float:
    """Return the sum of a metric's samples with these labels, over the programs.

    Raises AssertionError if there are no samples and no `if_none` to return instead.
    """
    wanted = (labels or {}).items()
    values = [
        sample.value
        for program in programs
        for family in text_string_to_metric_families(_metrics(program))
        for sample in family.samples
        if sample.name == name and wanted <= sample.labels.items()
    ]
    if not values and if_none is not None:
        return if_none
    assert values, f"no samples of {name} {labels or ''}"
    return sum(values)


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Wait for something outside this process, and return how many seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < SETTLE_SECONDS, f"not within {SETTLE_SECONDS:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def _metrics(program: Program) -> str:
    with request(program.port, "/metrics") as response:
        return response.read().decode()
