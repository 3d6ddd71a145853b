"""Parses the sources of KV cache, the completed work and the number of ranks in an engine's `/metrics`.

Engines write 100 KB and more. Only about three lines for each data-parallel rank are parsed.
"""

from __future__ import annotations

import math
import re
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class PromptTokenTotals(NamedTuple):
    """Prompt tokens since the engine started, summed over all data-parallel ranks and models."""

    transferred: float
    """Tokens whose KV cache arrived through the KV connector."""
    computed: float
    """Tokens that the engine computed."""
    cached: float
    """Tokens that were in the prefix cache of the engine."""


def parse_prompt_tokens(exposition: bytes) -> PromptTokenTotals | None:
    """Return the prompt tokens by source, or None if the engine does not report them.

    vLLM has `vllm:prompt_tokens_by_source_total{source}` (v1/metrics/stats.py PromptTokenStats). Older versions count
    only the hits of the KV connector, in `vllm:external_prefix_cache_hits_total`. SGLang counts computed and cached
    tokens in `sglang:realtime_tokens_total{mode}`; all other prompt tokens came from a prefiller.
    """
    if b"vllm:" in exposition:
        return _read_vllm_tokens(exposition)
    return _read_sglang_tokens(exposition) if b"sglang:" in exposition else None


def parse_expired_leases(exposition: bytes) -> float | None:
    """Return how many times a prefiller freed KV because no decoder fetched it in time; None: it reports no count.

    vLLM's connectors count this since the engine started: NixlConnector (kv_connector/v1/nixl/stats.py), and since vLLM
    0.33 MooncakeConnector (mooncake/stats.py). SGLang has no leases: both legs of a request fail together.
    """
    return _sum_metrics(exposition, _EXPIRED_LEASE_METRICS)


def parse_failed_transfers(exposition: bytes) -> float | None:
    """Return how many transfers of KV cache failed at an engine since it started; None: it reports no count.

    vLLM's NixlConnector counts them at decoders and includes failed handshakes (nixl/stats.py). MooncakeConnector
    counts at both engines since vLLM 0.33 (mooncake/stats.py), and so does SGLang (metrics_collector.py).
    """
    return _sum_metrics(exposition, _FAILED_TRANSFER_METRICS)


def parse_completed_work(exposition: bytes) -> float | None:
    """Return the tokens that an engine computed or generated since it started; None: it does not report them.

    Only the difference between two readings has a meaning. vLLM counts with each step. SGLang counts in
    `sglang:realtime_tokens_total`, and also at the end of each request.
    """
    return _sum_metrics(exposition, _WORK_METRICS)


def parse_start_time(exposition: bytes) -> float | None:
    """Return the start of the engine's process in seconds since the Unix epoch; None: it does not report it."""
    return _sum_metrics(exposition, (b"process_start_time_seconds",))


def parse_rank_count(exposition: bytes) -> int | None:
    """Return the number of data-parallel ranks behind the address; None: the engine does not report it.

    vLLM has a gauge for each rank of its API server from the start (v1/metrics/loggers.py PrometheusStatLogger).
    """
    name = re.escape(b"vllm:num_requests_running")
    samples = re.findall(_SAMPLE_LINE % name, exposition, re.MULTILINE)
    return len({rank for labels, _ in samples for rank in re.findall(rb'\bengine="([^"]*)"', labels)}) or None


_WORK_METRICS: Final = tuple(
    f"{engine}:{name}_tokens_total".encode()
    for engine, name in product(("vllm", "sglang"), ("generation", "prompt", "realtime"))
)


_EXPIRED_LEASE_METRICS: Final = (b"vllm:nixl_num_kv_expired_reqs_total", b"vllm:mooncake_num_kv_expired_reqs_total")
_FAILED_TRANSFER_METRICS: Final = (
    b"vllm:nixl_num_failed_transfers_total",
    b"vllm:mooncake_num_failed_transfers_total",
    b"vllm:mooncake_num_failed_recvs_total",
    b"sglang:num_transfer_failed_reqs_total",
    b"sglang:num_bootstrap_failed_reqs_total",
)


def _sum_metrics(exposition: bytes, names: Sequence[bytes]) -> float | None:
    """Return the sum of all samples of some metrics in an exposition, or None without any sample."""
    sums = [total for name in names if (total := _sum_samples(exposition, name)) is not None]
    return sum(sums) if sums else None


def _read_vllm_tokens(exposition: bytes) -> PromptTokenTotals | None:
    counts = [
        _sum_samples(exposition, b"vllm:prompt_tokens_by_source_total", b'source="%b"' % source)
        for source in (b"external_kv_transfer", b"local_compute", b"local_cache_hit")
    ]
    if counts[0] is not None:
        return PromptTokenTotals(*(tokens or 0.0 for tokens in counts))
    transferred = _sum_samples(exposition, b"vllm:external_prefix_cache_hits_total")
    all_tokens = _sum_samples(exposition, b"vllm:prompt_tokens_total")
    if transferred is None or all_tokens is None:
        return None
    cached = _sum_samples(exposition, b"vllm:prefix_cache_hits_total") or 0.0
    return PromptTokenTotals(transferred, max(0.0, all_tokens - transferred - cached), cached)


def _read_sglang_tokens(exposition: bytes) -> PromptTokenTotals | None:
    all_tokens = _sum_samples(exposition, b"sglang:prompt_tokens_total")
    computed = _sum_samples(exposition, b"sglang:realtime_tokens_total", b'mode="prefill_compute"')
    decoded = _sum_samples(exposition, b"sglang:realtime_tokens_total", b'mode="decode"')
    if all_tokens is None or (computed is None and decoded is None):
        return None
    cached = _sum_samples(exposition, b"sglang:realtime_tokens_total", b'mode="prefill_cache"') or 0.0
    computed = computed or 0.0
    return PromptTokenTotals(max(0.0, all_tokens - computed - cached), computed, cached)


# A line `name{labels} value`, with an optional timestamp at its end.
_SAMPLE_LINE: Final = rb"^%b(?:\{([^\n]*)\})?[ \t]+([^ \t\n]+)"


def _sum_samples(exposition: bytes, name: bytes, label: bytes = b"") -> float | None:
    """Return the sum of a metric's samples with one label, or None without any sample."""
    total, found = 0.0, False
    start = exposition.find(name)
    if start < 0:
        return None
    for labels, value in re.findall(_SAMPLE_LINE % re.escape(name), exposition[start:], re.MULTILINE):
        if label in labels:
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                total, found = total + number, True
    return total if found else None
