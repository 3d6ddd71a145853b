"""OpenAI's agents: a run of three turns with a tool, streamed and not, over responses and over chats."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from lab.client_tools.programs.part import ALIAS, END, PART, found, port


@function_tool
def find(city: str) -> str:
    """Find a city."""
    return found(city)


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port()}/v1", api_key="any", max_retries=0)
    for model in (OpenAIResponsesModel(ALIAS, client), OpenAIChatCompletionsModel(ALIAS, client)):
        agent = Agent(name="clerk", instructions="Help.", tools=[find], model=model)
        assert (await Runner.run(agent, PART)).final_output == END
        run = Runner.run_streamed(agent, PART)
        async for _ in run.stream_events():
            pass
        assert run.final_output == END
    print("runs of three turns, streamed and not, over responses and chats")


if __name__ == "__main__":
    asyncio.run(main())
