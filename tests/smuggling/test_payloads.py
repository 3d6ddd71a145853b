"""Every payload to the gateway itself; with proxies in front of it, scripts/test-smuggling sends them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from yarl import URL

from tests.canned import CannedEngine
from tests.smuggling.__main__ import (
    BEHIND,
    DIRECT,
    SLOW_ROAD,
    WITHOUT_PROXY,
    Outcome,
    disagreements,
    echo,
    try_out,
)
from tests.smuggling.fronts import HttpListener
from tests.smuggling.payloads import CHUNKS, CODINGS, INNER, LENGTHS, LINES, MEANINGS, OUTER, SANE, Payload, request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Deploy

GROUPS = {
    "sane": SANE,
    "lengths": LENGTHS,
    "codings": CODINGS,
    "chunks": [payload for payload in CHUNKS if payload.name != "no end"],  # which waits for more
    "lines": LINES,
    "meanings": MEANINGS,
}


@pytest.mark.fault(26)
@pytest.mark.parametrize("way", sorted(WITHOUT_PROXY))
@pytest.mark.parametrize("group", GROUPS)
async def test_what_could_be_read_in_two_ways_is_refused_and_that_in_one_line(
    deploy: Deploy, group: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = CannedEngine("both", echo)
    listen = {"fast_path": way != SLOW_ROAD}
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "off"}, listen=listen)
    first = request("first") if way == BEHIND else b""
    front = HttpListener(way, URL(gateway.url).port or 0, first=first)
    found = []
    for number, payload in enumerate(GROUPS[group]):
        caplog.clear()
        outcome = await try_out(payload, front, engine, number, quiet_seconds=5.0)
        await gateway.worker.drain.idle()  # which an answer's reader may be ahead of
        found += [f"{payload.name}: {sentence}" for sentence in disagreements(payload, way, outcome)]
        lines = [
            record for record in caplog.records if record.name.startswith("proxy.") and record.levelno >= logging.INFO
        ]
        if len(lines) > len(outcome.statuses) + 1 + bool(first):  # one for each answer, one for somebody else's request
            found.append(f"{payload.name}: {len(lines)} lines for {len(outcome.statuses)} answers")
        assert all(record.levelno == logging.INFO for record in lines)
    assert found == []


# How that is judged

REFUSED = Payload("refused", b"", ())


@pytest.mark.parametrize(
    ("outcome", "way", "sentences"),
    [
        (Outcome((400,), (), 0, 0, "its own"), DIRECT, []),
        (
            Outcome((200,), (OUTER,), 0, 0, "its own"),
            DIRECT,
            ["the engine saw ('outer',) instead of nothing", "it was not refused"],
        ),
        (Outcome((400,), (), 1, 1, "its own"), "nginx", []),
        (Outcome((200, 200), (OUTER, INNER), 2, 2, "its own"), "nginx", []),
        (Outcome((200,), (OUTER,), 1, 2, "its own"), "nginx", ["2 answers of the gateway to 1 requests"]),
        (
            Outcome((200,), (OUTER, INNER), 1, 1, "its own"),
            "nginx",
            ["1 good answers to 2 requests at the engine", "2 requests at the engine, and 1 were sent"],
        ),
        (Outcome((200,), (OUTER,), 1, 1, INNER), "nginx", ["somebody else got the answer to inner"]),
        (Outcome((400,), (), 1, 1, ""), "nginx", ["somebody else got no answer"]),
    ],
)
def test_what_must_not_be_is_told(outcome: Outcome, way: str, sentences: Sequence[str]) -> None:
    assert disagreements(REFUSED, way, outcome) == sentences
