"""What is compiled: the modules that a plain request and its tokens run through."""

from __future__ import annotations

from typing import Final

_BY_PACKAGE: Final = {
    "": "api_keys backend call usage",
    "balancer": "choice chooser lease members outcomes pick pool pools",
    "balancer/engines": "pace",
    "balancer/fitness": "fitness misfits",
    "balancer/health": "pair_quarantine suspect_memory",
    "balancer/policies": (
        "asked cache_count concurrency decode_pace least_decode_seconds least_seconds least_tokens length_groups"
        " cache_reach prefill_cost prefill_records prefill_samples prefiller prefillers prefixes rate_filter unlearned"
    ),
    "balancer/shared": "back_offs journal scoreboard",
    "connectors": (
        "attempt base disaggregated handoff kv_transfer legs one_engine prefill_body ranks releaser sequential"
        " sglang_bootstrap single_leg vllm_pull"
    ),
    "dialects": "priorities shapes",
    "fast_path": "attempt beside connection head intake parts plain_stream request stream",
    "flow": "admission budget buffers bypass chunk_writer fleet gateway keep_alive token_clock token_shapes whole_body",
    "listener": "header_deadlines",
    "monitor": "loop_lag",
    "observe": "access_line attempt_record listeners observers receipt receipts record timeline",
    "resume": "engine sglang transcript vllm",
    "upstream": "answer_reader connection fast_forward plain_head request_heads response silences size_lines upstream",
    "wire": (
        "chat_members document elision engine_members finish ids members openai prefix python_json sglang_errors shape"
        " token token_ids weight"
    ),
    "worker": "balancing",
}
MODULES: Final = [
    f"proxy/{package}/{name}.py".replace("//", "/") for package, names in _BY_PACKAGE.items() for name in names.split()
]
"""Their paths, from the directory that has the package."""
