"""Test reading the metrics of engines."""

from __future__ import annotations

import pytest

from proxy.wire.exposition import (
    PromptTokenTotals,
    parse_expired_leases,
    parse_failed_transfers,
    parse_prompt_tokens,
    parse_rank_count,
)

VLLM = b"""# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 32.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 768.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="external_kv_transfer"} 1.5e+03
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",source="local_compute"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 810.0
"""
OLDER = b"""vllm:prompt_tokens_total{engine="0",model_name="tiny"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 16.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 64.0
"""
SGLANG = b"""sglang:prompt_tokens_total{model_name="tiny"} 100.0
sglang:realtime_tokens_total{engine_type="decode",mode="prefill_compute",tp_rank="0"} 10.0
sglang:realtime_tokens_total{engine_type="decode",mode="decode",tp_rank="0"} 70.0
"""


@pytest.mark.parametrize(
    ("exposition", "told"),
    [
        (VLLM, PromptTokenTotals(2268.0, 15.0, 32.0)),
        (VLLM.replace(b"\n", b"\r\n").replace(b"\r", b" 1763793000"), PromptTokenTotals(2268.0, 15.0, 32.0)),
        (OLDER, PromptTokenTotals(64.0, 20.0, 16.0)),
        (SGLANG, PromptTokenTotals(90.0, 10.0, 0.0)),
        (SGLANG.replace(b"prefill_compute", b"other"), PromptTokenTotals(100.0, 0.0, 0.0)),  # none was computed so far
        (SGLANG.replace(b'mode="decode"', b'mode="other"'), PromptTokenTotals(90.0, 10.0, 0.0)),
        (b"x" * 100_000 + b"\n" + SGLANG, PromptTokenTotals(90.0, 10.0, 0.0)),
    ],
)
def test_prompt_tokens_are_summed_by_source(exposition: bytes, told: PromptTokenTotals) -> None:
    assert parse_prompt_tokens(exposition) == told


@pytest.mark.parametrize(
    "exposition",
    [
        b"",
        b"<html>vllm: no</html>",
        b"vllm:num_requests_running{} 1\n",
        OLDER.replace(b"external_prefix_cache_hits_total", b"external_prefix_cache_queries_total"),
        OLDER.replace(b"vllm:prompt_tokens_total", b"vllm:prompt_tokens_of_others_total"),
        b'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} NaN\n',
        b'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} many\n',
        b"# vllm:prompt_tokens_by_source_total of old\n",
        b"sglang:prompt_tokens_total 5\n",
        b"\xff\xfe{{{{ 1",
    ],
)
def test_prompt_tokens_are_unknown_without_counts(exposition: bytes) -> None:
    assert parse_prompt_tokens(exposition) is None


ONE_RANK = b'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0\n'
TWO_RANKS = rb"""vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="other engine=\"7\""} 3.0
vllm:num_requests_waiting{engine="2",model_name="tiny"} 3.0
"""


@pytest.mark.parametrize(
    ("exposition", "ranks"),
    [
        (ONE_RANK, 1),
        (TWO_RANKS, 2),
        (b'vllm:num_requests_running{model_name="tiny"} 0.0\n', None),
        (SGLANG, None),
        (b"", None),
    ],
)
def test_ranks_are_counted_by_their_gauges(exposition: bytes, ranks: int | None) -> None:
    assert parse_rank_count(exposition) == ranks


@pytest.mark.parametrize(
    ("exposition", "expired", "failed"),
    [
        (b"", None, None),
        (
            b'vllm:nixl_num_kv_expired_reqs_total{engine="0"} 2\nvllm:nixl_num_kv_expired_reqs_total{engine="1"} 1\n',
            3,
            None,
        ),
        (b"vllm:mooncake_num_kv_expired_reqs_total 4.0\n", 4, None),
        (b"vllm:nixl_num_failed_transfers_total 0.0\n", None, 0),
        (b"vllm:mooncake_num_failed_recvs_total 2\nvllm:mooncake_num_failed_transfers_total 3\n", None, 5),
        (b"sglang:num_transfer_failed_reqs_total 1\nsglang:num_bootstrap_failed_reqs_total 6\n", None, 7),
    ],
)
def test_failures_of_transfers_are_summed_over_connectors(
    exposition: bytes, expired: float | None, failed: float | None
) -> None:
    assert parse_expired_leases(exposition) == expired
    assert parse_failed_transfers(exposition) == failed
