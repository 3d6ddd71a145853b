"""What EndpointSlices say of instances. Facts from the API's reference, `discovery.k8s.io/v1`:
https://kubernetes.io/docs/reference/kubernetes-api/service-resources/endpoint-slice-v1/
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from proxy.common.backend import Backend, Role
from proxy.settings import parse_models

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Slice = Mapping[str, Any]
    """An EndpointSlice, as JSON has it."""

BOOTSTRAP: Final = "bootstrap"
BOOTSTRAP_KEY: Final = "sglang.ai/bootstrap-port"
"""What SGLang's router reads of pods (`bootstrap_port_annotation`). Labels of a service are copied to its slices,
annotations are not.
"""
MODEL_KEY: Final = "pdproxy/model"
"""What the endpoints serve. Others' labels, such as `llm-d.ai/model`, are names that need not be those of requests."""
_DEFAULT_PORT: Final = "http"


def instances(role: Role, slices: Iterable[Slice], port_name: str | None) -> list[Backend]:
    """The endpoints that are ready and do not terminate; if none is ready, all that do not terminate: then it is rather
    the probes of Kubernetes that fail, and the gateway has its own. Raises ValueError for a slice of which it is not
    clear at which port engines listen.
    """
    found: dict[object, tuple[bool, list[Backend]]] = {}
    # A pod with two families of addresses is in two slices, and one instance. While slices are rearranged, an endpoint
    # may be in two of them, too. On a node's own network pods have one address, and ports of their own.
    for one in sorted(slices, key=lambda one: (one.get("addressType", ""), one["metadata"]["name"])):
        endpoints = [endpoint for endpoint in one.get("endpoints") or () if not _is_terminating(endpoint)]
        if endpoints:
            ports, bootstrap_port = _ports(one, port_name), _bootstrap_port(one) if role is Role.PREFILL else None
            models = _models(one)
            for endpoint in endpoints:
                host = endpoint["addresses"][0]  # all are the same endpoint, and the first is to be used
                backends = [
                    Backend(role, host, port, trusted=True, bootstrap_port=bootstrap_port, models=models)
                    for port in ports
                ]
                target = endpoint.get("targetRef") or {}
                found.setdefault((target.get("uid") or host, *ports), (_is_ready(endpoint), backends))
    ready = [backend for is_ready, backends in found.values() if is_ready for backend in backends]
    return ready or [backend for _, backends in found.values() for backend in backends]


def _is_ready(endpoint: Mapping[str, Any]) -> bool:
    """What is not known is to be taken for ready."""
    return (endpoint.get("conditions") or {}).get("ready") is not False


def _is_terminating(endpoint: Mapping[str, Any]) -> bool:
    return (endpoint.get("conditions") or {}).get("terminating") is True


def _ports(one: Slice, port_name: str | None) -> Sequence[int]:
    """Where engines listen. Raises ValueError."""
    ports = {port.get("name") or "": port["port"] for port in one.get("ports") or () if port.get("port")}
    if port_name is not None:
        fitting = [port for name, port in ports.items() if fnmatchcase(name, port_name)]
    else:
        engines = {name: port for name, port in ports.items() if name != BOOTSTRAP}
        fitting = list(engines.values()) if len(engines) == 1 else list(_of(engines, _DEFAULT_PORT))
    if not fitting:
        name = one["metadata"]["name"]
        among = ", ".join(map(repr, ports)) or "none"
        raise ValueError(
            f"which port of EndpointSlice {name} is the engines'? kubernetes.port_name fits none of {among}"
        )
    return fitting


def _of(ports: Mapping[str, int], name: str) -> Iterator[int]:
    if name in ports:
        yield ports[name]


def _bootstrap_port(one: Slice) -> int | None:
    """Raises ValueError."""
    for port in one.get("ports") or ():
        if port.get("name") == BOOTSTRAP:
            return int(port["port"])
    word = _said(one, BOOTSTRAP_KEY)
    if word is None:
        return None
    if not (word.isdecimal() and 1 <= int(word) <= 65535):
        raise ValueError(f"{BOOTSTRAP_KEY} of EndpointSlice {one['metadata']['name']} must be a port")
    return int(word)


def _models(one: Slice) -> tuple[str, ...]:
    """Raises ValueError."""
    try:
        return parse_models(_said(one, MODEL_KEY) or "")
    except ValueError as error:
        raise ValueError(f"{MODEL_KEY} of EndpointSlice {one['metadata']['name']}: {error}") from None


def _said(one: Slice, key: str) -> str | None:
    """What an annotation or a label says; None: there is none."""
    metadata = one["metadata"]
    return (metadata.get("annotations") or {}).get(key) or (metadata.get("labels") or {}).get(key)
