"""Requests that the gateway refuses, and requests for something else than an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.settings.client_keys import ClientKey
from proxy.wire.openai import Api
from tests.asking import request
from tests.deployment import Deployment
from tests.dialects import messages, responses
from tests.recorded.answers import models_are_known, two_models
from tests.recorded.conversation import Conversation, sending
from tests.talking import raw

CHAT: Final = request(Api.CHAT, max_tokens=2)
BODIES: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": request(Api.COMPLETIONS, max_tokens=2),
    "/v1/messages": messages.question(max_tokens=2),
    "/v1/responses": responses.question(max_output_tokens=2),
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
}
PROMPTS: Final = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/generate": "text"} | {
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
KEYS: Final = (
    ClientKey(name="team", key_sha256=hashlib.sha256(b"sk-team").hexdigest()),
    ClientKey(name="slow", key_sha256=hashlib.sha256(b"sk-slow").hexdigest(), requests_per_minute=1),
)
HTTP: Final = {
    "bad-length": raw(CHAT).replace(b"Content-Length: ", b"Content-Length: -"),
    "no-http": b"nonsense\r\n\r\n",
    "old-http": raw(CHAT).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "close": raw(CHAT, Connection="close"),
    "expect": raw(CHAT, Expect="100-continue"),
    "unknown-expectation": raw(CHAT, Expect="200-ok"),
    "bad-host": raw(CHAT).replace(b"Host: gateway", b"Host: a/b"),
    "compressed": raw(CHAT, Content_Encoding="gzip"),
    "no-json-type": raw(CHAT).replace(b"application/json", b"text/plain"),
    "bad-request-id": raw(CHAT, X_Request_Id="not acceptable"),
    "page-of-a-browser": raw(CHAT, Origin="http://page"),
    "unknown-path": raw(CHAT, path="/v1/chat/completion"),
    "wrong-method": raw(CHAT).replace(b"POST", b"PUT", 1),
    "models": b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\n\r\n",
    "liveness": b"GET /livez HTTP/1.1\r\nHost: gateway\r\n\r\n",
    "tokenize": raw({"model": "sim", "prompt": "Hello"}, path="/tokenize"),
    "count-tokens": raw(messages.question(), path="/v1/messages/count_tokens"),
    "empty-line-before": b"\r\n\r\n" + raw(CHAT),
}
MISTAKES: Final = {
    "chat-negative-max-tokens": raw({**CHAT, "max_tokens": -1}),
    "chat-messages-are-a-number": raw({**CHAT, "messages": 7}, "/v1/chat/completions"),
    "chat-too-many-samples": raw({**CHAT, "n": 10_000}),
    "chat-long-seed": raw(orjson.dumps(CHAT)[:-1] + b',"seed":' + b"9" * 500 + b"}", "/v1/chat/completions"),
    "chat-member-twice": raw(orjson.dumps(CHAT)[:-1] + b',"n":1,"\\u006e":2}', "/v1/chat/completions"),
    "completions-mixed-prompt": raw({**BODIES["/v1/completions"], "prompt": [None, "x"]}),
    "completions-no-utf-8": raw(b'{"model":"sim","prompt":"\xff"}', "/v1/completions"),
    "messages-stop-sequences-are-text": raw({**BODIES["/v1/messages"], "stop_sequences": "a"}, "/v1/messages"),
    "messages-no-max-tokens": raw({"model": "sim", "messages": CHAT["messages"]}, "/v1/messages"),
    "messages-hosted-tool": raw(
        {**BODIES["/v1/messages"], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "/v1/messages"
    ),
    "responses-earlier-response": raw({**BODIES["/v1/responses"], "previous_response_id": "r"}, "/v1/responses"),
    "responses-background": raw({**BODIES["/v1/responses"], "background": True}, "/v1/responses"),
}


def with_keys(gateway: Deployment) -> None:
    slots = {key.name: slot for slot, key in enumerate(KEYS)}
    gateway.worker.apply_snapshot(replace(gateway.worker.current_snapshot, client_keys=KEYS, slots_by_key=slots))


def with_slow_decoders(gateway: Deployment) -> None:
    """Delay decoders, because the first refusal of a pair ends the request of the other engine."""
    for engine in gateway.decoders:
        engine.faults.add("slow_headers", path="/", seconds=0.1)


def of_every_api() -> Iterator[Conversation]:
    for path, body in BODIES.items():
        api = path.rpartition("/")[2] if "chat" not in path else "chat"
        connector = "sglang_bootstrap" if path == "/generate" else "vllm_pull"
        prompt = PROMPTS[path]
        without_prompt = {name: value for name, value in body.items() if name != prompt}
        wrong = {
            "bad-json": [raw(b"{", path), raw(b"[]", path), raw(b"", path), raw(body, path)],
            "no-prompt": [raw(without_prompt, path), raw(body, path)],
            "no-key": [
                raw(body, path),
                raw(body, path, Authorization="Bearer sk-x"),
                raw(body, path, Authorization="Bearer sk-team"),
                raw(body, path, X_Api_Key="sk-slow"),
                raw(body, path, Authorization="Bearer sk-slow"),
            ],
            "longer-than-the-context": [raw({**body, "stream": stream}, path) for stream in (False, True)],
        }
        for name, requests in wrong.items():
            yield Conversation(
                name=f"refused-{api}-{name}",
                talk=sending(*requests),
                connector=connector,
                engine={"max_model_len": 4} if name == "longer-than-the-context" else {},
                prepare=with_keys if name == "no-key" else with_slow_decoders if name.startswith("longer") else None,
            )
    for path in ("/v1/chat/completions", "/v1/messages"):
        body, name = BODIES[path], path.split("/")[2]
        too_large, too_many = raw({**body, "user": "x" * 3000}, path), raw({**body, "x": [[]] * 500}, path)
        settings: dict[str, Any] = {"listen": {"max_body_bytes": 1000}}
        yield Conversation(name=f"refused-{name}-too-large", talk=sending(too_large), settings=settings)
        settings = {"listen": {"max_body_elements": 1000}}
        yield Conversation(name=f"refused-{name}-too-many-elements", talk=sending(too_many), settings=settings)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        requests = [raw({**BODIES[path], "model": model}, path) for model in ("c", "a")]
        yield Conversation(
            name=f"refused-{path.split('/')[2]}-unknown-model",
            talk=sending(*requests),
            engines=two_models,
            prepare=models_are_known,
        )


def of_http() -> Iterator[Conversation]:
    for name, request_bytes in HTTP.items():
        yield Conversation(name=f"http-{name}", talk=sending(request_bytes))
    for name, request_bytes in MISTAKES.items():
        yield Conversation(name=f"refused-{name}", talk=sending(request_bytes))


CONVERSATIONS: Final = (*of_every_api(), *of_http())
