"""The generation endpoints of a simulated engine, with streamed answers and answers that are not streamed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import orjson
from aiohttp import web

from proxy.sim.dialects.endpoints import GenerationEndpoint, endpoints_of_profile, error_body
from proxy.sim.dialects.vllm_answers import DONE, Answer, DeltaCollector, make_event
from proxy.sim.dialects.vllm_requests import PRIVATE_PROMPT_IDS
from proxy.sim.engine.generation import GenerationRun
from proxy.sim.engine.stream import (
    CUT_CONNECTION_KEY,
    EventStream,
    hang_forever,
    json_response,
    read_json,
    refuse_request,
    reset_connection,
    reset_connection_soon,
)
from proxy.sim.model.request import Delta, EngineError, GenerationRequest
from proxy.sim.model.tokenizer import BOS

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sim.engine.core import EngineCore
    from proxy.sim.engine.faults import Plan


@dataclass(frozen=True, slots=True)
class GenerationExchange:
    """A request that the engine has accepted, and all that is needed to answer it."""

    request: web.Request
    endpoint: GenerationEndpoint
    ask: GenerationRequest
    answer: Answer
    plan: Plan
    headers: dict[str, str]
    """Headers of the answer."""


class GenerationRoutes:
    """The routes that generate text. `kill` ends the whole engine; the fault of the same name calls it."""

    def __init__(self, core: EngineCore, kill: Callable[[], None]) -> None:
        self._core = core
        self._kill = kill
        self._live_ids: set[str] = set()
        self._generations: dict[str, GenerationRun] = {}
        self._heedless: set[asyncio.Task[None]] = set()
        self._served: WeakSet[asyncio.Transport] = WeakSet()
        """Connections on which at least one request has begun."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(path, partial(self._count_live_request, endpoint=endpoint))
            for path, endpoint in endpoints_of_profile(self._core.options.profile).items()
        ]

    async def stop(self, app: web.Application) -> None:
        """End the answers for which no client waits."""
        for task in self._heedless:
            task.cancel()
        await asyncio.gather(*self._heedless, return_exceptions=True)

    def abort(self, beginning: str) -> None:
        """End the answers whose IDs begin with a text."""
        for answer_id, generation in list(self._generations.items()):
            if answer_id.startswith(beginning):
                generation.abort()

    def fail(self) -> None:
        """End all answers with an error."""
        for generation in list(self._generations.values()):
            generation.fail()

    async def _count_live_request(self, request: web.Request, *, endpoint: GenerationEndpoint) -> web.StreamResponse:
        """Count a request as live until its answer has ended in any way."""
        state = self._core.state
        body, body_bytes = await read_json(request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        state.live += 1
        state.record_request(request.method, request.path, headers, body, body_bytes)
        try:
            response = await self._answer_request(request, headers, body, endpoint)
            state.finished += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            state.disconnects += CUT_CONNECTION_KEY not in request
            raise
        finally:
            state.live -= 1
            state.notify_waiters()

    async def _answer_request(
        self, request: web.Request, headers: dict[str, str], body: Any, endpoint: GenerationEndpoint
    ) -> web.StreamResponse:
        core = self._core
        request_id = core.new_request_id(headers, body)
        plan = core.faults.plan(request.path, request_id, body.get("user") if isinstance(body, dict) else None)
        core.state.record_faults(len(plan))
        if plan and (refused := await self._fail_early(request, plan)):
            return refused
        if request.transport is not None:
            self._served.add(request.transport)
        if (reason := self._find_capacity_error()) is not None:
            core.state.refused += 1
            return refuse_request(reason, endpoint)
        try:
            ask = endpoint.read(_drop_unknown_members(body, plan), options=core.options, headers=headers)
        except EngineError as error:
            await self._release_rejected(error, body)
            return refuse_request(error, endpoint)
        if "other_tokenizer" in plan:
            ask = replace(ask, prompts=[[BOS, *prompt] for prompt in ask.prompts])
        if core.protocol.is_deadly(ask.kv_params):
            self._kill()
            await hang_forever()
        try:
            await core.encoder_cache.encode(ask)
        except EngineError as error:
            return refuse_request(error, endpoint)
        answer_id = endpoint.id_prefix + request_id
        if answer_id in self._live_ids and not core.options.request_id_randomization:
            return refuse_request(
                EngineError(400, f"Request id {answer_id} already running.", "BadRequestError"), endpoint
            )
        extra = {"X-Request-Id": request_id} if core.options.request_id_headers else {}
        if not ask.stream:
            extra |= self._load_report(headers)
        answer = endpoint.answer(ask, core.options, answer_id)
        exchange = GenerationExchange(request, endpoint, ask, answer, plan, extra)
        self._live_ids.add(answer_id)
        try:
            return await (self._stream_answer(exchange) if ask.stream else self._answer_whole(exchange))
        finally:
            self._live_ids.discard(answer_id)

    def _find_capacity_error(self) -> EngineError | None:
        """Return the error for a request beyond the engine's capacity; None if the engine accepts a request now."""
        most = self._core.options.max_num_queued_reqs
        if self._core.faults.has("paused"):
            return EngineError(503, "The engine is paused. Retry the request.", "RetryableRequestError")
        if most is not None and self._core.state.live > most:
            return EngineError(503, f"The queue is full: {most} requests are in flight.", "QueueOverflowError")
        return None

    async def _fail_early(self, request: web.Request, plan: Plan) -> web.Response | None:
        if rule := plan.get("slow_headers"):
            await asyncio.sleep(rule.seconds)
        if "hang_before_headers" in plan:
            await hang_forever()
        if "reset_before_headers" in plan:
            reset_connection(request)
            await hang_forever()
        if "close_reused" in plan and (transport := request.transport) is not None and transport in self._served:
            request[CUT_CONNECTION_KEY] = True
            transport.close()
            await hang_forever()
        if (rule := plan.get("kill")) and not rule.tokens:
            self._kill()
            await hang_forever()
        if rule := plan.get("refuse_status"):
            error = EngineError(rule.status, "simulated fault", "InternalServerError")
            said = error_body(error, self._core.options.profile)
            return json_response(said if rule.body is None else rule.body, rule.status, rule.headers)
        return None

    async def _release_rejected(self, error: EngineError, body: Any) -> None:
        params = body.get("kv_transfer_params") if isinstance(body, dict) else None
        if error.late and self._core.options.releases_unused and params and params.get("do_remote_prefill"):
            await self._core.protocol.release(params)

    def _load_report(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the ORCA load report, which vLLM adds only to answers that are not streamed."""
        usage = self._core.used_blocks / self._core.options.kv_blocks
        waiting = self._core.scheduler.waiting
        match headers.get("endpoint-load-metrics-format", "").lower():
            case "text":
                named = f"named_metrics.kv_cache_usage_perc={usage}, named_metrics.num_requests_waiting={waiting}"
                return {"endpoint-load-metrics": f"TEXT {named}"}
            case "json":
                report = {"named_metrics": {"kv_cache_usage_perc": usage, "num_requests_waiting": waiting}}
                return {"endpoint-load-metrics": f"JSON {orjson.dumps(report).decode()}"}
        return {}

    async def _stream_answer(self, exchange: GenerationExchange) -> web.StreamResponse:
        request, endpoint, answer, plan = exchange.request, exchange.endpoint, exchange.answer, exchange.plan
        stream = EventStream(request, answer, plan, exchange.headers)
        if not endpoint.opens_late or plan.has_any("reset_after_headers", "hang_after_headers"):
            await stream.open()
        await self._break_after_headers(request, plan)

        def on_delta(delta: Delta) -> None:
            answer.kept_params = generation.kept_params
            stream.on_delta(delta)
            self._core.state.tokens_sent += len(delta.token_ids)
            self._execute_strike(request, delta)

        generation = GenerationRun(self._core, exchange.ask, answer.answer_id, plan, on_delta)
        try:
            try:
                await self._run_generation(generation, answer, plan)
                await stream.settle()
                closing = self._closing_events(answer, plan, generation.cached_tokens)
            except EngineError as error:
                closing = [make_event(endpoint.error_event(error, answer.answer_id)), DONE]
            await stream.close(closing)
        finally:
            stream.stop()
        return stream.response

    async def _run_generation(self, generation: GenerationRun, answer: Answer, plan: Plan) -> None:
        """Run a handler. `abort` can end it."""
        if "ignore_leaving" in plan:
            task = asyncio.create_task(self._named(generation, answer))
            self._heedless.add(task)
            task.add_done_callback(self._heedless.discard)
            await asyncio.shield(task)
        else:
            await self._named(generation, answer)

    async def _named(self, generation: GenerationRun, answer: Answer) -> None:
        self._generations[answer.answer_id] = generation
        try:
            await generation.run()
        finally:
            self._generations.pop(answer.answer_id, None)

    def _closing_events(self, answer: Answer, plan: Plan, cached_tokens: int) -> list[bytes]:
        rule = plan.get("end_without_finish")
        if rule is None:
            return answer.closing(cached_tokens)
        return [DONE] if rule.done else []

    async def _answer_whole(self, exchange: GenerationExchange) -> web.StreamResponse:
        ask, answer, plan = exchange.ask, exchange.answer, exchange.plan
        collector = DeltaCollector(len(ask.prompts) * ask.samples)

        def on_delta(delta: Delta) -> None:
            collector.on_delta(delta)
            self._execute_strike(exchange.request, delta)

        generation = GenerationRun(self._core, ask, answer.answer_id, plan, on_delta)
        try:
            await self._run_generation(generation, answer, plan)
        except EngineError as error:
            return refuse_request(error, exchange.endpoint)
        if "lost_response" in plan:
            reset_connection(exchange.request)
            await hang_forever()
        answer.kept_params = generation.kept_params
        body = orjson.dumps(
            answer.whole(generation.sequences, collector.deltas, generation.cached_tokens, generation.kv_params)
        )
        self._core.state.tokens_sent += generation.completion_tokens
        return await self._send_whole(exchange, body)

    async def _send_whole(self, exchange: GenerationExchange, body: bytes) -> web.StreamResponse:
        request, plan, headers = exchange.request, exchange.plan, exchange.headers
        if not plan.has_any("truncated_json", "invalid_json", "hang_after_headers", "reset_after_headers"):
            return web.Response(body=body, headers=headers, content_type="application/json")
        if "invalid_json" in plan:
            return web.Response(body=body[: len(body) // 2], headers=headers, content_type="application/json")
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/json"
        response.content_length = len(body)
        await response.prepare(request)
        await self._break_after_headers(request, plan)
        await response.write(body[: len(body) // 2])
        request[CUT_CONNECTION_KEY] = True
        if request.transport is not None:
            request.transport.close()
        await hang_forever()
        return response

    async def _break_after_headers(self, request: web.Request, plan: Plan) -> None:
        if "reset_after_headers" in plan:
            reset_connection_soon(request)
            await hang_forever()
        if "hang_after_headers" in plan:
            await hang_forever()

    def _execute_strike(self, request: web.Request, delta: Delta) -> None:
        if delta.fault == "reset_after_tokens":
            reset_connection_soon(request)
        elif delta.fault == "kill":
            self._kill()


def _drop_unknown_members(body: Any, plan: Plan) -> Any:
    """Return the body without members that this version of the engine does not know."""
    if not isinstance(body, dict):
        return body
    if "drop_token_ids" in plan:
        body = body | {"return_token_ids": False}
    if "ignore_prompt_ids" in plan and isinstance(params := body.get("kv_transfer_params"), dict):
        unknown = ("prompt_token_ids", PRIVATE_PROMPT_IDS)
        body = body | {"kv_transfer_params": {name: params[name] for name in params if name not in unknown}}
    if "ignore_prompt_ids" in plan and "messages" in body:
        body = {name: value for name, value in body.items() if name != "input_ids"}
    return body
