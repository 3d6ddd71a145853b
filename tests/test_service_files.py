"""The files for Kubernetes and systemd, compared with the gateway: ports, deadlines, image, metrics, command line.

`scripts/test-deployment` checks them with the schemas of Kubernetes and the tools of systemd.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import proxy
from proxy.process.supervisor.listening import CLIENT_SOCKET
from proxy.settings import load_settings

ROOT = Path(__file__).parent.parent
BASE = ROOT / "configs" / "kubernetes" / "base"
VLLM = ROOT / "configs" / "kubernetes" / "examples" / "vllm"
CHART = ROOT / "configs" / "helm" / "pdproxy"
COMPONENTS = ROOT / "configs" / "kubernetes" / "components"
ELASTIC = ROOT / "configs" / "kubernetes" / "examples" / "elastic"
MANIFESTS = sorted((ROOT / "configs" / "kubernetes").rglob("*.yaml"))
UNIT = (ROOT / "configs" / "systemd" / "pdproxy.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SETTINGS = load_settings(["--config", str(BASE / "pdproxy.yaml")], {"PROXY_AUTH__ADMIN_KEY": "k"}).settings
GRACE_SECONDS = 10


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


(DEPLOYMENT,) = documents(BASE / "deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


def test_documented_ingress_leads_to_the_service_for_clients() -> None:
    page = (ROOT / "docs/guides/reverse-proxy.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(apiVersion: .*?)^```$", page, re.DOTALL | re.MULTILINE)
    ingress = yaml.safe_load(text)
    annotations = {name.partition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
    assert annotations["proxy-body-size"] == f"{SETTINGS.listen.max_body_bytes >> 20}m"
    assert float(annotations["proxy-read-timeout"]) > SETTINGS.timeouts.first_token_seconds
    ports = {one["metadata"]["name"]: one["spec"]["ports"] for one in documents(BASE / "services.yaml")}
    (rule,) = ingress["spec"]["rules"]
    for path in rule["http"]["paths"]:
        backend = path["backend"]["service"]
        assert backend["port"]["name"] in {port["name"] for port in ports[backend["name"]]}
        assert backend["port"]["name"] == "clients"


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
    default = load_settings(["--decode", "a:1", "--connector", "plain"], {}).settings.drain
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


def test_gateway_is_selected_by_its_labels_alone() -> None:
    """An empty selector matches all pods of the namespace."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    (policy,), (budget,) = documents(BASE / "network.yaml"), documents(BASE / "disruption.yaml")
    selectors = [DEPLOYMENT["spec"]["selector"], policy["spec"]["podSelector"], budget["spec"]["selector"]]
    selectors += [spread["labelSelector"] for spread in POD["topologySpreadConstraints"]]
    assert [selector["matchLabels"] for selector in selectors] == [labels] * len(selectors)
    assert [service["spec"]["selector"] for service in documents(BASE / "services.yaml")] == [labels, labels]


def sharing() -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the store, its service and its network policy, and the variables of the gateway by name."""
    store, service = documents(COMPONENTS / "sharing" / "valkey.yaml")
    (policy,) = documents(COMPONENTS / "sharing" / "network.yaml")
    (patch,) = documents(COMPONENTS / "sharing" / "gateway.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert (patch["metadata"]["name"], container["name"]) == (DEPLOYMENT["metadata"]["name"], CONTAINER["name"])
    return store, service, policy, {variable["name"]: variable for variable in container["env"]}


def test_gateways_of_the_base_share_their_loads() -> None:
    store, service, _, variables = sharing()
    assert documents(BASE / "kustomization.yaml")[0]["components"] == ["../components/sharing"]
    environ = {"PROXY_REPLICAS__URL": variables["PROXY_REPLICAS__URL"]["value"], "PROXY_REPLICAS__PASSWORD": "p"}
    replicas = load_settings(["--config", str(BASE / "pdproxy.yaml")], environ).settings.replicas
    port = service["spec"]["ports"][0]["port"]
    assert replicas.url == f"redis://{service['metadata']['name']}:{port}/0"
    assert service["spec"]["selector"] == store["spec"]["template"]["metadata"]["labels"]
    assert variables.keys() == environ.keys()
    (container,) = store["spec"]["template"]["spec"]["containers"]
    secrets = [container["env"][0], variables["PROXY_REPLICAS__PASSWORD"]]
    assert secrets[0]["valueFrom"] == secrets[1]["valueFrom"]
    assert f"--requirepass $({secrets[0]['name']})" in container["args"]
    assert re.search(r"^redis==", (ROOT / "requirements/runtime.txt").read_text(), re.MULTILINE)
    assert "/opt/venv/bin/pip install --require-hashes -r requirements/runtime.txt" in DOCKERFILE


def test_store_keeps_nothing_and_is_reached_by_gateways_only() -> None:
    store, _, policy, _ = sharing()
    pod = store["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert {'--save ""', "--appendonly no"} <= {*container["args"]}
    assert "volumes" not in pod["spec"]
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert (policy["spec"]["policyTypes"], "egress" in policy["spec"]) == (["Ingress", "Egress"], False)
    ((source,),) = [rule["from"] for rule in policy["spec"]["ingress"]]
    assert source["podSelector"]["matchLabels"] == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert container["securityContext"] == CONTAINER["securityContext"]
    limit, maxmemory = 256, int(re.findall(r"--maxmemory (\d+)mb", " ".join(container["args"]))[0])
    assert container["resources"]["limits"] == {"memory": f"{limit}Mi"}
    assert maxmemory < limit


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_example_engines_are_those_of_the_configuration(role: str, kv_role: str) -> None:
    engines, service = documents(VLLM / f"{role}.yaml")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    listed = [f"{role}-{number}.{name}:{port}" for number in range(engines["spec"]["replicas"])]
    assert [str(endpoint) for endpoint in getattr(SETTINGS, role)] == listed
    assert (engines["metadata"]["name"], engines["spec"]["serviceName"]) == (role, name)
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in container["args"] if word.startswith("--"))
    transfer = json.loads(flags["kv-transfer-config"])
    assert transfer["kv_connector"] in SETTINGS.connector_traits.kv_connectors
    assert transfer["kv_role"] == kv_role
    assert (int(flags["port"]), "enable-prompt-tokens-details" in flags) == (port, True)
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == int(flags["tensor-parallel-size"])
    assert {variable["name"] for variable in container["env"]} == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }


def test_chart_has_the_version_and_the_configuration_of_the_base() -> None:
    """`scripts/test-deployment` renders it and compares all manifests."""
    (chart,), (values,) = documents(CHART / "Chart.yaml"), documents(CHART / "values.yaml")
    assert {chart["version"], chart["appVersion"]} == {proxy.__version__}
    assert values["config"] == documents(BASE / "pdproxy.yaml")[0]
    assert values["replicas"] == DEPLOYMENT["spec"]["replicas"]
    assert values["resources"] == CONTAINER["resources"]
    (image,) = documents(BASE / "kustomization.yaml")[0]["images"]
    assert values["image"]["repository"] == image["newName"]


def test_autoscaler_uses_existing_metrics() -> None:
    metrics = (ROOT / "docs/reference/metrics.md").read_text()
    metric_names = set()
    for path in (*COMPONENTS.glob("autoscaling/*.yaml"), *ELASTIC.glob("*.yaml")):
        metric_names |= set(re.findall(r"\bpdproxy_\w+", path.read_text()))
    assert metric_names
    assert [name for name in metric_names if f"`{name}`" not in metrics] == []


_POLICIES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["periodSeconds", "type", "value"],
        "properties": {
            "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
            "type": {"enum": ["Pods", "Percent"]},
            "value": {"type": "integer", "minimum": 1},
        },
        "additionalProperties": False,
    },
}


def _object(required: str, **properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


# The parts of KEDA's CustomResourceDefinition (config/crd/bases/keda.sh_scaledobjects.yaml) that the example uses, and
# the metadata of the scaler `prometheus` (pkg/scalers/prometheus_scaler.go).
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_SCALING = _object(
    "", policies=_POLICIES, stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600}
)
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    pollingInterval=_COUNT,
    advanced=_object(
        "",
        horizontalPodAutoscalerConfig=_object("", behavior=_object("", scaleUp=_SCALING, scaleDown=_SCALING)),
    ),
    triggers={
        "type": "array",
        "items": _object(
            "type metadata",
            type={"const": "prometheus"},
            metadata=_object("serverAddress query threshold", serverAddress=_TEXT, query=_TEXT, threshold=_TEXT),
        ),
    },
)


def test_scaled_objects_are_valid_and_scale_both_roles() -> None:
    found = documents(ELASTIC / "keda.yaml")
    for one in found:
        assert (one["apiVersion"], one["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
        jsonschema.validate(one["spec"], _SCALED_OBJECT)
        (trigger,) = one["spec"]["triggers"]
        role = one["metadata"]["name"]
        assert trigger["metadata"]["query"] == f'max(pdproxy_desired_instances{{role="{role}"}})'
        assert one["spec"]["scaleTargetRef"]["name"] == role
    assert [one["metadata"]["name"] for one in found] == ["prefill", "decode"]


def test_autoscalers_by_demand_have_the_same_limits_with_and_without_keda() -> None:
    for plain, scaled in zip(documents(ELASTIC / "hpa.yaml"), documents(ELASTIC / "keda.yaml"), strict=True):
        spec, keda = plain["spec"], scaled["spec"]
        assert spec["scaleTargetRef"] == keda["scaleTargetRef"]
        assert (spec["minReplicas"], spec["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
        assert spec["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (metric,) = spec["metrics"]
        assert metric["external"]["metric"]["selector"]["matchLabels"] == {"role": plain["metadata"]["name"]}


def test_autoscaler_adds_only_engines_of_the_configuration() -> None:
    (decoders,) = documents(COMPONENTS / "autoscaling" / "decoders.yaml")
    assert decoders["spec"]["maxReplicas"] == len(SETTINGS.decode)


def test_discovery_component_changes_only_the_source_of_engines() -> None:
    directory = COMPONENTS / "discovery"
    found = load_settings(["--config", str(directory / "pdproxy.yaml")], {"PROXY_AUTH__ADMIN_KEY": "k"}).settings
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


DEPLOYMENT_TOOLS = ROOT / ".venv-deployment" / "bin" / "python"


@pytest.mark.skipif(
    not DEPLOYMENT_TOOLS.exists() or shutil.which("kubectl") is None,
    reason="needs kubectl, and the tools that scripts/test-deployment installs",
)
def test_chart_renders_the_manifests_of_kustomize() -> None:
    command = [str(DEPLOYMENT_TOOLS), "-m", "lab.common.manifests"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid for Kubernetes 1.35, 1.36, 1.37" in done.stdout


@pytest.mark.parametrize("line", unit("ExecStart") + unit("ExecReload")[:1])
def test_unit_starts_an_existing_program(line: str, tmp_path: Path) -> None:
    program, *words = shlex.split(line)
    (tmp_path / "pdproxy.yaml").write_text("connector: plain\ndecode: [b:1]\n")
    assert program.endswith("/pdproxy")
    flags = [word.replace("/etc/pdproxy", str(tmp_path)) for word in words if word != "check-config"]
    assert load_settings(flags, {}).settings.decode


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
    listen = load_settings(["--decode", "a:1", "--connector", "plain"], {}).settings.listen
    lines = (ROOT / "configs" / "systemd" / "pdproxy.socket").read_text().splitlines()
    assert f"ListenStream={listen.host}:{listen.port}" in lines
    assert f"FileDescriptorName={CLIENT_SOCKET}" in lines
    assert f"Backlog={listen.backlog}" in lines
