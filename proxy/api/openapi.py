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
class Operation:
    """The OpenAPI description of all routes with one path."""

    tag: str
    summary: str
    schema: str | None = None
    """Name of the schema of the request body. None: a POST takes any JSON object."""
    query: tuple[str, ...] = ()
    """Names of the parameters of the query, all optional."""
    answers: tuple[str, ...] = ("application/json",)
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


def _each(paths: str, *arguments: Any, **members: Any) -> dict[str, Operation]:
    return dict.fromkeys(paths.split(), Operation(*arguments, **members))


OPERATIONS: Final[Mapping[str, Operation]] = {
    "/v1/chat/completions": Operation(_GENERATION, "Answer a chat (OpenAI).", "Chat", answers=_STREAMED),
    "/v1/completions": Operation(_GENERATION, "Complete a prompt (OpenAI).", "Completion", answers=_STREAMED),
    "/v1/messages": Operation(_GENERATION, "Answer a conversation (Anthropic).", "Messages", answers=_STREAMED),
    "/v1/responses": Operation(_GENERATION, "Answer a response request (OpenAI).", "Response", answers=_STREAMED),
    "/generate": Operation(_GENERATION, "Complete a prompt (SGLang).", "Generate", answers=_STREAMED),
    "/v1/messages/count_tokens": Operation(_TOKENS, "Count the tokens of a conversation.", "Messages"),
    "/v1/responses/input_tokens": Operation(_TOKENS, "Count the tokens of a response request.", "Response"),
    "/v1/models": Operation(_TOKENS, "List the models of all engines."),
    "/v1/models/{model}": Operation(_TOKENS, "Show one model."),
    "/tokenize": Operation(_TOKENS, "Tokenize a prompt or a chat. One engine answers."),
    "/detokenize": Operation(_TOKENS, "Return the text of token ids. One engine answers."),
    "/tokenizer_info": Operation(_TOKENS, "Show the configuration of an engine's tokenizer.", query=("model",)),
    **_each(
        "/v1/chat/completions/render /v1/completions/render /v1/messages/render /v1/responses/render",
        _TOKENS,
        "Return the prompt that an engine makes of a request.",
    ),
    "/v1/embeddings": Operation(_POOLING, "Return embeddings. One engine answers."),
    "/pooling": Operation(_POOLING, "Return pooled hidden states. One engine answers."),
    "/classify": Operation(_POOLING, "Classify texts. One engine answers."),
    **_each("/score /v1/score", _POOLING, "Score pairs of texts. One engine answers."),
    **_each("/rerank /v1/rerank /v2/rerank", _POOLING, "Rank documents by relevance. One engine answers."),
    "/livez": Operation(_PROBES, "Return 200 while the process works.", is_open=True),
    **_each(
        "/readyz /health /healthz /ping",
        _PROBES,
        "Return 200 if every role has a healthy engine, and 503 otherwise or while pdproxy drains.",
        query=("model",),
        is_open=True,
    ),
    "/health_generate": Operation(_PROBES, "Return 200 if every role has a healthy engine.", is_open=True),
    "/healthcheck": Operation(_PROBES, "Count the instances and the running requests.", is_open=True),
    "/version": Operation(_PROBES, "Show the version of pdproxy.", is_open=True),
    "/metrics": Operation(_PROBES, "Return the metrics for Prometheus.", answers=("text/plain",), is_open=True),
    "/metrics/history": Operation(_PROBES, "Return the traffic of the last five minutes.", is_open=True),
    "/": Operation(
        _PROBES,
        "List the routes. Browsers get the status page.",
        answers=("application/json", "text/html"),
        is_open=True,
    ),
    _PATH: Operation(_PROBES, "Return this description.", is_open=True),
    **_each("/model_info /get_model_info", _SGLANG, "Show the model of an engine."),
    **_each(
        "/server_info /get_server_info", _SGLANG, "Show the options and the load of the engines.", query=("include",)
    ),
    "/v1/loads": Operation(_SGLANG, "Show the loads of the engines.", query=("include",)),
    "/instances": Operation(_ADMINISTRATION, "Show all instances."),
    "/instances/add": Operation(_ADMINISTRATION, "Add instances.", "Instances", ("dry_run",)),
    "/instances/remove": Operation(_ADMINISTRATION, "Drain and remove instances.", "Instances", ("dry_run",)),
    "/instances/enable": Operation(_ADMINISTRATION, "Let instances receive requests.", "Instances", ("dry_run",)),
    "/instances/disable": Operation(_ADMINISTRATION, "Send no new requests to instances.", "Instances", ("dry_run",)),
    "/instances/role": Operation(_ADMINISTRATION, "Change the roles of elastic instances.", "Role", ("dry_run",)),
    "/instances/weight": Operation(_ADMINISTRATION, "Set the share of requests of instances.", "Weight", ("dry_run",)),
    **_each(
        "/reset_prefix_cache /flush_cache",
        _ADMINISTRATION,
        "Clear the prefix caches of all or the selected engines.",
        query=("role", "instance"),
    ),
    "/start_profile": Operation(_ADMINISTRATION, "Start the profiler of engines.", query=("role", "instance")),
    "/stop_profile": Operation(_ADMINISTRATION, "Stop the profiler of engines.", query=("role", "instance")),
    **_each(
        "/sleep /release_memory_occupation",
        _ADMINISTRATION,
        "Disable instances, and put their engines to sleep when their requests have ended.",
        query=("role", "instance", "level", "tags"),
    ),
    **_each(
        "/wake_up /resume_memory_occupation",
        _ADMINISTRATION,
        "Wake up engines, and enable their instances.",
        query=("role", "instance", "tags"),
    ),
    "/admin/config": Operation(_ADMINISTRATION, "Show every option in force and its origin. Keys are masked."),
    "/admin/status": Operation(_ADMINISTRATION, "Show the state of the gateway, and the reasons for it."),
    "/admin/reload": Operation(_ADMINISTRATION, "Read the configuration again.", query=("dry_run",)),
    "/admin/usage": Operation(_ADMINISTRATION, "Show the usage of client keys by hour.", query=("since", "key")),
    "/admin/requests": Operation(_ADMINISTRATION, "Show the receipt of one request.", query=("id", "engine_id")),
    "/admin/requests/recent": Operation(
        _ADMINISTRATION,
        "Show the receipts of recent requests.",
        query=("limit", "failed", "saved", "slow", "instance", "model", "key"),
    ),
}
"""The descriptions by path. For a route that has none, the path itself is the description."""


def _object(required: str, **properties: Any) -> dict[str, Any]:
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
    "Chat": _object("messages", model=_TEXT, messages=_OBJECTS, max_tokens=_NUMBER_OF_TOKENS, stream=_STREAM),
    "Completion": _object("prompt", model=_TEXT, prompt=_TEXT_OR_LIST, max_tokens=_NUMBER_OF_TOKENS, stream=_STREAM),
    "Messages": _object("messages", model=_TEXT, messages=_OBJECTS, max_tokens=_NUMBER_OF_TOKENS, stream=_STREAM),
    "Response": _object("input", model=_TEXT, input=_TEXT_OR_LIST, max_output_tokens=_NUMBER_OF_TOKENS, stream=_STREAM),
    "Generate": _object(
        "", text=_TEXT, input_ids={"type": "array"}, sampling_params={"type": "object"}, stream=_STREAM
    ),
    "Instances": _object("type instances", **_CHANGE),
    "Role": _object(
        "role instances",
        role={"enum": ["prefill", "decode", "auto"]},
        instances=_CHANGE["instances"],
        evacuate_after=_CHANGE["evacuate_after"],
    ),
    "Weight": _object("type instances weight", **_CHANGE),
    "Error": _object(
        "error", error=_object("message", message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={})
    ),
}


class OpenApi:
    """The route that returns the description. Each listener describes its own routes."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the route `/openapi.json` for the application."""
        return [web.get(_PATH, self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        routes = [(route.method, route.resource.canonical) for route in request.app.router.routes() if route.resource]
        return json_response(description([(method, path) for method, path in routes if method != hdrs.METH_HEAD]))


def description(routes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the OpenAPI document for routes, each a method and a path."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        paths.setdefault(path, {})[method.lower()] = _operation(method, path)
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


def _operation(method: str, path: str) -> dict[str, Any]:
    described = OPERATIONS.get(path, Operation(_PROBES, f"{method} {path}"))
    key = "administrator" if described.tag == _ADMINISTRATION else "client"
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in _parameters_of(path)),
        *({"name": name, "in": "query", "schema": _TEXT} for name in described.query),
    ]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        "tags": [described.tag],
        "summary": described.summary,
        "security": [] if described.is_open else [{key: []}],
        "responses": {
            "200": {"description": "Success", "content": {kind: {} for kind in described.answers}},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if method == hdrs.METH_POST:
        schema = {"$ref": f"#/components/schemas/{described.schema}"} if described.schema else {"type": "object"}
        operation["requestBody"] = {
            "required": described.schema is not None,
            "content": {"application/json": {"schema": schema}},
        }
    return operation
