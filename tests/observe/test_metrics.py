"""The exposition: conventional names, series that start at 0, and values of all workers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from proxy import __version__
from proxy.api.passthrough import ROUTES
from proxy.balancer.backend_health import HealthState
from proxy.balancer.health import Health
from proxy.balancer.incompatibilities import Incompatibilities
from proxy.balancer.pick import PickRequest
from proxy.balancer.roster import Roster
from proxy.balancer.shared.scoreboard import PinnedKv, Scoreboard
from proxy.common.backend import Load, Role
from proxy.common.errors import Failure, UpstreamError
from proxy.common.terms import Action, Stage
from proxy.dialects import DIALECTS
from proxy.observe import metrics
from proxy.observe.key_metrics import collect_keys
from proxy.observe.key_usage import KeyAccounts
from proxy.observe.metrics import RESUME_ACTIONS, Metrics, render_exposition
from proxy.settings import Kv
from tests.conftest import IS_COMPILED
from tests.pools import make_pool


class Gateway:
    """Metrics of a balancer with one prefiller and one decoder."""

    def __init__(self, prefillers: int = 1) -> None:
        self.scoreboard = Scoreboard(slots=prefillers + 3)
        hosts = [(f"10.0.0.{number}", 7100) for number in range(1, prefillers + 1)]
        self.roster = Roster(hosts, [("fd00::1", 7200)], self.scoreboard)
        self.health = Health()
        row = self.scoreboard.load_row(0)
        self.pinned_kv = PinnedKv(row)
        self.pools = {
            role: make_pool(
                role, self.roster, self.scoreboard, load_row=row, health=self.health, pinned_kv=self.pinned_kv
            )
            for role in Role
        }
        self.metrics = Metrics()
        self.metrics.watch_instances(self.pools.values(), self.scoreboard, self.health, Incompatibilities())

    def text(self) -> str:
        return render_exposition(self.metrics.collect(), "text/plain")[0].decode()

    def families(self) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.text())}

    def value(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return None


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_metrics_have_conventional_names_and_help_texts(gateway: Gateway) -> None:
    for name, family in gateway.families().items():
        assert re.fullmatch(r"(pdproxy|process)_[a-z]+(_[a-z]+)*", name)
        assert family.documentation.endswith(".")
        assert not re.search(r"(milli|micro)seconds|_ms$|_count$|_sum$|_bucket$", name)
        if family.type == "gauge":
            assert not name.endswith("_total")
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_ratio"))
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels)
            if family.type == "counter":
                assert sample.name.endswith("_total")


def test_scrape_reads_at_most_one_instance_in_a_step() -> None:
    """Streams go on between the steps, so a scrape of many instances must have many."""
    few, many = (len([*Gateway(prefillers).metrics.collect_in_steps([])]) for prefillers in (1, 101))
    assert many - few >= 2 * 100  # the series of each instance, and its gauges


def test_scrape_reads_at_most_one_client_key_in_a_step(gateway: Gateway) -> None:
    """This holds for keys without own series, too."""
    accounts = KeyAccounts(slots=200)

    def count_steps(keys: int) -> int:
        slots = {f"team-{slot}": slot for slot in range(keys)}
        gateway.metrics.watch_keys(lambda: collect_keys(accounts, slots, 50, lambda slot: 1))
        return len([*gateway.metrics.collect_in_steps([])])

    assert count_steps(200) - count_steps(0) >= 200


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_problem(gateway: Gateway) -> None:
    with gateway.pools[Role.PREFILL].make_lease(PickRequest.make_for_load(Load(1, 2))):
        gateway.metrics.instance_requests_total.labels("prefill", "10.0.0.1:7100", "timeout").inc()
        found = subprocess.run(["promtool", "check", "metrics"], input=gateway.text(), capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_openmetrics_is_served_on_request(gateway: Gateway) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    body, content_type = render_exposition(gateway.metrics.collect(), accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in openmetrics.text_string_to_metric_families(body.decode())}
    assert "pdproxy_requests" in names


def test_series_with_known_labels_start_at_zero(gateway: Gateway) -> None:
    gateway.metrics.show_generation_series(dialect.label for dialect in DIALECTS)
    for family in gateway.families().values():
        if family.type in ("counter", "histogram") and family.name.startswith("pdproxy_"):
            if family.name == "pdproxy_model_requests":
                continue  # instances define the models
            assert family.samples, family.name
            assert {sample.value for sample in family.samples} == {0.0}
    assert gateway.value("pdproxy_request_end_total", term="--") == 0
    assert gateway.value("pdproxy_rejected_total", reason="no_healthy_decode") == 0
    assert gateway.value("pdproxy_instance_requests_total", role="decode", address="[fd00::1]:7200", result="ok") == 0


def test_label_values_equal_the_terms_of_the_program() -> None:
    assert tuple(stage.label for stage in Stage) == metrics.STAGES
    assert tuple(Role) == metrics.LEGS
    assert set(ROUTES) < set(metrics.APIS)
    assert get_args(Kv.model_fields["on_missing"].annotation) == metrics.MISSING_KV_ACTIONS


def test_build_info_has_the_version(gateway: Gateway) -> None:
    (sample,) = gateway.families()["pdproxy_build_info"].samples
    assert sample.labels["version"] == __version__
    assert sample.labels["compiled"] == ("true" if IS_COMPILED else "false")
    assert sample.value == 1


def test_metrics_of_instances_show_current_health_and_load(gateway: Gateway) -> None:
    prefillers = gateway.pools[Role.PREFILL]
    (prefiller,) = prefillers.all_backends()
    labels = {"role": "prefill", "address": "10.0.0.1:7100"}
    assert gateway.value("pdproxy_instance_up", **labels) == 0
    gateway.health.on_probe(prefiller, True, "")
    prefillers.report_outcome(prefiller, UpstreamError(Failure.RESET, prefiller, "gone"))
    with prefillers.make_lease(PickRequest.make_for_load(Load(compute_tokens=30, kv_tokens=7))):
        assert gateway.value("pdproxy_instance_up", **labels) == 1
        assert gateway.value("pdproxy_instance_state", **labels) == list(HealthState).index(HealthState.UP)
        assert gateway.value("pdproxy_instance_inflight", **labels) == 1
        assert gateway.value("pdproxy_instance_load_tokens", kind="compute", **labels) == 30
        assert gateway.value("pdproxy_instance_load_tokens", kind="kv", **labels) == 7
        assert gateway.value("pdproxy_instance_consecutive_failures", **labels) == 1
    assert gateway.value("pdproxy_instance_inflight", **labels) == 0


def test_metrics_of_instances_show_pinned_kv(gateway: Gateway) -> None:
    (prefiller,) = gateway.pools[Role.PREFILL].all_backends()
    labels = {"role": "prefill", "address": "10.0.0.1:7100"}
    names = [f"pdproxy_instance_pinned_kv{name}" for name in ("", "_tokens", "_oldest_seconds")]
    assert [gateway.value(name, **labels) for name in names] == [0, 0, 0]
    pin = gateway.pinned_kv.add_pin(prefiller, 30, 480.0)
    gateway.pinned_kv.add_pin(prefiller, 4, 480.0, is_suspected=True)
    count, tokens, oldest = (gateway.value(name, **labels) for name in names)
    assert (count, tokens) == (2, 34)
    assert oldest is not None
    assert 0 < oldest < time.monotonic() - pin.pinned_at
    gateway.pinned_kv.forget_backend(prefiller)
    gateway.pinned_kv.add_pin(prefiller, 30, -1.0)
    assert [gateway.value(name, **labels) for name in names] == [0, 0, 0], "expired KV caches are not counted"


def test_removed_instance_loses_its_series(gateway: Gateway) -> None:
    gateway.metrics.instance_requests_total.labels("prefill", "10.0.0.1:7100", "ok").inc()
    assert "10.0.0.1:7100" in gateway.text()
    gateway.roster.remove_backend(Role.PREFILL, "10.0.0.1", 7100)
    assert gateway.value("pdproxy_instance_up", role="prefill", address="10.0.0.1:7100") == 0
    gateway.roster.drop_drained_backends()
    assert "10.0.0.1:7100" not in gateway.text()
    assert "[fd00::1]:7200" in gateway.text()


def test_two_metrics_objects_in_one_process_are_independent() -> None:
    first, second = Gateway(), Gateway()
    first.metrics.kv_orphans_total.inc()
    assert (first.value("pdproxy_kv_orphans_total"), second.value("pdproxy_kv_orphans_total")) == (1, 0)


WORKERS = """
    import os

    from proxy.common.backend import Role
    from proxy.balancer.health import Health
    from proxy.balancer.incompatibilities import Incompatibilities
    from proxy.balancer.shared.scoreboard import PinnedKv
    from proxy.balancer.policies.least_tokens import make_policy
    from proxy.balancer.pool import Pool, PoolParts
    from proxy.balancer.roster import Roster
    from proxy.balancer.shared.scoreboard import Scoreboard
    from proxy.observe.metrics import Metrics, render_exposition

    scoreboard = Scoreboard(workers=2, slots=4)
    roster, health = Roster([("p", 1)], [], scoreboard), Health()

    def work(worker):
        pinned_kv = PinnedKv(scoreboard.load_row(worker))
        pinned_kv.add_pin(roster.members_of_role(Role.PREFILL)[0].backend, 10 + worker, 480.0)
        metrics = Metrics()
        metrics.requests_total.labels("chat", "200").inc()
        metrics.inflight_requests.labels("chat").inc()
        metrics.request_duration_seconds.labels("chat", "true").observe(0.3)
        metrics.instance_requests_total.labels("prefill", "p:1", "ok").inc()
        metrics.instance_requests_total.labels("prefill", "gone:1", "ok").inc()
        return metrics

    if os.fork() == 0:
        work(1)
        os._exit(0)
    os.wait()
    pool = Pool(PoolParts(
        role=Role.PREFILL, policy=make_policy("random"), scoreboard=scoreboard,
        load_row=scoreboard.load_row(0), roster=roster, health=health,
    ))
    metrics = work(0)
    metrics.watch_instances([pool], scoreboard, health, Incompatibilities())
    print(render_exposition(metrics.collect(), "")[0].decode())
"""


def test_one_worker_serves_the_metrics_of_all_workers(tmp_path: Path) -> None:
    script = [sys.executable, "-c", textwrap.dedent(WORKERS)]
    found = subprocess.run(script, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert found.stderr == ""
    lines = found.stdout.splitlines()
    assert 'pdproxy_requests_total{api="chat",code="200"} 2.0' in lines
    assert 'pdproxy_inflight_requests{api="chat"} 2.0' in lines
    assert 'pdproxy_request_duration_seconds_count{api="chat",stream="true"} 2.0' in lines
    assert 'pdproxy_instance_requests_total{address="p:1",result="ok",role="prefill"} 2.0' in lines
    assert 'pdproxy_instance_up{address="p:1",role="prefill"} 0.0' in lines
    assert 'pdproxy_instance_pinned_kv{address="p:1",role="prefill"} 2.0' in lines
    assert 'pdproxy_instance_pinned_kv_tokens{address="p:1",role="prefill"} 21.0' in lines
    assert "gone:1" not in found.stdout
    assert "# HELP pdproxy_requests_total Client requests by API and HTTP status." in lines
    assert found.stdout.count("pdproxy_build_info{") == 1


def test_every_resume_action_has_an_initial_series() -> None:
    assert set(RESUME_ACTIONS) == {action.value for action in Action}
