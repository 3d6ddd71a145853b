"""The routes of SGLang that do not generate and differ from vLLM's: health, loads, information, and aborts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from proxy.sim.engine.stream import json_response, read_json
from proxy.sim.model.tokenizer import render_chat

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sim.engine.core import EngineCore
    from proxy.sim.engine.server import GenerationRoutes

_ROLE_MODES = {"prefill": "prefill", "decode": "decode", "both": "null"}
# CUDA graphs of a decoder: their batch sizes and their memory in GB.
_GRAPH_SIZES = [1, 2, 4, 8]
_GRAPH_GB = 1.5


class SglangRoutes:
    """The routes of SGLang's `entrypoints/http_server.py`, including deprecated ones."""

    def __init__(self, core: EngineCore, generations: GenerationRoutes, bootstrap_port: Callable[[], int]) -> None:
        self._core = core
        self._mode_at_start = _ROLE_MODES[core.options.role]
        self._has_graphs = core.options.role != "prefill"
        self._bootstrap_port = bootstrap_port
        self._generations = generations

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health_generate", self._answer_health),
            web.get("/ready", self._answer_health),
            web.get("/model_info", self._answer_model_info),
            web.get("/get_model_info", self._answer_model_info),
            web.get("/server_info", self._answer_server_info),
            web.get("/get_server_info", self._answer_server_info),
            web.get("/v1/loads", self._answer_loads),
            web.get("/flush_cache", self._flush_cache),
            web.post("/flush_cache", self._flush_cache),
            web.post("/abort_request", self._abort_request),
            web.post("/pd_role_switch", self._switch_role),
            web.post("/v1/messages/count_tokens", self._count_tokens),
            web.get("/metrics", self._answer_metrics),
        ]

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a request in Anthropic's API.

        `system` is not counted, because SGLang does not read it.
        """
        body, _ = await read_json(request)
        return json_response({"input_tokens": len(render_chat(body))})

    async def _answer_health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer_model_info(self, request: web.Request) -> web.Response:
        model = self._core.options.model
        info = {"model_path": model, "tokenizer_path": model, "is_generation": True, "weight_version": "default"}
        return json_response(info | {"preferred_sampling_params": None, "model_type": "sim", "architectures": ["Sim"]})

    async def _answer_server_info(self, request: web.Request) -> web.Response:
        options, publisher = self._core.options, self._core.kv_events
        return json_response(
            {
                "model_path": options.model,
                "served_model_name": options.model,
                "disaggregation_mode": self._mode_at_start,
                "enable_pd_role_switch": options.pd_role_switch,
                "disaggregation_bootstrap_port": self._bootstrap_port(),
                "disaggregation_decode_allocation_policy": (
                    "prefill_complete" if options.allocates_after_prefill else "early"
                ),
                "enable_deterministic_inference": False,
                "reasoning_parser": options.reasoning_parser or None,
                "tool_call_parser": options.tool_call_parser or None,
                "dp_size": options.dp_size,
                "kv_events_config": publisher and publisher.config,
                "max_running_requests": options.max_num_seqs,
                "max_total_num_tokens": options.kv_blocks * options.block_size,
                "version": options.profile.version,
                "internal_states": [self._state() for _ in range(options.dp_size)],
            }
        )

    def _state(self) -> dict[str, Any]:
        """Return what a scheduler adds to the options of its start (scheduler_components/internal_state.py)."""
        if self._core.options.reports_only_role_at_start:
            return {}
        return {
            "disaggregation_mode": _ROLE_MODES[self._core.options.role],
            "decode_cuda_graph_bs": _GRAPH_SIZES if self._has_graphs else [],
            "decode_cuda_graph_memory_gb": _GRAPH_GB if self._has_graphs else 0.0,
        }

    async def _answer_loads(self, request: web.Request) -> web.Response:
        options = self._core.options
        rank = request.query.get("dp_rank")
        ranks = range(options.dp_size) if rank is None else [int(rank)]
        head = {"timestamp": time.time(), "version": options.profile.version, "accelerator": "sim"}
        return json_response(head | {"num_accelerators": 1, "loads": [self._rank_load(rank) for rank in ranks]})

    def _rank_load(self, rank: int) -> dict[str, Any]:
        """Return the load of a rank. All running requests count for rank 0."""
        scheduler = self._core.scheduler
        options = self._core.options
        return {
            "dp_rank": rank,
            "disaggregation_mode": _ROLE_MODES[options.role],
            "num_running_reqs": 0 if rank else scheduler.running,
            "num_waiting_reqs": 0 if rank else scheduler.waiting,
            "num_total_reqs": 0 if rank else scheduler.running + scheduler.waiting,
            "num_used_tokens": 0,
            "max_total_num_tokens": options.kv_blocks * options.block_size,
            "token_usage": 0.0,
            "max_running_requests": options.max_num_seqs,
        }

    async def _switch_role(self, request: web.Request) -> web.Response:
        """Exchange the role of an idle engine (disaggregation/role_switch.py)."""
        body, _ = await read_json(request)
        asked = body if isinstance(body, dict) else {}
        options, new, old = self._core.options, asked.get("new_role"), _ROLE_MODES[self._core.options.role]
        problem, is_prepared = self._refuse_switch(asked), asked.get("prepare_only") is True
        if not problem and not is_prepared and new in ("prefill", "decode"):
            options.switch_role(new)
            self._has_graphs = self._has_graphs or new == "decode"
        if self._core.faults.plan(request.path, "").has_any("lost_response") and request.transport is not None:
            request.transport.abort()
        answer = {
            "success": not problem,
            "message": problem or ("ready" if is_prepared else "ok"),
            "old_role": old,
            "new_role": new,
            # Only an engine that has refused or prepared an exchange has all of its old role.
            "safe_to_restore": bool(problem) or (is_prepared and new != old),
        }
        return json_response(answer, 400 if problem else 200)

    def _refuse_switch(self, asked: dict[str, Any]) -> str:
        """Return why the engine does not exchange its role, or an empty string. The order is that of SGLang."""
        options, scheduler, new = self._core.options, self._core.scheduler, asked.get("new_role")
        if not options.pd_role_switch:
            return "--enable-pd-role-switch is not set on this server"
        if new not in ("prefill", "decode"):
            return f"invalid new_role={new!r}"
        if options.role == "both":
            return "instance is not running in PD disaggregation mode"
        if new == options.role:
            return ""
        if scheduler.running or scheduler.waiting or self._core.state.waiting_rooms:
            return "instance is not idle; drain all requests before switching"
        if new == "prefill" or self._has_graphs:
            return ""
        needed = asked.get("decode_cuda_graph_memory_gb")
        if needed is None:
            return "decode_cuda_graph_memory_gb is required before capturing decode graphs"
        if needed > options.free_gpu_gb:
            sizes = f"required={needed:.3f} GB, available={options.free_gpu_gb:.3f} GB"
            return f"insufficient decode CUDA graph headroom: {sizes}"
        return ""

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if self._core.scheduler.running or self._core.scheduler.waiting:
            return web.Response(status=400, text="Cache not flushed: there are running requests.\n")
        self._core.cache.clear()
        self._core.state.prefix_cache_resets += 1
        self._core.state.notify_waiters()
        return web.Response(text="Cache flushed.\n")

    async def _abort_request(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        named = body if isinstance(body, dict) else {}
        if named.get("abort_all") or named.get("rid"):
            self._generations.abort("" if named.get("abort_all") else str(named["rid"]))
        return web.Response()

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        scheduler = self._core.scheduler
        labels = f'model_name="{self._core.options.model}"'
        gauges = {"num_running_reqs": scheduler.running, "num_queue_reqs": scheduler.waiting, "token_usage": 0.0}
        lines = [
            line
            for name, value in gauges.items()
            for line in (f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{labels}}} {value}")
        ]
        lines += self._token_lines(labels)
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain", charset="utf-8")

    def _token_lines(self, labels: str) -> list[str]:
        """Return two token counters: of all prompts, and of prompts that were computed here and not fetched."""
        core = self._core
        computed, cached, _ = core.metrics.prompt_tokens_by_source.values()
        modes = {"prefill_compute": computed, "prefill_cache": cached, "decode": core.state.tokens_generated}
        return [
            "# TYPE sglang:prompt_tokens_total counter",
            f"sglang:prompt_tokens_total{{{labels}}} {core.state.prompt_tokens}",
            "# TYPE sglang:realtime_tokens_total counter",
            *(f'sglang:realtime_tokens_total{{{labels},mode="{mode}"}} {count}' for mode, count in modes.items()),
        ]
