"""The benchmark: checks of answers, figures, the table, targets and the chart."""

from __future__ import annotations

import os
import time
from math import isnan, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest

from lab.bench.course import DIRECT, Measurement, Measurements
from lab.bench.duel import opponent, ratios, verdict
from lab.bench.load import Result, http_request, problem
from lab.bench.report import chart, judged, table
from lab.bench.scenarios import MEDIA, PACED, SHORT_ANSWER, SHORT_STREAM, SLOW_5000, Scenario, scenarios
from lab.common import engines, peers
from lab.common.engines import without_image
from lab.common.load import Answer, Histogram
from lab.common.proc import cpu_seconds

SCENARIOS = {scenario.name: scenario for scenario in scenarios(1.0)}
ANSWER = SCENARIOS[SHORT_ANSWER]
STREAM = SCENARIOS[SHORT_STREAM]


def histogram(*milliseconds: float) -> Histogram:
    taken = Histogram()
    for one in milliseconds:
        taken.add(one / 1000)
    return taken


def measurement(*, cpu_ms: float = 0.0, first_token_ms: float = 0.0, kibibytes: float = 0.0, **of: Any) -> Measurement:
    """Return a measurement of one second."""
    result = Result(seconds=1.0, first_tokens=histogram(first_token_ms).counts)
    for name, value in of.items():
        setattr(result, name, value)
    return Measurement(result, cpu_ms / 1000, 0.0, 1024 * kibibytes)


def taken(**of: dict[str, Measurement]) -> Measurements:
    """Return measurements by program and scenario."""
    names = {"direct": DIRECT, "ours": peers.OURS, "vllm": "vllm-router", "sglang": "sglang-router"}
    measurements = Measurements(tuple(names[program] for program in of))
    for program, by_scenario in of.items():
        for scenario, one in by_scenario.items():
            measurements.add(names[program], scenario, one)
    return measurements


def body_of(answer: bytes) -> bytes:
    """Return the body without head and chunks."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return body
    lines = body.split(b"\r\n")
    return b"".join(lines[1::2])


def answer(body: bytes, status: int = 200) -> Answer:
    """Return a complete answer."""
    return Answer(status, body, 0.0, None, 0.0, True)


STREAMED = body_of(engines.STREAM_HEAD + engines.role_chunk(None) + engines.end(1, False))
ANSWERED = body_of(engines.completion(16))


@pytest.mark.parametrize(("share", "milliseconds"), [(0.5, 2.0), (0.6, 2.0), (0.61, 3.0), (0.99, 100.0), (0.0, 1.0)])
def test_percentile_has_its_share_of_durations_below(share: float, milliseconds: float) -> None:
    assert histogram(1, 2, 2, 3, 100).milliseconds(share) == milliseconds


def test_histogram_without_durations_has_no_median() -> None:
    assert isnan(Histogram().milliseconds(0.5))


def test_histogram_does_not_grow_with_its_counts() -> None:
    many = histogram(*[2.0] * 1000, *[1e9] * 1000)
    assert len(many.counts) == 2
    assert many.milliseconds(0.99) == 30_000.0


@pytest.mark.parametrize(("scenario", "body"), [(STREAM, STREAMED), (ANSWER, ANSWERED)])
def test_answers_of_engines_pass_the_checks(scenario: Scenario, body: bytes) -> None:
    assert problem(scenario, answer(body)) is None
    assert problem(scenario, answer(body, 502)) == "status 502"


@pytest.mark.parametrize(
    ("scenario", "body", "told"),
    [
        (STREAM, STREAMED[:-10], "no [DONE]"),
        (STREAM, STREAMED.replace(b'"content":" token"', b'"content":""'), "wrong number of tokens"),
        (STREAM, STREAMED.replace(b'"length"', b"null"), "no finish reason"),
        (STREAM, STREAMED.replace(b'"completion_tokens":1', b'"completion_tokens":2'), "wrong usage"),
        (ANSWER, ANSWERED.replace(b" token token", b" token", 1), "wrong text"),
        (ANSWER, ANSWERED.replace(b'"completion_tokens":16', b'"completion_tokens":15'), "wrong usage"),
    ],
)
def test_faulty_answers_are_errors(scenario: Scenario, body: bytes, told: str) -> None:
    assert problem(scenario, answer(body)) == told


def test_engine_reads_request_without_its_image() -> None:
    body = SCENARIOS[MEDIA].body()
    rest, tokens = without_image(body)
    assert len(body) > 8 << 20
    assert len(rest) < 2000
    assert tokens < 3000
    request = orjson.loads(rest)
    assert request["max_tokens"] == 1
    assert request["messages"][1]["content"][1] == {"type": "image_url", "image_url": {"url": ""}}


def test_direct_request_has_kv_parameters_of_a_prefiller() -> None:
    head, _, body = http_request(STREAM, 1, directly=True).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert orjson.loads(body)["kv_transfer_params"]["remote_engine_id"] == engines.ENGINE_ID


def test_result_survives_json() -> None:
    result = Result(completed=1, gaps={7: 2}, first_tokens={9: 1}, errors={"status 500": 1})
    text = orjson.dumps(result, option=orjson.OPT_NON_STR_KEYS).decode()
    assert Result.from_json(text) == result


def test_figure_is_the_median_of_the_rounds() -> None:
    measurements = Measurements((peers.OURS,))
    for cpu_ms in (9.0, 1.0, 2.0):
        measurements.add(peers.OURS, SHORT_STREAM, measurement(cpu_ms=cpu_ms, completed=10))
    assert measurements.figure(peers.OURS, SHORT_STREAM, "cpu_per_request") == pytest.approx(200)
    assert isnan(measurements.figure(peers.OURS, PACED, "cpu_per_token"))


def test_cost_of_further_token_excludes_1_token_streams() -> None:
    short = measurement(cpu_ms=1.0, completed=10, tokens=10)
    paced = measurement(cpu_ms=3.0, completed=10, tokens=50)
    measurements = taken(ours={SHORT_STREAM: short, PACED: paced})
    assert measurements.figure(peers.OURS, PACED, "cpu_per_further_token") == pytest.approx(50)


def test_added_time_excludes_time_of_engines() -> None:
    measurements = taken(direct={PACED: measurement(first_token_ms=2.0)}, ours={PACED: measurement(first_token_ms=3.5)})
    assert measurements.figure(peers.OURS, PACED, "added_p50") == pytest.approx(1.5)


def test_better_router_is_the_cheaper_or_faster_one() -> None:
    slow = {SHORT_STREAM: measurement(cpu_ms=1.0, completed=10)}
    dear = {SHORT_STREAM: measurement(cpu_ms=4.0, completed=20)}
    measurements = taken(vllm=slow, sglang=dear)
    assert measurements.better_router(SHORT_STREAM, "cpu_per_request") == pytest.approx(100)
    assert measurements.better_router(SHORT_STREAM, "requests_per_second") == pytest.approx(20)
    assert measurements.better_router(PACED, "cpu_per_token") is nan


def test_missing_router_is_not_the_better_one() -> None:
    measurements = taken(sglang={SHORT_STREAM: measurement(cpu_ms=4.0, completed=20)})
    assert measurements.better_router(SHORT_STREAM, "cpu_per_request") == pytest.approx(200)


def test_table_has_a_column_for_each_program_and_ratio() -> None:
    measurements = taken(
        direct={},
        ours={SHORT_STREAM: measurement(cpu_ms=1.0, completed=10, errors={"status 500": 2})},
        vllm={SHORT_STREAM: measurement(cpu_ms=4.0, completed=20)},
    )
    assert table([STREAM], measurements).splitlines() == [
        "                       direct  pdproxy  vllm-router  / vllm-router  / better router",
        "1-token streams, 32 at a time",
        "  CPU, µs per request       -    100.0        200.0           0.50             0.50",
        "  requests/s                -       10           20           0.50             0.50",
        "  errors                    -        2            0              -                -",
    ]


@pytest.mark.parametrize(
    ("cpu_ms", "verdict"), [(7.5, "met by 0%: "), (6.0, "met by 20%: "), (15.0, "missed by 100%: ")]
)
def test_target_is_a_multiple_of_the_better_router(cpu_ms: float, verdict: str) -> None:
    measurements = taken(
        ours={SHORT_STREAM: measurement(cpu_ms=cpu_ms, completed=10)},
        vllm={SHORT_STREAM: measurement(cpu_ms=10.0, completed=10)},
        sglang={SHORT_STREAM: measurement(cpu_ms=20.0, completed=10)},
    )
    (line,) = judged(measurements).splitlines()
    assert line.startswith(f"target {verdict}{SHORT_STREAM}")
    assert line.endswith("0.75 × 1000.0 (better router)")


def test_target_without_a_peer_is_absolute() -> None:
    measurements = taken(ours={SLOW_5000: measurement(kibibytes=300_000, open_at_once=5000)})
    memory, errors = judged(measurements).splitlines()
    assert memory == "target met by 0%: slow-5000, memory, KiB per stream: 60.0 ≤ 60"
    assert errors == "target met: slow-5000, errors: 0.0 ≤ 0"


def test_bars_are_proportional_to_their_values() -> None:
    measurements = taken(
        ours={SHORT_STREAM: measurement(cpu_ms=1.0, completed=10)},
        vllm={SHORT_STREAM: measurement(cpu_ms=4.0, completed=10)},
        sglang={},
    )
    drawn = ElementTree.fromstring(chart([STREAM], measurements))
    ground, ours, theirs = drawn.iter("{http://www.w3.org/2000/svg}rect")
    assert ground.get("class") == "ground"
    assert float(theirs.get("width", "")) == pytest.approx(4 * float(ours.get("width", "")))
    assert [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")][2:] == [
        *("1-token streams, 32 at a time", "CPU, µs per request", "pdproxy", "100", "vllm-router", "400"),
    ]


def test_cpu_time_of_another_process_is_that_of_its_clock() -> None:
    before = time.process_time()
    seen = cpu_seconds(os.getpid())
    assert before <= seen


def test_duel_prints_median_and_spread_of_ratios() -> None:
    measurements = Measurements(("pdproxy", "vllm-router"))
    for ours, theirs in ((100.0, 200.0), (300.0, 400.0), (90.0, 100.0)):
        measurements.add("pdproxy", SHORT_STREAM, measurement(cpu_ms=ours, completed=1000))
        measurements.add("vllm-router", SHORT_STREAM, measurement(cpu_ms=theirs, completed=1000))
    said = verdict([STREAM], measurements)
    assert "100.0" in said
    assert "0.75 (0.50 to 0.90)" in said


def test_several_duels_make_a_table_with_a_column_for_each_peer() -> None:
    duels = []
    for peer, cpu_ms in (("vllm-router", 50.0), ("haproxy", 200.0)):
        measurements = Measurements(("pdproxy", peer))
        measurements.add("pdproxy", SHORT_STREAM, measurement(cpu_ms=100.0, completed=1000))
        measurements.add(peer, SHORT_STREAM, measurement(cpu_ms=cpu_ms, completed=1000))
        duels.append(measurements)
    head, line, first, *_ = ratios([STREAM], duels).splitlines()
    assert head == "|  | pdproxy / vllm-router | pdproxy / haproxy |"
    assert line == "| --- | --- | --- |"
    assert first == f"| {STREAM.title}: CPU, µs per request | 2.00 (2.00 to 2.00) | 0.50 (0.50 to 0.50) |"


def test_duel_accepts_another_checkout(tmp_path: Path) -> None:
    (tmp_path / "before" / "proxy").mkdir(parents=True)
    (tmp_path / "before" / "proxy" / "__main__.py").touch()
    peer = opponent("before", tmp_path, tmp_path, "vllm_pull")
    assert peer.name == "before"
    assert peer.command(1, [2], [3])[2:6] == ["PROXY_CONNECTOR=vllm_pull", "env", "-C", str(tmp_path / "before")]


def test_duel_with_unknown_peer_names_possible_peers(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nobody is neither vllm-router, sglang-router, haproxy nor a checkout"):
        opponent("nobody", tmp_path, tmp_path, "vllm_pull")
