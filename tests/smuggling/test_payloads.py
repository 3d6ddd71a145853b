"""Every payload, sent to the gateway directly. scripts/test-smuggling sends them through proxies."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from yarl import URL

from tests.canned import CannedEngine
from tests.conftest import Deploy
from tests.smuggling.__main__ import (
    DIRECT,
    NO_FAST_PATH,
    SECOND_REQUEST,
    WITHOUT_PROXY,
    Outcome,
    disagreements,
    echo,
    try_out,
)
from tests.smuggling.fronts import HttpListener
from tests.smuggling.payloads import CHUNKS, CODINGS, INNER, LENGTHS, LINES, MEANINGS, OUTER, SANE, Payload, request

GROUPS = {
    "sane": SANE,
    "lengths": LENGTHS,
    "codings": CODINGS,
    "chunks": [payload for payload in CHUNKS if payload.name != "no end"],  # it waits for more bytes
    "lines": LINES,
    "meanings": MEANINGS,
}


@pytest.mark.fault(26)
@pytest.mark.parametrize("way", sorted(WITHOUT_PROXY))
@pytest.mark.parametrize("group", GROUPS)
async def test_ambiguous_requests_are_rejected_with_one_log_line(
    deploy: Deploy, group: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = CannedEngine("both", echo)
    listen = {"fast_path": way != NO_FAST_PATH}
    gateway = await deploy(decoders=[engine], connector="plain", resume={"mode": "off"}, listen=listen)
    first = request("first") if way == SECOND_REQUEST else b""
    front = HttpListener(way, URL(gateway.url).port or 0, first=first)
    problems = []
    for number, payload in enumerate(GROUPS[group]):
        caplog.clear()
        outcome = await try_out(payload, front, engine, number, quiet_seconds=5.0)
        await (
            gateway.worker.drain_manager.wait_until_idle()
        )  # the client may read the answer before the request has ended
        problems += [f"{payload.name}: {sentence}" for sentence in disagreements(payload, way, outcome)]
        lines = [
            record for record in caplog.records if record.name.startswith("proxy.") and record.levelno >= logging.INFO
        ]
        if len(lines) > len(outcome.statuses) + 1 + bool(first):  # one per answer, and one for the other client
            problems.append(f"{payload.name}: {len(lines)} lines for {len(outcome.statuses)} answers")
        assert all(record.levelno == logging.INFO for record in lines)
    assert problems == []


# Disagreements

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
        (Outcome((200,), (OUTER,), 1, 1, INNER), "nginx", ["another client got the answer to inner"]),
        (Outcome((400,), (), 1, 1, ""), "nginx", ["another client got no answer"]),
    ],
)
def test_disagreements_are_reported(outcome: Outcome, way: str, sentences: Sequence[str]) -> None:
    assert disagreements(REFUSED, way, outcome) == sentences
