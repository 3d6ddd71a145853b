"""Compare the Helm chart with kustomize's output, and check both, and manifests in docs/, with Kubernetes' schemas.

Runs in `.venv-deployment`, which has a Helm (the package helm-python-sdk) and the schemas (kubernetes-validate).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

VERSIONS = ("1.35", "1.36", "1.37")
_ROOT = Path(__file__).parents[3]
_KUBERNETES = _ROOT / "configs/kubernetes"
_CHART = _ROOT / "configs/helm/pdproxy"
_WITHOUT_SCHEMA = ("ServiceMonitor",)
# The chart has no engines, and so no autoscaler of theirs.
_OF_ENGINES = ("HorizontalPodAutoscaler", "decode")

Objects = dict[tuple[str, str], dict[str, Any]]


def main() -> int:
    """Print the differences and errors, and return the exit code."""
    discovering = yaml.safe_load((_KUBERNETES / "components/discovery/pdproxy.yaml").read_text())
    everything = {"monitoring": {"enabled": True}, "autoscaling": {"enabled": True}, "config": _replacing(discovering)}
    compared = {
        "base": (kustomized(_KUBERNETES / "base"), rendered({})),
        "all components": (kustomized(_KUBERNETES), rendered(everything)),
    }
    problems = []
    for name, (expected, found) in compared.items():
        problems += [f"the chart differs from {name}: {text}" for text in differences(expected, found)]
        for version in VERSIONS:
            problems += [*invalid(expected, version), *invalid(found, version)]
    autoscalers = _by_name(yaml.safe_load_all((_KUBERNETES / "examples/elastic/hpa.yaml").read_text()))
    for others in (kustomized(_KUBERNETES / "examples/vllm"), autoscalers, documented()):
        problems += [text for version in VERSIONS for text in invalid(others, version)]
    problems += [f"helm lint: {finding}" for finding in lint_findings()]
    for text in dict.fromkeys(problems):
        print(text, file=sys.stderr)
    if not problems:
        counts = ", ".join(f"{len(found)} objects of {name}" for name, (_, found) in compared.items())
        print(f"the chart has the manifests of kustomize ({counts}), valid for Kubernetes {', '.join(VERSIONS)}")
    return 1 if problems else 0


def kustomized(directory: Path) -> Objects:
    """Return the objects of a kustomization by kind and name. ConfigMaps lose the hash of their contents."""
    made = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True, check=True).stdout
    (name,) = {found["metadata"]["name"] for found in yaml.safe_load_all(made) if found["kind"] == "ConfigMap"}
    return _by_name(yaml.safe_load_all(made.replace(name, "pdproxy")))


def documented() -> Objects:
    """Return the manifests in the pages of docs/, by kind and name."""
    texts = (page.read_text(encoding="utf-8") for page in (_ROOT / "docs").rglob("*.md"))
    found = (
        text
        for page in texts
        for text in re.findall(r"^```yaml\n(apiVersion: .*?)^```$", page, re.DOTALL | re.MULTILINE)
    )
    return _by_name(one for text in found for one in yaml.safe_load_all(text))


def rendered(values: dict[str, Any]) -> Objects:
    """Return the objects of the chart by kind and name."""
    with helm_python.Chart.load(_CHART) as chart:
        texts = chart.render(values, name="pdproxy", namespace="default")
    manifests = (text for path, text in texts.items() if path.endswith(".yaml"))
    return _by_name(found for text in manifests for found in yaml.safe_load_all(text))


def lint_findings() -> list[str]:
    """Return errors and warnings of `helm lint`."""
    found = helm_python.lint(_CHART, strict=True)
    return [str(message) for message in found["messages"] if "icon is recommended" not in str(message)]


def differences(expected: Objects, found: Objects) -> list[str]:
    """Return a sentence for each place where the objects differ."""
    found = {key: _comparable(one) for key, one in found.items()}
    expected = {key: _comparable(one) for key, one in expected.items() if key != _OF_ENGINES}
    if ("HorizontalPodAutoscaler", "pdproxy") in found:
        del expected["Deployment", "pdproxy"]["spec"]["replicas"]  # an upgrade would undo what the autoscaler did
    names = [f"{kind} {name} is in one of them" for kind, name in expected.keys() ^ found.keys()]
    return names + [
        text for key in expected.keys() & found.keys() for text in _compare(" ".join(key), expected[key], found[key])
    ]


def invalid(objects: Objects, version: str) -> list[str]:
    """Return a sentence for each object that the schema of a Kubernetes version rejects."""
    problems = []
    for (kind, name), found in objects.items():
        if kind in _WITHOUT_SCHEMA:
            continue
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{kind} {name} is invalid for Kubernetes {version}: {error.message}")
    return problems


def _by_name(manifests: Any) -> Objects:
    return {(found["kind"], found["metadata"]["name"]): found for found in manifests if found}


def _replacing(config: dict[str, Any]) -> dict[str, Any]:
    """Return values that remove the engines of the default values: Helm merges maps, and null deletes a member."""
    return {"prefill": None, "decode": None, **config}


def _comparable(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object without differences that have no effect."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(found))
    if copy["kind"] == "ConfigMap":
        copy["data"] = {name: yaml.safe_load(text) for name, text in copy["data"].items()}
    if copy["kind"] == "Deployment":
        copy["spec"]["template"]["metadata"].pop("annotations", None)  # kustomize changes the name of the ConfigMap
        for container in copy["spec"]["template"]["spec"]["containers"]:
            container["env"] = sorted(container["env"], key=lambda variable: str(variable["name"]))
    return copy


def _compare(place: str, expected: Any, found: Any) -> list[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted({*expected, *found})
        return [text for name in names for text in _compare(f"{place}.{name}", expected.get(name), found.get(name))]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for index, (one, other) in pairs for text in _compare(f"{place}[{index}]", one, other)]
    return [] if expected == found else [f"{place}: {expected!r} and {found!r}"]


if __name__ == "__main__":
    sys.exit(main())
