"""`pdproxy doctor` with real engines: no findings for working engines, and one for an incompatible decoder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.real.cluster import Cluster
from tests.real.programs import Program, endpoints
from tests.real.report import Show

_CANARY_TOKENS = 600  # of four bytes each; the tiny tokenizer makes more tokens of them
_SECONDS = 240.0


def doctor(connector: str, prefillers: list[Program], decoders: list[Program]) -> list[dict[str, Any]]:
    """Return the findings of the doctor."""
    flags = ("--json", "--canary-tokens", _CANARY_TOKENS, "--canary-seconds", 60, "--port", 0, "--connector", connector)
    command = [sys.executable, "-m", "proxy", "doctor", *map(str, (*flags, *endpoints(prefillers, decoders)))]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PROXY_", "OPENAI_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    assert done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return found


def test_doctor_finds_no_problem_in_working_engines(cluster: Cluster, show: Show) -> None:
    found = doctor(cluster.stack.connector, cluster.prefillers, cluster.decoders)
    assert [finding for finding in found if finding["severity"] in ("warning", "failure")] == []
    pairs = [finding for finding in found if finding["check"] == "kv"]
    assert len(pairs) == len(cluster.prefillers) * len(cluster.decoders)
    show("; ".join(f"{finding['severity']}: {finding['words']}" for finding in pairs))


@pytest.mark.only("nixl", "mooncake", "store")
def test_doctor_names_a_decoder_without_connector(cluster: Cluster, show: Show) -> None:
    found = doctor(cluster.stack.connector, cluster.prefillers, [cluster.single])
    (bad,) = [finding for finding in found if finding["severity"] == "failure"]
    assert bad["check"] == "kv_not_fetched"
    show(f"{bad['subject']} {bad['words']}")


def test_engines_keep_no_state_after_canaries(cluster: Cluster) -> None:
    cluster.wait_until_nothing_is_left()
