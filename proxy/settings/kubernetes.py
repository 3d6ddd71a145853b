"""The options of discovery in Kubernetes."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import re
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from proxy.settings.kinds import FilePath
from proxy.settings.section import Section

_is_name = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?").fullmatch  # RFC 1123, for names of namespaces
_is_url = re.compile(r"https?://[^\s/?#@]+").fullmatch


def _namespace(name: str) -> str:
    if not _is_name(name):
        raise ValueError("must be the name of a namespace")
    return name


def _server(url: str) -> str:
    if not _is_url(url.rstrip("/")):
        raise ValueError("must be an address such as https://10.96.0.1:443, without a path")
    return url.rstrip("/")


class Kubernetes(Section):
    """Instances from the EndpointSlices of Kubernetes services.

    The gateway's service account must be allowed to list and watch them (configs/kubernetes/components/discovery).
    """

    prefill_selector: str | None = None
    """Label selector of the EndpointSlices of prefillers, for example kubernetes.io/service-name=prefill. Labels of the
    service work, too. null disables it."""
    decode_selector: str | None = None
    """Label selector of the EndpointSlices of decoders."""
    encode_selector: str | None = None
    """Label selector of the EndpointSlices of encoders."""
    namespace: Annotated[str, AfterValidator(_namespace)] | None = None
    """Namespace of the services. null uses the gateway's own namespace."""
    port_name: str | None = None
    """Names of the service ports of the engines, with the wildcards * and ?. Each port is an instance, as for
    data-parallel ranks. null selects the only port, or the port named http. The bootstrap port of prefillers is the
    port named bootstrap, or the annotation or label sglang.ai/bootstrap-port of the slice. The annotation or label
    pdproxy/model names the served models."""
    api_server: Annotated[str, AfterValidator(_server)] | None = None
    """URL of the API server. null uses the cluster that the gateway runs in."""
    token_file: FilePath = None
    """Path of a file with the token for the API server. null uses the pod's service account."""
    ca_file: FilePath = None
    """Path of a file with the CA certificates of the API server. null uses the pod's service account."""

    @model_validator(mode="after")
    def _namespace_is_known(self) -> Self:
        if self.api_server is not None and self.namespace is None:
            raise ValueError("api_server needs a namespace")
        return self

    @property
    def selectors(self) -> dict[str, str]:
        """Return the selectors by role, without roles that have none."""
        given = {"prefill": self.prefill_selector, "decode": self.decode_selector, "encode": self.encode_selector}
        return {role: selector for role, selector in given.items() if selector}

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources, one for each role."""
        return tuple(self.selectors)

    def may_name(self, role: str) -> bool:
        """Return whether these sources may name instances of a role."""
        return role in self.selectors
