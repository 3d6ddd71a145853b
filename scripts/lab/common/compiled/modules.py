"""What is compiled: the modules that a plain request and its tokens run through."""

from __future__ import annotations

from typing import Final

_BY_PACKAGE: Final = {
    "": "api_keys call usage",
    "balancer": "choice chooser lease members outcomes pick pool pools",
    "balancer/fitness": "fitness misfits",
    "balancer/health": "pair_quarantine suspect_memory",
    "balancer/policies": (
        "asked cache_count concurrency decode_pace least_decode_seconds least_seconds least_tokens length_groups"
        " cache_reach prefill_cost prefill_records prefill_samples prefiller prefillers prefixes rate_filter"
    ),
    "balancer/shared": "journal scoreboard",
    "connectors": (
        "attempt base disaggregated handoff kv_transfer legs prefill_body ranks releaser sequential"
        " sglang_bootstrap single_leg vllm_pull"
    ),
    "dialects": "shapes",
    "fast_path": "attempt beside connection head intake parts plain_stream request stream",
    "flow": "admission budget buffers bypass chunk_writer fleet token_clock token_shapes whole_body",
    "listener": "header_deadlines",
    "observe": "access_line attempt_record listeners observers receipt receipts record timeline",
    "resume": "engine transcript vllm",
    "upstream": "answer_reader connection fast_forward plain_head request_heads response size_lines upstream",
    "wire": "document elision ids members openai shape token token_ids weight",
}
MODULES: Final = [
    f"proxy/{package}/{name}.py".replace("//", "/") for package, names in _BY_PACKAGE.items() for name in names.split()
]
"""Their paths, from the directory that has the package."""
