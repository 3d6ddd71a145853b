"""Anthropic's SDK: messages, streams, tools, thinking, images, structured output, counts and errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic

from lab.client_tools.programs.part import ALIAS, CITY, END, MODEL, PART, PICTURE, SCHEMA, found, port

TOOLS = [{"name": "find", "description": "Finds a city.", "input_schema": CITY}]


def main() -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port()}", api_key="any", max_retries=0)
    hello: Any = [{"role": "user", "content": "Hello"}]
    message = client.messages.create(model=MODEL, max_tokens=20, messages=hello, system="Be brief.")
    assert message.stop_reason == "max_tokens"
    assert message.content[0].text
    with client.messages.stream(model=MODEL, max_tokens=20, messages=hello, system="Be brief.") as stream:
        told = "".join(stream.text_stream)
        assert told == message.content[0].text == stream.get_final_message().content[0].text
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=hello, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    for streamed in (False, True):
        _use_tools(client, streamed=streamed)
    _think(client)
    _look(client)
    _structure(client)
    _err(client)
    print("message, stream, count, tools over three turns, thinking, image, structured output, errors")


def _say(client: anthropic.Anthropic, *, streamed: bool, **arguments: Any) -> Any:
    if not streamed:
        return client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        return stream.get_final_message()


def _use_tools(client: anthropic.Anthropic, *, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": PART}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for _ in range(3):
        arguments = {"model": ALIAS, "max_tokens": 2000, "messages": messages, "tools": TOOLS, "thinking": thinking}
        said = _say(client, streamed=streamed, **arguments)
        assert said.model == ALIAS
        messages.append({"role": "assistant", "content": said.content})
        uses = [block for block in said.content if block.type == "tool_use"]
        if not uses:
            break
        assert said.stop_reason == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": found(use.input["city"])} for use in uses]
        messages.append({"role": "user", "content": results})
    assert (said.stop_reason, said.content[-1].text, len(messages)) == ("end_turn", END, 6)


def _think(client: anthropic.Anthropic) -> None:
    arguments: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    messages: Any = [{"role": "user", "content": "Think."}]
    with client.messages.stream(model=MODEL, max_tokens=1500, messages=messages, **arguments) as stream:
        first, *_ = stream.get_final_message().content
    assert (first.type, bool(first.thinking), bool(first.signature)) == ("thinking", True, True)


def _look(client: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": content}]).content


def _structure(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    messages: Any = [{"role": "user", "content": "A city."}]
    arguments: Any = {"output_config": form, "extra_body": {"temperature": 0}}
    said = client.messages.create(model=MODEL, max_tokens=300, messages=messages, **arguments)
    assert set(json.loads(said.content[-1].text)) == {"city", "size"}


def _err(client: anthropic.Anthropic) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    document: Any = [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}]
    for expected, arguments in (
        (anthropic.NotFoundError, {"model": "other", "max_tokens": 8, "messages": hello}),
        (anthropic.BadRequestError, {"model": MODEL, "max_tokens": 8, "messages": document}),
    ):
        for streamed in (False, True):
            try:
                _say(client, streamed=streamed, **arguments)
            except expected as error:
                assert error.body["type"] == "error", error.body  # noqa: PT017 no test of pytest's
            else:
                raise AssertionError(f"{expected.__name__} was expected")


if __name__ == "__main__":
    main()
