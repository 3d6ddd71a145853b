"""The engine software that is tested, vLLM and SGLang: how it is started, and the names of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.real.programs import HOST, MODEL

BLOCK_SIZE: Final = 32
"""Tokens in a block of vLLM's KV cache."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an engine, in addition to its model."""

    flags: Mapping[str, str] = field(default_factory=dict)
    """Values by name; a switch has an empty value."""
    environment: Mapping[str, str] = field(default_factory=dict)
    per_start: Callable[[], Mapping[str, str]] = dict
    """Returns further variables of the environment at each start."""


@dataclass(frozen=True, slots=True)
class Family:
    """One engine software."""

    venv_variable: str
    """The environment variable that names the virtual environment with this software."""
    command: tuple[str, ...]
    """Arguments of Python, up to the directory of the model."""
    options: Options
    request_gauges: tuple[str, ...]
    """Metrics: requests that are running or queued, in whatever stage."""
    kv_gauges: tuple[str, ...]
    """Metrics: KV cache in use."""
    generation_tokens: str
    """Metric: generated tokens."""
    prompt_tokens: str
    """Metric: prompt tokens."""


VLLM: Final = Family(
    venv_variable="PDPROXY_REAL_VENV",
    command=("-m", "vllm.entrypoints.cli.main", "serve"),
    options=Options(
        {
            "--served-model-name": MODEL,
            "--host": HOST,
            "--dtype": "float32",
            "--max-model-len": "4096",
            # One decoder takes all answers that another one had, or they would wait for each other.
            "--max-num-seqs": "32",
            "--kv-cache-memory-bytes": str(64 << 20),
            "--block-size": str(BLOCK_SIZE),
            "--enforce-eager": "",
            "--enable-prompt-tokens-details": "",
            # For calls of tools, which nothing but a chat with tools sees.
            "--enable-auto-tool-choice": "",
            "--tool-call-parser": "hermes",
            # For the routes that render prompts.
            "--enable-scale-out": "",
        },
        # No traffic with other machines, and no threads bound to cores, because there are more engines than cores.
        {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    ),
    request_gauges=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    kv_gauges=("vllm:kv_cache_usage_perc",),
    generation_tokens="vllm:generation_tokens_total",
    prompt_tokens="vllm:prompt_tokens_total",
)

SGLANG: Final = Family(
    venv_variable="PDPROXY_REAL_SGLANG_VENV",
    command=("-m", "sglang.launch_server", "--model-path"),
    options=Options(
        {
            "--served-model-name": MODEL,
            "--host": HOST,
            "--device": "cpu",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--disable-overlap-schedule": "",
            "--max-total-tokens": "16384",
            "--max-running-requests": "16",
            "--mem-fraction-static": "0.1",
            # Without a prefix cache, KV cache in use is in use by a request.
            "--disable-radix-cache": "",
            # Otherwise an idle engine takes a whole core.
            "--sleep-on-idle": "",
            "--enable-metrics": "",
        },
        {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": HOST,
            "SGLANG_LOCAL_IP_NIC": "lo",
            "MC_FORCE_TCP": "1",
            "MOONCAKE_PROTOCOL": "tcp",
        },
    ),
    request_gauges=(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_prefill_inflight_queue_reqs",
        "sglang:num_decode_prealloc_queue_reqs",
        "sglang:num_decode_transfer_queue_reqs",
    ),
    kv_gauges=("sglang:num_used_tokens",),
    generation_tokens="sglang:generation_tokens_total",
    prompt_tokens="sglang:prompt_tokens_total",
)
