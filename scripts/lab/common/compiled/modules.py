"""The modules that are compiled: those on the path of a plain request and its tokens."""

from __future__ import annotations

from typing import Final

_BY_PACKAGE: Final = {
    "balancer": "blame chooser incompatibilities lease pick pool stalls",
    "balancer/policies": (
        "append_harm concurrency decode_memory decode_pace handoff_times least_decode_seconds least_seconds"
        " least_tokens prefill_cost prefiller prefixes session_records working_sets"
    ),
    "balancer/shared": "back_offs journal scoreboard",
    "common": "backend",
    "connectors": (
        "base disaggregated handoff leg_driver legs nixl_push one_engine read_back releaser sequential sglang_bootstrap"
    ),
    "dialects": (
        "adjustments base call fanout messages messages_request openai requests responses responses_request segment"
        " sglang_events translated"
    ),
    "gateway": (
        "admission answers api_keys assembly attempts client_writer common_abilities"
        " delivery engine_room fast_connection intake lane_parts long_body queue_order relay request request_parts"
        " resuming retry suspects suspicion work"
    ),
    "listener": "header_deadlines",
    "observe": "key_usage listeners observers receipts record timeline",
    "observe/logs": "lines",
    "process": "loop_lag",
    "process/worker": "balancing",
    "settings": "live",
    "resume": "chat_as_completion continuation cut engines overlap plan seam transcript",
    "upstream": "answer_reader connection fast_forward gathering response silences upstream",
    "wire": "chat_members document ids members openai prefix python_json sglang sse weight",
}
MODULES: Final = [
    f"proxy/{package}/{name}.py".replace("//", "/") for package, names in _BY_PACKAGE.items() for name in names.split()
]
"""Paths of the modules, relative to the directory of the package."""
