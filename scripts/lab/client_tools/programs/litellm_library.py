"""litellm: over chats, messages and responses."""

from __future__ import annotations

from typing import Any

import litellm

from lab.client_tools.programs.part import ALIAS, CITY, MODEL, PART, port

TOOL = {"type": "function", "function": {"name": "find", "description": "Finds a city.", "parameters": CITY}}


def main() -> None:
    url = f"http://127.0.0.1:{port()}"
    messages: Any = [{"role": "user", "content": PART}]
    for model, base in ((f"openai/{MODEL}", f"{url}/v1"), (f"anthropic/{ALIAS}", url)):
        asked: Any = {"model": model, "api_base": base, "api_key": "any", "messages": messages, "max_tokens": 500}
        response = litellm.completion(**asked, tools=[TOOL])
        assert response.choices[0].finish_reason == "tool_calls"
        assert response.choices[0].message.tool_calls[0].function.name == "find"
        chunks = list(litellm.completion(**asked, tools=[TOOL], stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=messages)
        assert built.choices[0].message.tool_calls[0].function.arguments == '{"city":"Zürich"}', built
    responses_answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="any", input="Hello", max_output_tokens=8
    )
    assert responses_answer.output[0].content[0].text
    print("chats, messages and responses, with tools, streamed and not")


if __name__ == "__main__":
    main()
