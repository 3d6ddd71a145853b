"""LangChain's model for Anthropic: tools over three turns, streams and structured output."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

from lab.client_tools.programs.part import ALIAS, END, PART, SCHEMA, found, port


@tool
def find(city: str) -> str:
    """Find a city."""
    return found(city)


def main() -> None:
    url = f"http://127.0.0.1:{port()}"
    model = ChatAnthropic(model=ALIAS, base_url=url, api_key="any", max_tokens=2000, max_retries=0)
    for streamed in (False, True):
        history: list[Any] = [HumanMessage(PART)]
        for _ in range(3):
            bound = model.bind_tools([find])
            message: Any = None
            if streamed:
                for chunk in bound.stream(history):
                    message = chunk if message is None else message + chunk
            else:
                message = bound.invoke(history)
            history.append(message)
            if not message.tool_calls:
                break
            history += [ToolMessage(find.invoke(call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        assert message.text == END, message
        assert message.usage_metadata["output_tokens"] > 0
    form: Any = {"title": "city", "description": "A city.", **SCHEMA}
    city_data = model.with_structured_output(form, method="json_schema").invoke("A city.", temperature=0)
    assert set(city_data) == {"city", "size"}
    print("tools over three turns, streamed and not, structured output")


if __name__ == "__main__":
    main()
