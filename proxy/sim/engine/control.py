"""The routes of a simulated engine that do not generate: health, metrics, models, tokenizer, and control for tests.

`/_mock/faults` adds fault rules, and `/_mock/state` shows the state.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from proxy.sim.dialects.endpoints import endpoints_of_profile, error_body
from proxy.sim.dialects.vllm_requests import read_vllm_request
from proxy.sim.engine.faults import UnknownFaultAction
from proxy.sim.engine.stream import hang_forever, json_response, read_json, refuse_request
from proxy.sim.model.request import EngineError
from proxy.sim.model.tokenizer import decode_tokens, encode_text, render_chat

if TYPE_CHECKING:
    from proxy.sim.engine.core import EngineCore

KV_CONNECTORS: Final = {
    "push": "NixlPushConnector",
    "transfer": "MooncakeConnector",
    "layerwise": "MooncakeLayerwiseConnector",
    "store": "MooncakeStoreConnector",
    "nixl": "NixlConnector",
    "mooncake": "MooncakeConnectorV1",
    "mooncake-pull": "MooncakeConnectorV2",
    "mooncake-hybrid": "MooncakeHybridConnector",
}
"""Names of KV connectors in vLLM and vLLM-Ascend, by the simulated protocol. For `pull`, by the simulated connector."""
_SCALING_PATHS: Final = ("/health", "/is_scaling_elastic_ep")


class ControlRoutes:
    """The control routes of one engine. They read its state, and change only fault rules, prefix cache and adapters."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._started_at = int(time.time())
        self._generation_paths = endpoints_of_profile(core.options.profile)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._answer_health),
            web.get("/ping", self._answer_health),
            web.post("/ping", self._answer_health),
            web.get("/v1/models", self._answer_models),
            web.post("/v1/load_lora_adapter", self._load_adapter),
            web.post("/tokenize", self._answer_tokenize),
            web.post("/detokenize", self._answer_detokenize),
            web.post("/_mock/faults", self._add_faults),
            web.delete("/_mock/faults", self._clear_faults),
            web.get("/_mock/faults", self._show_faults),
            web.get("/_mock/state", self._show_state),
        ]

    def routes_of_vllm(self) -> list[web.RouteDef]:
        """Return the routes that only vLLM has."""
        return [
            web.get("/metrics", self._answer_metrics),
            web.get("/load", self._answer_load),
            web.get("/version", self._answer_version),
            web.post("/is_scaling_elastic_ep", self._answer_is_scaling),
            *([web.get("/server_info", self._answer_server_info)] if self._core.options.dev_mode else []),
            web.post("/v1/chat/completions/render", self._answer_render),
            web.post("/v1/completions/render", self._answer_render),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            *(
                [web.get("/kv_event_sources", self._kv_event_sources)]
                if self._core.options.profile.tells_kv_events
                else []
            ),
        ]

    @web.middleware
    async def guard_request(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the API key, and apply the faults of routes that do not generate."""
        key = self._core.options.api_key
        path = request.path
        if key is not None and path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}":
            return json_response({"error": "Unauthorized"}, 401)
        if (refused := self._make_unavailable_response(path)) is not None:
            return refused
        if path.startswith("/_mock") or path in self._generation_paths:
            return await handler(request)  # type: ignore[no-any-return]
        headers = {name.lower(): value for name, value in request.headers.items()}
        body, body_bytes = await read_json(request)
        self._core.state.record_request(request.method, path, headers, body, body_bytes)
        plan = self._core.faults.plan(path, headers.get("x-request-id", ""))
        self._core.state.record_faults(len(plan))
        if rule := plan.get("slow_headers"):
            await asyncio.sleep(rule.seconds)
        if "hang_before_headers" in plan:
            await hang_forever()
        if rule := plan.get("refuse_status"):
            error = EngineError(rule.status, "simulated fault", "InternalServerError")
            said = error_body(error, self._core.options.profile)
            return json_response(said if rule.body is None else rule.body, rule.status, rule.headers)
        return await handler(request)  # type: ignore[no-any-return]

    def _make_unavailable_response(self, path: str) -> web.Response | None:
        """Return the answer of an elastic expert-parallel rank that is retired or is being scaled; None if it serves.

        See vLLM 0.33, `serve/elastic_ep/middleware.py`.
        """
        faults = self._core.faults
        if path in _SCALING_PATHS or path.startswith("/_mock"):
            return None
        if faults.has("retired"):
            return json_response({"error": "This data-parallel rank has been retired and is awaiting shutdown."}, 503)
        if faults.has("scaling"):
            return json_response({"error": "The model is currently scaling. Please try again later."}, 503)
        return None

    async def _answer_is_scaling(self, request: web.Request) -> web.Response:
        return json_response({"is_scaling_elastic_ep": self._core.faults.has("scaling")})

    async def add_date_header(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add a Date header with the time of this engine's clock."""
        if offset_seconds := self._core.options.clock_offset_seconds:
            response.headers["Date"] = formatdate(time.time() + offset_seconds, usegmt=True)

    async def _answer_health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        core = self._core
        options = core.options
        waiting = core.scheduler.waiting
        further_ranks = {("num_requests_running", f'engine="{rank}"'): 0.0 for rank in range(1, options.dp_size)}
        gauges: dict[tuple[str, str], float] = {
            ("num_requests_running", ""): core.scheduler.running,
            **further_ranks,
            ("num_requests_waiting", ""): waiting,
            ("kv_cache_usage_perc", ""): min(1.0, core.used_blocks / options.kv_blocks),
            ("engine_sleep_state", 'sleep_state="awake"'): 1,
            ("cache_config_info", f'block_size="{options.block_size}",num_gpu_blocks="{options.kv_blocks}"'): 1,
        }
        if options.profile.has_waiting_by_reason:
            gauges["num_requests_waiting_by_reason", 'reason="capacity"'] = waiting
        counters: dict[str, float] = {
            "prompt_tokens": core.state.prompt_tokens,
            "generation_tokens": core.state.tokens_generated,
            "prefix_cache_queries": core.cache.queries,
            "prefix_cache_hits": core.cache.hits,
            "external_prefix_cache_hits": core.metrics.prompt_tokens_by_source["external_kv_transfer"],
            "num_preemptions": core.scheduler.preemptions,
        }
        described = core.protocol.describe()
        if options.kv_protocol == "transfer":
            if options.profile_name >= "v0.33":  # older versions only log it
                counters["mooncake_num_kv_expired_reqs"] = described.get("expired", 0)
                counters["mooncake_num_failed_recvs"] = core.state.pull_failures
        elif options.connector == "nixl":
            counters["nixl_num_kv_expired_reqs"] = described.get("expired", 0)
            counters["nixl_num_failed_transfers"] = core.state.pull_failures
        text = core.metrics.render(gauges, counters)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _answer_load(self, request: web.Request) -> web.Response:
        return json_response({"server_load": self._core.state.live})

    async def _answer_version(self, request: web.Request) -> web.Response:
        return json_response({"version": self._core.options.profile.version})

    async def _answer_server_info(self, request: web.Request) -> web.Response:
        """Return the part of vLLM's configuration that concerns KV transfer.

        See entrypoints/serve/instrumentator/server_info.py.
        """
        options = self._core.options
        name = KV_CONNECTORS.get(options.connector if options.kv_protocol == "pull" else options.kv_protocol)
        role = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}[options.role]
        engine_id = self._core.protocol.describe().get("engine_id")
        transfer: dict[str, Any] | None = None
        if name is not None:
            transfer = {"kv_connector": name, "kv_role": role, "engine_id": engine_id}
            if name in ("NixlConnector", "NixlPushConnector"):
                extra: dict[str, Any] = {"bidirectional_kv_xfer": options.bidirectional_kv_xfer}
                if options.pin_seconds is not None:
                    extra["kv_lease_duration"] = options.pin_seconds
                transfer["kv_connector_extra_config"] = extra
        config: dict[str, Any] = {
            "kv_transfer_config": transfer,
            "scheduler_config": {"max_num_seqs": options.max_num_seqs},
            "cache_config": {"block_size": options.block_size},
            "structured_outputs_config": {"reasoning_parser": options.reasoning_parser},
        }
        if options.ec_role:
            media: dict[str, Any] = {"ec_connector": options.ec_connector, "ec_role": f"ec_{options.ec_role}"}
            if options.ec_connector == "ECMooncakeConnector" and options.ec_role == "consumer":
                media["ec_connector_extra_config"] = {"reservation_zmq_port": request.url.port}
            config["ec_transfer_config"] = media
        return json_response({"vllm_config": config})

    async def _answer_models(self, request: web.Request) -> web.Response:
        options = self._core.options
        card = {
            "id": options.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "sglang" if options.profile.is_sglang else "vllm",
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
            "permission": [],
        }
        adapters = [{**card, "id": name, "parent": options.model} for name in options.adapters]
        return json_response({"object": "list", "data": [card, *adapters]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Add an adapter to the list at once, as vLLM does with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""
        body, _ = await read_json(request)
        if not isinstance(body, dict) or not isinstance(body.get("lora_name"), str):
            return refuse_request(
                EngineError(400, "1 validation error:\n  Field required", "Bad Request", "body.lora_name")
            )
        self._core.options.adapters.append(body["lora_name"])
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _answer_tokenize(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        profile = self._core.options.profile
        if not isinstance(body, dict) or not ("prompt" in body or (profile.tokenizes_chats and "messages" in body)):
            return refuse_request(EngineError(400, "1 validation error:\n  Field required", "Bad Request", "body"))
        if profile.is_sglang and body.get("stream"):
            return refuse_request(EngineError(501, "does not support streaming requests", "NotImplementedError"))
        tokens = render_chat(body) if "messages" in body else encode_text(str(body["prompt"]))
        max_model_len = self._core.options.max_model_len
        return json_response(
            {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": None}
        )

    async def _answer_detokenize(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        if not isinstance(body, dict) or not isinstance(body.get("tokens"), list):
            return refuse_request(
                EngineError(400, "1 validation error:\n  Field required", "Bad Request", "body.tokens")
            )
        if self._core.options.profile.is_sglang:
            keeps = body.get("skip_special_tokens") is False
            return json_response({"text": decode_tokens(body["tokens"], keep_markers=keeps)})
        return json_response({"prompt": decode_tokens(body["tokens"], keep_markers=True)})

    async def _answer_render(self, request: web.Request) -> web.Response:
        """Return the request in the engine's form: one object for a chat, a list for completions."""
        body, _ = await read_json(request)
        is_chat = request.path == "/v1/chat/completions/render"
        try:
            ask = read_vllm_request(body, is_chat=is_chat, options=self._core.options, headers={})
        except EngineError as error:
            return refuse_request(error)
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
        rendered = [{"request_id": request_id, "token_ids": prompt, "model": ask.model} for prompt in ask.prompts]
        return json_response(rendered[0] if is_chat else rendered)

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        self._core.cache.clear()
        self._core.state.prefix_cache_resets += 1
        self._core.state.notify_waiters()
        return json_response({"success": True}) if self._core.options.profile.has_json_reset else web.Response()

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        publisher = self._core.kv_events
        return json_response({} if publisher is None else publisher.sources())

    async def _add_faults(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        try:
            for rule in body if isinstance(body, list) else [body]:
                if not isinstance(rule, dict):
                    raise UnknownFaultAction("a fault rule is a JSON object")
                fields = dict(rule)
                self._core.faults.add(fields.pop("action", ""), **fields)
        except UnknownFaultAction as error:
            return json_response({"error": str(error)}, 400)
        return json_response(self._core.faults.describe())

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self._core.faults.clear()
        return json_response([])

    async def _show_faults(self, request: web.Request) -> web.Response:
        return json_response(self._core.faults.describe())

    async def _show_state(self, request: web.Request) -> web.Response:
        core = self._core
        return json_response(
            core.state.counters()
            | core.protocol.describe()
            | {"running": core.scheduler.running, "waiting": core.scheduler.waiting}
            | {"requests": [asdict(seen) for seen in core.state.requests]}
        )
