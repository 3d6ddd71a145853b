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
            said: Any = None
            if streamed:
                for chunk in bound.stream(history):
                    said = chunk if said is None else said + chunk
            else:
                said = bound.invoke(history)
            history.append(said)
            if not said.tool_calls:
                break
            history += [ToolMessage(find.invoke(call["args"]), tool_call_id=call["id"]) for call in said.tool_calls]
        assert said.text == END, said
        assert said.usage_metadata["output_tokens"] > 0
    form: Any = {"title": "city", "description": "A city.", **SCHEMA}
    told = model.with_structured_output(form, method="json_schema").invoke("A city.", temperature=0)
    assert set(told) == {"city", "size"}
    print("tools over three turns, streamed and not, structured output")


if __name__ == "__main__":
    main()
