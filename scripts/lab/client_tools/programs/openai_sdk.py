"""OpenAI's SDK: responses, streams, tools, images, structured output and errors, and chats beside them."""

from __future__ import annotations

import json
from typing import Any

import openai

from lab.client_tools.programs.part import ALIAS, CITY, END, MODEL, PART, PICTURE, SCHEMA, found, port

TOOLS = [{"type": "function", "name": "find", "description": "Finds a city.", "parameters": CITY, "strict": True}]


def main() -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port()}/v1", api_key="any", max_retries=0)
    assert MODEL in [model.id for model in client.models.list()]
    asked: Any = {"model": MODEL, "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 20}
    response = client.responses.create(**asked)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(**asked) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert told == response.output_text
    chat = client.chat.completions.create(
        model=ALIAS,
        max_tokens=20,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    )
    assert (chat.choices[0].message.content, chat.model) == (told, ALIAS)
    for streamed in (False, True):
        _use_tools(client, streamed=streamed)
    _look(client)
    _structure(client)
    _err(client)
    print("response, stream, chat, tools over three turns, image, structured output, errors")


def _say(client: openai.OpenAI, *, streamed: bool, **asked: Any) -> Any:
    if not streamed:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        return stream.get_final_response()


def _use_tools(client: openai.OpenAI, *, streamed: bool) -> None:
    history: list[Any] = [{"role": "user", "content": PART}]
    more = {"chat_template_kwargs": {"thinking": True}}
    for _ in range(3):
        asked = {"model": ALIAS, "input": history, "tools": TOOLS, "extra_body": more, "store": False}
        said = _say(client, streamed=streamed, **asked)
        assert (said.model, said.output[0].type) == (ALIAS, "reasoning")
        history += [item.to_dict() for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        history += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": found(json.loads(call.arguments)["city"]),
            }
            for call in calls
        ]
        if not calls:
            break
    assert (said.status, said.output_text) == ("completed", END)


def _look(client: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    content: Any = [image, {"type": "input_text", "text": "What is it?"}]
    given: Any = [{"role": "user", "content": content}]
    assert client.responses.create(model=MODEL, input=given, max_output_tokens=8).output_text


def _structure(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    said = client.responses.create(model=MODEL, input="A city.", text=form, temperature=0, max_output_tokens=300)
    assert set(json.loads(said.output_text)) == {"city", "size"}


def _err(client: openai.OpenAI) -> None:
    for expected, asked in (
        (openai.NotFoundError, {"model": "other", "input": "Hello"}),
        (openai.BadRequestError, {"model": MODEL, "input": "Hello", "previous_response_id": "resp_1"}),
        (openai.BadRequestError, {"model": MODEL, "input": "Hello", "tools": [{"type": "web_search"}]}),
    ):
        for streamed in (False, True):
            try:
                list(client.responses.create(**asked, stream=streamed))
            except expected:
                pass
            else:
                raise AssertionError(f"{expected.__name__} was expected")
    try:
        client.responses.retrieve("resp_1")
    except openai.NotFoundError as error:
        assert "not kept here" in str(error)  # noqa: PT017 no test of pytest's


if __name__ == "__main__":
    main()
