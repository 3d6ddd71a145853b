"""Closed loops of sessions: conversations, figures, and the program."""

from __future__ import annotations

import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import orjson
import pytest

from lab.replay.__main__ import read_options
from lab.replay.conversations import Conversation, Conversations, Gaps, Turn, Workload, read_sessions
from lab.replay.fleet import Course
from lab.replay.sessions import ClosedLoop, Life, Row, Sweep, chart, means, row, table
from lab.replay.trace import BLOCK_TOKENS, InvalidTrace, Request


def drawn(workload: Workload, turns: int = 12, seed: int = 1) -> list[Turn]:
    return list(Conversation(workload, random.Random(seed), count(10_000_000), max_turns=turns).turns())


def shared(before: Turn, after: Turn) -> int:
    """Return the number of leading blocks that two turns have in common."""
    pairs = zip(before.blocks, after.blocks, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(before.blocks))


def test_turns_repeat_all_full_blocks_of_the_turn_before() -> None:
    for before, after in pairwise(drawn(Workload())):
        assert shared(before, after) == before.input_tokens // BLOCK_TOKENS
        assert after.input_tokens > before.input_tokens + before.output_tokens
        assert len(after.blocks) == -(-after.input_tokens // BLOCK_TOKENS)


def test_conversations_share_their_system_prompt_only() -> None:
    conversations = Conversations(Workload(shared_tokens=5120), (), seed=3)
    one, other = (next(iter(conversations.new().turns())) for _ in range(2))
    assert shared(one, other) == 10


def test_compaction_keeps_the_system_prompt_only() -> None:
    turns = drawn(Workload(shared_tokens=5120, compaction_tokens=12_000), 40)
    cuts = [(before, after) for before, after in pairwise(turns) if after.input_tokens < before.input_tokens]
    assert cuts
    assert all(shared(before, after) == 10 for before, after in cuts)


def test_subagents_begin_with_the_conversation_or_its_system_prompt() -> None:
    begins = set()
    for turn in drawn(Workload(shared_tokens=5120, subagents=0.9), 40):
        for agent in turn.subagents:
            first = next(iter(agent.turns()))
            begins.add(shared(turn, first) in (10, turn.input_tokens // BLOCK_TOKENS))
    assert begins == {True}


def test_partial_block_keeps_its_name_when_lookups_are_coarse() -> None:
    for before, after in pairwise(drawn(Workload(keeps_last_block=True))):
        assert shared(before, after) == len(before.blocks)


def test_recorded_sessions_are_replayed_turn_by_turn(tmp_path: Path) -> None:
    turns = [
        {"input_tokens": 1500, "output_tokens": 7},
        {"input_tokens": 3000, "output_tokens": 8, "pause_seconds": 2.5},
        {"input_tokens": 2000, "output_tokens": 9, "kept_tokens": 600},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(orjson.dumps({"turns": turns}) + b"\n")
    first, second, third = Conversations(Workload(), read_sessions(path), seed=1).new().turns()
    assert [turn.input_tokens for turn in (first, second, third)] == [1500, 3000, 2000]
    assert (second.output_tokens, second.pause_seconds) == (8, 2.5)
    assert (shared(first, second), shared(second, third)) == (2, 1)


@pytest.mark.parametrize("line", ["no", "{}", '{"turns": [{"input_tokens": 0, "output_tokens": 1}]}', ""])
def test_invalid_recorded_sessions_are_rejected(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidTrace):
        read_sessions(path)


def test_gaps_have_the_shares_of_their_ranges() -> None:
    rng = random.Random(1)
    drawn = [Gaps(0.5, 0.3, 60.0).draw(rng) for _ in range(2000)]
    assert sum(gap <= 1 for gap in drawn) / 2000 == pytest.approx(0.5, abs=0.05)
    assert sum(gap > 10 for gap in drawn) / 2000 == pytest.approx(0.2, abs=0.05)
    assert max(drawn) <= 60


class _Run(ClosedLoop):
    """A finished run with these courses and lives."""

    def __init__(self, courses: Sequence[Course], lives: Sequence[Life]) -> None:
        self.courses, self.lives = list(courses), list(lives)


LABEL = {"policy": "a<b", "read_back": "off", "skip_prefill": "-", "sessions": 2, "seed": 1, "fleet": "1P1D", "fits": 1}


def course(at: float, first: float | None, end: float | None, *, rejected: bool = False) -> Course:
    return Course(
        Request(at, 1000, 10, ()), cached_tokens=500, first_token_at=first, ended_at=end, is_rejected=rejected
    )


def test_figures_count_waiting_and_rejected_turns_after_the_warm_up() -> None:
    courses = [
        course(10.0, 11.0, 12.0),
        course(40.0, 42.0, 50.0),
        course(60.0, None, None),
        course(70.0, None, None, rejected=True),
    ]
    lives = [Life("main", 0.0, turns=2, waited=20.0, ended=50.0), Life("beside", 20.0, 1, 10.0, pending_since=60.0)]
    made = row(_Run(courses, lives), LABEL, 90.0)
    assert (made.turns_per_second, made.tokens_per_second) == (1 / 60, 1010 / 60)
    assert (made.ttft_p50, made.ttft_max, made.rejected) == (30.0, 30.0, 1)
    assert (made.hit_rate, made.beside_seconds_per_turn) == (0.5, 70.0)
    assert made.slowest_tenth_slowdown == 40 / 25


def test_report_has_means_over_seeds_and_a_chart_with_all_policies() -> None:
    one = row(_Run([course(40.0, 42.0, 50.0)], []), LABEL, 90.0)
    other = row(_Run([course(40.0, 44.0, 50.0)], []), {**LABEL, "seed": 2}, 90.0)
    assert [each.ttft_p50 for each in means([one, other])] == [3.0]
    assert table([one, other]).splitlines()[1].split()[:4] == ["1P1D", "2", "(2.0x)", "a<b"]
    assert len(ElementTree.fromstring(chart([one, other], "a <fleet>")).findall("{*}polyline")) == 1


def test_program_writes_a_row_for_each_number_of_sessions(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "lab.replay", "--sessions", "2", "2x", "--seconds", "120", "--fleet", "1P1D"),
        *("--prefill-kv-tokens", "60000", "--policies", "least_load", "smetric", "--beside", "1"),
        *("--subagents", "0.2", "--forks", "0.1", "--json", "rows.json", "--svg", "chart.svg"),
    ]
    environment = {"PYTHONPATH": "scripts", "CALLED_FROM": str(tmp_path)}
    ran = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    rows = orjson.loads((tmp_path / "rows.json").read_bytes())
    assert [each["policy"] for each in rows] == ["least_load", "smetric"] * 2
    assert rows[2]["sessions"] == 2 * rows[2]["fits"]
    names = "turns_per_second tokens_per_second hit_rate ttft_p50 ttft_p99 seconds_per_turn_p50 seconds_per_turn_p99"
    assert all(each[name] > 0 for each in rows for name in names.split())
    assert "sessions fit into the caches" in ran.stderr
    assert "4/4 1P1D, smetric" in ran.stderr
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")


def rows(monkeypatch: pytest.MonkeyPatch, line: str) -> list[Row]:
    """Return the rows of least_load for these options of the program."""
    words = "replay --sessions 8 --seconds 60 --fleet 2P1D --prefill-kv-tokens 60000 --policies least_load"
    monkeypatch.setattr(sys, "argv", f"{words} {line}".split())
    return Sweep(read_options()).rows()


def test_read_back_spares_prefills_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    off, on = rows(monkeypatch, "--reasoning-tokens 1500 --read-back off on")
    assert (off.read_back, off.read_share, on.read_back) == ("off", 0.0, "on")
    assert on.read_share > 0.01
    assert on.hit_rate > off.hit_rate
    assert on.ttft_p50 < off.ttft_p50


def test_answers_that_the_next_prompt_cuts_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    off, on = rows(monkeypatch, "--reasoning-tokens 1500 --drop-reasoning --read-back off on")
    assert replace(on, read_back="off") == off


@pytest.mark.parametrize(("mode", "sessions"), [("on", 8), ("auto", 24)])
def test_decoders_compute_later_turns_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, mode: str, sessions: int
) -> None:
    """With `auto`, they do so only where turns wait for the prefiller."""
    off, skips = rows(monkeypatch, f"--sessions {sessions} --fleet 1P8D --turns 20 --skip-prefill off {mode}")
    assert (off.local_share, skips.skip_prefill) == (0.0, mode)
    assert skips.local_share > 0.1
    assert skips.later_ttft_p50 < off.later_ttft_p50


def test_limits_of_running_requests_apply_to_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    (limited,), (unlimited,) = rows(monkeypatch, "--max-running-decode 1"), rows(monkeypatch, "")
    assert limited.turns_per_second < 0.8 * unlimited.turns_per_second


def test_gateways_share_their_state_while_sessions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(monkeypatch, "--gateways 2 --share news") != rows(monkeypatch, "--gateways 2")


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ("--sessions none", "--sessions"),
        ("--sessions 0", "--sessions"),
        ("--sessions 2 --margins", "--sessions"),
        ("--sessions 2 --seconds 0", "--seconds"),
        ("--sessions 2 --systems 0", "--systems"),
        ("--sessions 2 --turns 0", "--turns"),
        ("--sessions 2 --subagents 7", "--subagents"),
        ("--sessions 2 --slow-links -1", "--slow-links"),
    ],
)
def test_wrong_options_of_sessions_are_reported(
    wrong: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", *wrong.split()])
    with pytest.raises(SystemExit) as left:
        read_options()
    assert left.value.code == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]
