"""The options of discovery in Kubernetes."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import re
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from proxy.settings.kinds import FilePath
from proxy.settings.section import Section

_is_name = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?").fullmatch  # RFC 1123, as namespaces are called
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
    """Instances from EndpointSlices, which Kubernetes keeps for services. The gateway's service account must be allowed
    to list and watch them (configs/kubernetes/components/discovery).
    """

    prefill_selector: str | None = None
    """Labels of the EndpointSlices whose endpoints are prefillers, such as kubernetes.io/service-name=prefill, or those
    of the service itself; null: none."""
    decode_selector: str | None = None
    """Labels of the EndpointSlices whose endpoints are decoders."""
    encode_selector: str | None = None
    """Labels of the EndpointSlices whose endpoints are encoders."""
    namespace: Annotated[str, AfterValidator(_namespace)] | None = None
    """Namespace of the services; null: the gateway's own."""
    port_name: str | None = None
    """Names of the services' ports at which engines listen, with * and ?: each port is an instance, as for
    data-parallel ranks; null: the only port, or the one that is called http. A port that is called bootstrap, or else
    the annotation or label sglang.ai/bootstrap-port of the slice, is the bootstrap port of prefillers; what is
    served is its annotation or label pdproxy/model."""
    api_server: Annotated[str, AfterValidator(_server)] | None = None
    """Address of the API server; null: that of the cluster the gateway runs in."""
    token_file: FilePath = None
    """File with the token that is sent there; null: that of the pod's service account."""
    ca_file: FilePath = None
    """File with the certificates of its authority; null: that of the pod's service account."""

    @model_validator(mode="after")
    def _namespace_is_known(self) -> Self:
        if self.api_server is not None and self.namespace is None:
            raise ValueError("api_server needs a namespace")
        return self

    @property
    def selectors(self) -> dict[str, str]:
        """By role, of the roles that there are."""
        given = {"prefill": self.prefill_selector, "decode": self.decode_selector, "encode": self.encode_selector}
        return {role: selector for role, selector in given.items() if selector}

    @property
    def sources(self) -> tuple[str, ...]:
        """One for each role."""
        return tuple(self.selectors)

    def may_name(self, role: str) -> bool:
        """Whether instances of a role may come from here."""
        return role in self.selectors
