"""Of an engine's `/metrics` where its prompts' KV cache came from, how much it has done, and how many ranks it has.

The rest is not parsed.

A real engine writes 100 KB and more there, of which three lines for each of its data-parallel ranks count here.
"""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Final, NamedTuple


class PromptTokens(NamedTuple):
    """Prompt tokens since the engine started, over all its data-parallel ranks and models."""

    transferred: float
    """From elsewhere, through its KV connector."""
    computed: float
    """By itself."""
    cached: float
    """From its own prefix cache."""


def parse_prompt_tokens(exposition: bytes) -> PromptTokens | None:
    """None: it does not tell.

    vLLM has `vllm:prompt_tokens_by_source_total{source}` (v1/metrics/stats.py PromptTokenStats); before that, of what
    its KV connector found only `vllm:external_prefix_cache_hits_total`. SGLang counts what it computes and what it
    finds in its prefix cache in `sglang:realtime_tokens_total{mode}`; the rest of the prompts came from a prefiller.
    """
    if b"vllm:" in exposition:
        return _of_vllm(exposition)
    return _of_sglang(exposition) if b"sglang:" in exposition else None


def parse_expired_leases(exposition: bytes) -> float | None:
    """How often a prefiller has freed KV because no decoder had fetched it in time, since it started; None: it does not
    tell.

    vLLM's NixlConnector counts that (kv_connector/v1/nixl/stats.py). Of vLLM's MooncakeConnector only the log tells,
    and SGLang has no leases: both legs of a request fail together.
    """
    return _sum(exposition, b"vllm:nixl_num_kv_expired_reqs_total")


def parse_work(exposition: bytes) -> float | None:
    """Return how many tokens an engine has computed or generated since it started; None: it does not tell.

    Only of use beside an earlier reading. vLLM counts them with each step of its engine, SGLang in
    `sglang:realtime_tokens_total`, and besides at the end of each request.
    """
    counted = [tokens for name in _WORK if (tokens := _sum(exposition, name)) is not None]
    return sum(counted) if counted else None


def parse_ranks(exposition: bytes) -> int | None:
    """How many data-parallel ranks are behind the address; None: it does not tell.

    vLLM has a gauge for each rank that its API server feeds, from the start (v1/metrics/loggers.py
    PrometheusStatLogger).
    """
    name = re.escape(b"vllm:num_requests_running")
    samples = re.findall(_SAMPLE % name, exposition, re.MULTILINE)
    return len({rank for labels, _ in samples for rank in re.findall(rb'\bengine="([^"]*)"', labels)}) or None


_WORK: Final = tuple(
    f"{engine}:{name}_tokens_total".encode()
    for engine, name in product(("vllm", "sglang"), ("generation", "prompt", "realtime"))
)


def _of_vllm(exposition: bytes) -> PromptTokens | None:
    told = [
        _sum(exposition, b"vllm:prompt_tokens_by_source_total", b'source="%b"' % source)
        for source in (b"external_kv_transfer", b"local_compute", b"local_cache_hit")
    ]
    if told[0] is not None:
        return PromptTokens(*(tokens or 0.0 for tokens in told))
    transferred = _sum(exposition, b"vllm:external_prefix_cache_hits_total")
    all_tokens = _sum(exposition, b"vllm:prompt_tokens_total")
    if transferred is None or all_tokens is None:
        return None
    cached = _sum(exposition, b"vllm:prefix_cache_hits_total") or 0.0
    return PromptTokens(transferred, max(0.0, all_tokens - transferred - cached), cached)


def _of_sglang(exposition: bytes) -> PromptTokens | None:
    all_tokens = _sum(exposition, b"sglang:prompt_tokens_total")
    computed = _sum(exposition, b"sglang:realtime_tokens_total", b'mode="prefill_compute"')
    decoded = _sum(exposition, b"sglang:realtime_tokens_total", b'mode="decode"')
    if all_tokens is None or (computed is None and decoded is None):
        return None
    cached = _sum(exposition, b"sglang:realtime_tokens_total", b'mode="prefill_cache"') or 0.0
    computed = computed or 0.0
    return PromptTokens(max(0.0, all_tokens - computed - cached), computed, cached)


# `name{labels} value`, of which a timestamp may follow, at the beginning of a line.
_SAMPLE: Final = rb"^%b(?:\{([^\n]*)\})?[ \t]+([^ \t\n]+)"


def _sum(exposition: bytes, name: bytes, label: bytes = b"") -> float | None:
    """The sum of all samples of this name that have this label; None when there are none."""
    total, found = 0.0, False
    start = exposition.find(name)
    if start < 0:
        return None
    for labels, value in re.findall(_SAMPLE % re.escape(name), exposition[start:], re.MULTILINE):
        if label in labels:
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                total, found = total + number, True
    return total if found else None
