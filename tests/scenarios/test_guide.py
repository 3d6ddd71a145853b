"""vLLM-Ascend's guide for Kimi-K2.6, followed to the letter but for the program's name and the addresses."""

from __future__ import annotations

from contextlib import AsyncExitStack

import aiohttp

from proxy.sim.engine import SimulatedEngine
from tests.deployment import answer_alone, generations, read
from tests.scenarios.program import running
from tests.test_main import KIMI_K26, words

CURL_BODY = b"""{
        "model": "kimi_k26",
        "messages": [{
            "role": "user",
            "content": [
            {
                "type": "text",
                "text": "The future of AI is"
            }]
        }],
        "max_tokens": 1024,
        "temperature": 1.0,
        "top_p": 0.95
    }"""


def on_this_host(line: list[str], prefillers: list[SimulatedEngine], decoders: list[SimulatedEngine]) -> list[str]:
    """The guide's words with the hosts and ports of engines that are here."""
    line = ["127.0.0.1" if word.startswith("141.xx.xx.") else word for word in line]
    line[line.index("--port") + 1] = "0"
    for flag, engines in (("--prefiller-ports", prefillers), ("--decoder-ports", decoders)):
        first = line.index(flag) + 1
        line[first : first + len(engines)] = [str(engine.port) for engine in engines]
    return line


async def test_the_guides_command_and_its_request_work() -> None:
    async with AsyncExitStack() as stack:
        prefillers = [SimulatedEngine(role="prefill", model="kimi_k26") for _ in range(8)]
        decoders = [SimulatedEngine(role="decode", model="kimi_k26") for _ in range(8)]
        for engine in (*prefillers, *decoders):
            await stack.enter_async_context(engine)
        line = on_this_host(words(KIMI_K26), prefillers, decoders)
        program = await stack.enter_async_context(running(line, r"pdproxy \S+ on (\S+:\d+),"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        answers = []
        for _ in range(16):
            headers = {"Content-Type": "application/json"}
            url = program.url + "/v1/chat/completions"
            async with session.post(url, data=CURL_BODY, headers=headers) as response:
                answers.append(await read(response))

        assert {answer.status for answer in answers} == {200}
        assert [answer.json["model"] for answer in answers] == ["kimi_k26"] * 16
        assert {len(generations(engine)) for engine in (*prefillers, *decoders)} == {2}
        assert sum(decoder.state.pulls for decoder in decoders) == 16
        assert not any(prefiller.pins for prefiller in prefillers)
    body = {"model": "sim", "messages": [{"role": "user", "content": "The future of AI is"}], "max_tokens": 1024}
    assert {answer.text for answer in answers} == {await answer_alone(body)}
