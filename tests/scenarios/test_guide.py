"""vLLM-Ascend's guides, followed to the letter but for the program's name and the addresses."""

from __future__ import annotations

from contextlib import AsyncExitStack

import aiohttp
import pytest

from proxy.sim.engine import SimulatedEngine
from tests.asking import answer_alone, read
from tests.deployment import generations
from tests.scenarios.program import SERVING, running
from tests.test_main import GUIDES, words

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
    """Return the guide's command with hosts and ports of engines on this host."""
    line = ["127.0.0.1" if word.startswith(("141.xx.xx.", "192.0.0.")) else word for word in line]
    line[line.index("--port") + 1] = "0"
    for flag, engines in (("--prefiller-port", prefillers), ("--decoder-port", decoders)):
        first = next(at for at, word in enumerate(line) if word.startswith(flag)) + 1
        line[first : first + len(engines)] = [str(engine.port) for engine in engines]
    return line


@pytest.mark.parametrize(
    ("guide", "prefill", "decode"),
    [(GUIDES["k2.6"], 8, 8), (GUIDES["k2.5"], 4, 32), (GUIDES["one-node"], 1, 1)],
    ids=["k2.6", "k2.5", "one-node"],
)
async def test_guides_command_and_its_request_work(guide: str, prefill: int, decode: int) -> None:
    times = 2 * decode
    async with AsyncExitStack() as stack:
        prefillers = [SimulatedEngine(role="prefill", model="kimi_k26") for _ in range(prefill)]
        decoders = [SimulatedEngine(role="decode", model="kimi_k26") for _ in range(decode)]
        for engine in (*prefillers, *decoders):
            await stack.enter_async_context(engine)
        line = on_this_host(words(guide), prefillers, decoders)
        program = await stack.enter_async_context(running(line, SERVING))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        answers = []
        for _ in range(times):
            headers = {"Content-Type": "application/json"}
            url = program.url + "/v1/chat/completions"
            async with session.post(url, data=CURL_BODY, headers=headers) as response:
                answers.append(await read(response))

        assert {answer.status for answer in answers} == {200}
        assert {answer.json["model"] for answer in answers} == {"kimi_k26"}
        shares = [len(generations(prefiller)) for prefiller in prefillers]
        assert sum(shares) == times
        assert min(shares) > 0
        assert {(len(generations(decoder)), decoder.state.pulls) for decoder in decoders} == {(2, 2)}
        assert not any(prefiller.pins for prefiller in prefillers)
    body = {"model": "sim", "messages": [{"role": "user", "content": "The future of AI is"}], "max_tokens": 1024}
    assert {answer.text for answer in answers} == {await answer_alone(body)}
