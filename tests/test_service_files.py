"""The files for Kubernetes and systemd, compared with the gateway: ports, deadlines, image, metrics, command line.

`scripts/test-deployment` checks them with the schemas of Kubernetes and the tools of systemd.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.process.supervisor.listening import CLIENTS
from proxy.settings import load

ROOT = Path(__file__).parent.parent
BASE = ROOT / "configs" / "kubernetes" / "base"
COMPONENTS = ROOT / "configs" / "kubernetes" / "components"
MANIFESTS = sorted((ROOT / "configs" / "kubernetes").rglob("*.yaml"))
UNIT = (ROOT / "configs" / "systemd" / "pdproxy.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SETTINGS = load(["--config", str(BASE / "pdproxy.yaml")], {"PROXY_AUTH__ADMIN_KEY": "k"}).settings
GRACE_SECONDS = 10


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


(DEPLOYMENT,) = documents(BASE / "deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


def unit(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def test_ports_equal_those_of_the_configuration() -> None:
    assert SETTINGS.admin.host == SETTINGS.listen.host == "0.0.0.0"
    listening = {"clients": SETTINGS.listen.port, "operators": SETTINGS.admin.port, "probes": SETTINGS.admin.probe_port}
    assert listening == PORTS
    for service in documents(BASE / "services.yaml"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= PORTS.keys()
    (policy,) = documents(BASE / "network.yaml")
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == PORTS.keys()
    (monitor,) = documents(COMPONENTS / "monitoring" / "servicemonitor.yaml")
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == {"operators"}


def test_probes_use_the_port_that_a_busy_loop_does_not_delay() -> None:
    paths = {name: CONTAINER[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in paths.values()} == {"probes"}
    assert [probe["path"] for probe in paths.values()] == ["/livez", "/livez", "/readyz"]
    readiness = CONTAINER["readinessProbe"]
    seconds = readiness["periodSeconds"] * readiness["failureThreshold"] + readiness["timeoutSeconds"]
    assert seconds < SETTINGS.drain.not_ready_seconds


def test_gateway_is_not_killed_while_it_drains() -> None:
    drain = SETTINGS.drain.not_ready_seconds + SETTINGS.drain.streams_seconds
    assert POD["terminationGracePeriodSeconds"] >= drain + GRACE_SECONDS
    default = load(["--decode", "a:1", "--connector", "plain"], {}).settings.drain
    assert int(unit("TimeoutStopSec")[0]) >= default.not_ready_seconds + default.streams_seconds + GRACE_SECONDS
    assert int(unit("TimeoutStartSec")[0]) > int(unit("TimeoutStopSec")[0])  # a successor waits for the ports
    assert unit("KillMode") == ["mixed"]


def test_pod_is_restricted_and_runs_as_the_user_of_the_image() -> None:
    (user,) = re.findall(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)
    assert (POD["securityContext"]["runAsNonRoot"], POD["securityContext"]["runAsUser"]) == (True, int(user))
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert CONTAINER["resources"]["limits"]["memory"] == CONTAINER["resources"]["requests"]["memory"]


@pytest.mark.parametrize(("file", "selector"), [("network.yaml", "podSelector"), ("disruption.yaml", "selector")])
def test_network_policies_select_only_the_gateway(file: str, selector: str) -> None:
    """An empty selector matches all pods of the namespace, and kustomize does not complete these two."""
    (policy,) = documents(BASE / file)
    (labels,) = documents(BASE / "kustomization.yaml")[0]["labels"]
    assert policy["spec"][selector]["matchLabels"] == labels["pairs"]


def test_autoscaler_uses_existing_metrics() -> None:
    metrics = (ROOT / "METRICS.md").read_text()
    metric_names = set()
    for path in COMPONENTS.glob("autoscaling/*.yaml"):
        metric_names |= set(re.findall(r"\bpdproxy_\w+", path.read_text()))
    assert metric_names
    assert [name for name in metric_names if f"`{name}`" not in metrics] == []


def test_autoscaler_adds_only_engines_of_the_configuration() -> None:
    (decoders,) = documents(COMPONENTS / "autoscaling" / "decoders.yaml")
    assert decoders["spec"]["maxReplicas"] == len(SETTINGS.decode)


def test_discovery_component_changes_only_the_source_of_engines() -> None:
    directory = COMPONENTS / "discovery"
    found = load(["--config", str(directory / "pdproxy.yaml")], {"PROXY_AUTH__ADMIN_KEY": "k"}).settings
    assert found.kubernetes.selectors.keys() == {"prefill", "decode"}
    same = {"kubernetes": SETTINGS.kubernetes, "prefill": SETTINGS.prefill, "decode": SETTINGS.decode}
    assert found.model_copy(update=same) == SETTINGS


def test_account_of_the_gateway_may_only_list_and_watch_slices() -> None:
    account, role, binding = documents(COMPONENTS / "discovery" / "rbac.yaml")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(one["kind"], one["name"]) for one in binding["subjects"]] == [
        ("ServiceAccount", account["metadata"]["name"])
    ]
    (deployment,) = documents(COMPONENTS / "discovery" / "account.yaml")
    pod = deployment["spec"]["template"]["spec"]
    assert pod == {"serviceAccountName": account["metadata"]["name"], "automountServiceAccountToken": True}


@pytest.mark.parametrize("line", unit("ExecStart") + unit("ExecReload")[:1])
def test_unit_starts_an_existing_program(line: str, tmp_path: Path) -> None:
    program, *words = shlex.split(line)
    (tmp_path / "pdproxy.yaml").write_text("connector: plain\ndecode: [b:1]\n")
    assert program.endswith("/pdproxy")
    flags = [word.replace("/etc/pdproxy", str(tmp_path)) for word in words if word != "check-config"]
    assert load(flags, {}).settings.decode


def test_image_and_unit_have_the_same_glibc_settings() -> None:
    """Image and unit set the same variables of glibc."""
    tuned = dict(re.findall(r"(MALLOC_\w+_)=(\d+)", DOCKERFILE))
    assert tuned
    assert dict(re.findall(r"(MALLOC_\w+_)=(\d+)", " ".join(unit("Environment")))) == tuned


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_listed_files_exist(path: Path) -> None:
    for document in documents(path):
        listed = [*document.get("resources", ()), *document.get("components", ())]
        listed += [file for made in document.get("configMapGenerator", ()) for file in made["files"]]
        missing = [name for name in listed if isinstance(name, str) and not (path.parent / name).exists()]
        assert missing == []


def test_systemd_socket_has_the_default_port() -> None:
    """The socket also has the gateway's name for it."""
    listen = load(["--decode", "a:1", "--connector", "plain"], {}).settings.listen
    lines = (ROOT / "configs" / "systemd" / "pdproxy.socket").read_text().splitlines()
    assert f"ListenStream={listen.host}:{listen.port}" in lines
    assert f"FileDescriptorName={CLIENTS}" in lines
    assert f"Backlog={listen.backlog}" in lines
