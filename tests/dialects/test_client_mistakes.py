"""Mistakes of clients that are not of a known shape: each is a 400 that names the member, and one line in the log."""

from __future__ import annotations

import logging

import pytest

from tests.conftest import Deploy
from tests.deployment import generations
from tests.dialects.messages import ask

QUESTIONS = {
    "/v1/completions": b'"prompt":"a"',
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"a"}]',
    "/v1/messages": b'"max_tokens":5,"messages":[{"role":"user","content":"a"}]',
    "/v1/responses": b'"input":"a"',
}
LONG_NUMBER = b"9" * 5000
TOOL = b'"tools":[{"name":"t","input_schema":{}}]'


@pytest.mark.parametrize(
    ("path", "mistake", "word"),
    [
        *((path, b'"seed":' + LONG_NUMBER, "seed") for path in QUESTIONS),
        *((path, b'"min_tokens":-' + LONG_NUMBER, "min_tokens") for path in QUESTIONS),
        ("/v1/completions", b'"max_tokens":' + LONG_NUMBER, "max_tokens"),
        ("/v1/chat/completions", b'"n":' + LONG_NUMBER, "n must be"),
        ("/v1/responses", b'"max_output_tokens":' + LONG_NUMBER, "max_output_tokens"),
        *((path, b'"temperature":1e999', "temperature") for path in ("/v1/messages", "/v1/responses")),
        ("/v1/messages", b'"stop_sequences":7', "stop_sequences"),
        ("/v1/messages", b'"stop_sequences":"a"', "stop_sequences"),
        ("/v1/messages", b'"stop_sequences":[["a"]]', "stop_sequences"),
        ("/v1/messages", TOOL + b',"tool_choice":{"type":["auto"]}', "tool_choice"),
        ("/v1/messages", TOOL + b',"tool_choice":["auto"]', "tool_choice"),
        ("/v1/messages", b'"thinking":{"type":"enabled"},"chat_template_kwargs":[1]', "chat_template_kwargs"),
        ("/v1/messages", b'"thinking":{"type":["enabled"]}', "thinking"),
        ("/v1/messages", b'"metadata":7', "metadata"),
        ("/v1/messages", b'"tools":{"name":"t"}', "tools"),
        ("/v1/responses", b'"include":7', "include"),
        ("/v1/responses", b'"include":"reasoning.encrypted_content"', "include"),
        ("/v1/responses", b'"tools":[{"type":"custom","name":"a","format":7}]', "format"),
        ("/v1/responses", b'"tools":[{"type":["function"],"name":7}],"tool_choice":"required"', "tool_choice"),
        ("/v1/responses", b'"tool_choice":{"type":{"a":1}}', "tool_choice"),
        ("/v1/responses", b'"text":{"format":{"type":["json_schema"]}}', "text.format"),
    ],
)
@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_mistake_is_refused_by_its_name(
    deploy: Deploy, path: str, mistake: bytes, word: str, stream: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await deploy(1, 1)
    caplog.set_level(logging.INFO)
    caplog.clear()
    body = b'{"model":"sim",%b,%b,"stream":%b}' % (QUESTIONS[path], mistake, stream)
    answer = await ask(gateway, body, path=path)
    assert answer.status == 400
    assert word in answer.json["error"]["message"]
    gateway.worker.metrics.settle_noted_values()
    assert [record.name for record in caplog.records if record.levelname != "DEBUG"] == ["proxy.access"]
    assert not generations(*gateway.engines)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_body_that_is_nested_too_deeply_is_called_that(deploy: Deploy, path: str) -> None:
    gateway = await deploy(1, 1)
    schema = b'{"a":' * 990 + b"1" + b"}" * 990
    named = b'"name":"t","type":"function","parameters":' if path == "/v1/responses" else b'"name":"t","input_schema":'
    answer = await ask(gateway, b'{"model":"sim",%b,"tools":[{%b%b}]}' % (QUESTIONS[path], named, schema), path=path)
    assert answer.status == 400
    assert "nested too deeply" in answer.json["error"]["message"]
