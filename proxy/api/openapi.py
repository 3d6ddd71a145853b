"""`GET /openapi.json`: the OpenAPI 3.1 description of the routes of a listener."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiohttp import hdrs, web

from proxy import __version__
from proxy.listener.replies import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PATH: Final = "/openapi.json"
_parameters_of: Final = re.compile(r"\{(\w+)\}").findall


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """The OpenAPI description of all routes with one path."""

    tag_name: str
    summary: str
    body_schema: str | None = None
    """Name of the schema of the request body. None: a POST takes any JSON object."""
    query_parameters: tuple[str, ...] = ()
    """Names of the parameters of the query, all optional."""
    answer_types: tuple[str, ...] = ("application/json",)
    """Content types of a successful answer."""
    is_open: bool = False
    """Whether the route needs no key."""


_GENERATION: Final = "Generation"
_TOKENS: Final = "Tokens and models"
_POOLING: Final = "Pooling"
_PROBES: Final = "Probes"
_ADMINISTRATION: Final = "Administration"
_SGLANG: Final = "SGLang"
_STREAMED: Final = ("application/json", "text/event-stream")


def _operations_for(route_paths: str, *arguments: Any, **members: Any) -> dict[str, RouteDescription]:
    return dict.fromkeys(route_paths.split(), RouteDescription(*arguments, **members))


OPERATIONS: Final[Mapping[str, RouteDescription]] = {
    "/v1/chat/completions": RouteDescription(_GENERATION, "Answer a chat (OpenAI).", "Chat", answer_types=_STREAMED),
    "/v1/completions": RouteDescription(
        _GENERATION, "Complete a prompt (OpenAI).", "Completion", answer_types=_STREAMED
    ),
    "/v1/messages": RouteDescription(
        _GENERATION, "Answer a conversation (Anthropic).", "Messages", answer_types=_STREAMED
    ),
    "/v1/responses": RouteDescription(
        _GENERATION, "Answer a response request (OpenAI).", "Response", answer_types=_STREAMED
    ),
    "/generate": RouteDescription(_GENERATION, "Complete a prompt (SGLang).", "Generate", answer_types=_STREAMED),
    "/v1/messages/count_tokens": RouteDescription(_TOKENS, "Count the tokens of a conversation.", "Messages"),
    "/v1/responses/input_tokens": RouteDescription(_TOKENS, "Count the tokens of a response request.", "Response"),
    "/v1/models": RouteDescription(_TOKENS, "List the models of all engines."),
    "/v1/models/{model}": RouteDescription(_TOKENS, "Show one model."),
    "/tokenize": RouteDescription(_TOKENS, "Tokenize a prompt or a chat. One engine answers."),
    "/detokenize": RouteDescription(_TOKENS, "Return the text of token ids. One engine answers."),
    "/tokenizer_info": RouteDescription(
        _TOKENS, "Show the configuration of an engine's tokenizer.", query_parameters=("model",)
    ),
    **_operations_for(
        "/v1/chat/completions/render /v1/completions/render /v1/messages/render /v1/responses/render",
        _TOKENS,
        "Return the prompt that an engine makes of a request.",
    ),
    "/v1/embeddings": RouteDescription(_POOLING, "Return embeddings. One engine answers."),
    "/pooling": RouteDescription(_POOLING, "Return pooled hidden states. One engine answers."),
    "/classify": RouteDescription(_POOLING, "Classify texts. One engine answers."),
    **_operations_for("/score /v1/score", _POOLING, "Score pairs of texts. One engine answers."),
    **_operations_for("/rerank /v1/rerank /v2/rerank", _POOLING, "Rank documents by relevance. One engine answers."),
    "/livez": RouteDescription(_PROBES, "Return 200 while the process works.", is_open=True),
    **_operations_for(
        "/readyz /health /healthz /ping",
        _PROBES,
        "Return 200 if every role has a healthy engine, and 503 otherwise or while pdproxy drains.",
        query_parameters=("model",),
        is_open=True,
    ),
    "/health_generate": RouteDescription(_PROBES, "Return 200 if every role has a healthy engine.", is_open=True),
    "/healthcheck": RouteDescription(_PROBES, "Count the instances and the running requests.", is_open=True),
    "/version": RouteDescription(_PROBES, "Show the version of pdproxy.", is_open=True),
    "/metrics": RouteDescription(
        _PROBES, "Return the metrics for Prometheus.", answer_types=("text/plain",), is_open=True
    ),
    "/metrics/history": RouteDescription(_PROBES, "Return the traffic of the last five minutes.", is_open=True),
    "/": RouteDescription(
        _PROBES,
        "List the routes. Browsers get the status page.",
        answer_types=("application/json", "text/html"),
        is_open=True,
    ),
    _PATH: RouteDescription(_PROBES, "Return this description.", is_open=True),
    **_operations_for("/model_info /get_model_info", _SGLANG, "Show the model of an engine."),
    **_operations_for(
        "/server_info /get_server_info",
        _SGLANG,
        "Show the options and the load of the engines.",
        query_parameters=("include",),
    ),
    "/v1/loads": RouteDescription(_SGLANG, "Show the loads of the engines.", query_parameters=("include",)),
    "/instances": RouteDescription(_ADMINISTRATION, "Show all instances."),
    "/instances/add": RouteDescription(_ADMINISTRATION, "Add instances.", "Instances", ("dry_run",)),
    "/instances/remove": RouteDescription(_ADMINISTRATION, "Drain and remove instances.", "Instances", ("dry_run",)),
    "/instances/enable": RouteDescription(
        _ADMINISTRATION, "Let instances receive requests.", "Instances", ("dry_run",)
    ),
    "/instances/disable": RouteDescription(
        _ADMINISTRATION, "Send no new requests to instances.", "Instances", ("dry_run",)
    ),
    "/instances/role": RouteDescription(
        _ADMINISTRATION, "Change the roles of elastic instances.", "Role", ("dry_run",)
    ),
    "/instances/weight": RouteDescription(
        _ADMINISTRATION, "Set the share of requests of instances.", "Weight", ("dry_run",)
    ),
    **_operations_for(
        "/reset_prefix_cache /flush_cache",
        _ADMINISTRATION,
        "Clear the prefix caches of all or the selected engines.",
        query_parameters=("role", "instance"),
    ),
    "/start_profile": RouteDescription(
        _ADMINISTRATION, "Start the profiler of engines.", query_parameters=("role", "instance")
    ),
    "/stop_profile": RouteDescription(
        _ADMINISTRATION, "Stop the profiler of engines.", query_parameters=("role", "instance")
    ),
    **_operations_for(
        "/sleep /release_memory_occupation",
        _ADMINISTRATION,
        "Disable instances, and put their engines to sleep when their requests have ended.",
        query_parameters=("role", "instance", "level", "tags"),
    ),
    **_operations_for(
        "/wake_up /resume_memory_occupation",
        _ADMINISTRATION,
        "Wake up engines, and enable their instances.",
        query_parameters=("role", "instance", "tags"),
    ),
    "/admin/config": RouteDescription(_ADMINISTRATION, "Show every option in force and its origin. Keys are masked."),
    "/admin/status": RouteDescription(_ADMINISTRATION, "Show the state of the gateway, and the reasons for it."),
    "/admin/reload": RouteDescription(_ADMINISTRATION, "Read the configuration again.", query_parameters=("dry_run",)),
    "/admin/usage": RouteDescription(
        _ADMINISTRATION, "Show the usage of client keys by hour.", query_parameters=("since", "key")
    ),
    "/admin/requests": RouteDescription(
        _ADMINISTRATION, "Show the receipt of one request.", query_parameters=("id", "engine_id")
    ),
    "/admin/requests/recent": RouteDescription(
        _ADMINISTRATION,
        "Show the receipts of recent requests.",
        query_parameters=("limit", "failed", "saved", "slow", "instance", "model", "key"),
    ),
}
"""The descriptions by path. For a route that has none, the path itself is the description."""


def _object_schema(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": True}


_TEXT: Final = {"type": "string"}
_NUMBER_OF_TOKENS: Final = {"type": "integer", "minimum": 1}
_STREAM: Final = {"type": "boolean", "default": False}
_OBJECTS: Final = {"type": "array", "items": {"type": "object"}}
_TEXT_OR_LIST: Final = {"oneOf": [_TEXT, {"type": "array"}]}
_CHANGE: Final = {
    "type": {"enum": ["prefill", "decode", "encode"]},
    "instances": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}], "description": "host:port, or a list of them"},
    "send_key": {"type": "boolean", "default": False},
    "elastic": {"type": "boolean", "default": False},
    "evacuate_after": {"type": ["number", "null"], "minimum": 0, "description": "Seconds, or null for no limit"},
    "weight": {"type": "integer", "minimum": 1, "maximum": 100},
}
# Engines check all other members.
_SCHEMAS: Final[Mapping[str, Any]] = {
    "Chat": _object_schema("messages", model=_TEXT, messages=_OBJECTS, max_tokens=_NUMBER_OF_TOKENS, stream=_STREAM),
    "Completion": _object_schema(
        "prompt", model=_TEXT, prompt=_TEXT_OR_LIST, max_tokens=_NUMBER_OF_TOKENS, stream=_STREAM
    ),
    "Messages": _object_schema(
        "messages", model=_TEXT, messages=_OBJECTS, max_tokens=_NUMBER_OF_TOKENS, stream=_STREAM
    ),
    "Response": _object_schema(
        "input", model=_TEXT, input=_TEXT_OR_LIST, max_output_tokens=_NUMBER_OF_TOKENS, stream=_STREAM
    ),
    "Generate": _object_schema(
        "", text=_TEXT, input_ids={"type": "array"}, sampling_params={"type": "object"}, stream=_STREAM
    ),
    "Instances": _object_schema("type instances", **_CHANGE),
    "Role": _object_schema(
        "role instances",
        role={"enum": ["prefill", "decode", "auto"]},
        instances=_CHANGE["instances"],
        evacuate_after=_CHANGE["evacuate_after"],
    ),
    "Weight": _object_schema("type instances weight", **_CHANGE),
    "Error": _object_schema(
        "error", error=_object_schema("message", message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={})
    ),
}


class OpenApi:
    """The route that returns the description. Each listener describes its own routes."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the route `/openapi.json` for the application."""
        return [web.get(_PATH, self._show_document)]

    async def _show_document(self, request: web.Request) -> web.Response:
        routes = [(route.method, route.resource.canonical) for route in request.app.router.routes() if route.resource]
        return json_response(
            make_openapi_document([(method, path) for method, path in routes if method != hdrs.METH_HEAD])
        )


def make_openapi_document(routes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the OpenAPI document for routes, each a method and a path."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        paths.setdefault(path, {})[method.lower()] = _describe_operation(method, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pdproxy",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "client": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Key of auth.client_keys_file, if it is set",
                },
                "administrator": {"type": "http", "scheme": "bearer", "description": "Key of auth.admin_key"},
            },
        },
    }


def _describe_operation(method: str, path: str) -> dict[str, Any]:
    described = OPERATIONS.get(path, RouteDescription(_PROBES, f"{method} {path}"))
    key = "administrator" if described.tag_name == _ADMINISTRATION else "client"
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in _parameters_of(path)),
        *({"name": name, "in": "query", "schema": _TEXT} for name in described.query_parameters),
    ]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        "tags": [described.tag_name],
        "summary": described.summary,
        "security": [] if described.is_open else [{key: []}],
        "responses": {
            "200": {"description": "Success", "content": {kind: {} for kind in described.answer_types}},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if method == hdrs.METH_POST:
        schema = (
            {"$ref": f"#/components/schemas/{described.body_schema}"} if described.body_schema else {"type": "object"}
        )
        operation["requestBody"] = {
            "required": described.body_schema is not None,
            "content": {"application/json": {"schema": schema}},
        }
    return operation
