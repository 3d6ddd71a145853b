"""Options of discovery, of KV events, and of gateways that share their loads."""

# No `from __future__ import annotations` here: pydantic reads the annotations at run time.
import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from proxy.common.endpoints import (
    is_bootstrap_port_suffix,
    is_ip_address,
    parse_endpoints,
    split_off_models,
    strip_host_brackets,
)
from proxy.settings.kinds import (
    Delay,
    Endpoints,
    FilePath,
    Positive,
    Ratio,
    Seconds,
    Secret,
    Section,
    empty_is_none,
    make_text_list_check,
)

_MAX_SOURCES: Final = 64
_is_service_name = re.compile(r"_[a-z0-9-]+\._(tcp|udp)\..+", re.IGNORECASE).fullmatch  # RFC 2782


@dataclass(frozen=True, slots=True)
class DnsName:
    """A DNS name. `ports`: ports at each of its addresses; None: its SRV records have hosts and ports."""

    name: str
    ports: tuple[int, ...] | None
    bootstrap_port: int | None
    models: tuple[str, ...] = ()
    """Models of its instances; empty: engines are asked."""
    tls: bool = False
    """Whether its instances are reached by TLS."""


def parse_dns_name(text: str) -> DnsName:
    """Parse `name:port`, `name:first-last` or `_service._tcp.name`, which a bootstrap port and models may follow.

    `https://` may precede the name of engines with TLS. Raises ValueError.
    """
    where, models = split_off_models(text)
    name, _, word = where.rpartition(" ")
    if not name or not is_bootstrap_port_suffix(word):
        name, word = where, ""
    service = name.removeprefix("https://")
    if _is_service_name(service):
        bootstrap_port = parse_endpoints(f"host:1 {word}")[0].bootstrap_port if word else None
        return DnsName(strip_host_brackets(service), None, bootstrap_port, models, service != name)
    endpoints = parse_endpoints(where)
    if is_ip_address(endpoints[0].host):
        raise ValueError(f"{text!r} is an IP address, not a DNS name")
    ports = tuple(one.port for one in endpoints)
    return DnsName(endpoints[0].host, ports, endpoints[0].bootstrap_port, models, endpoints[0].tls)


def _reject_repeated_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice")
    return names


def _check_dns_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        parse_dns_name(name)
    return names


def _check_dns_servers(servers: tuple[str, ...]) -> tuple[str, ...]:
    """Check the addresses of name servers. Raises ValueError."""
    for server in servers:
        if not all(is_ip_address(endpoint.host) for endpoint in parse_endpoints(server)):
            raise ValueError(f"{server} must be an address and a port, such as 127.0.0.1:8600")
    return servers


FilePatterns = Annotated[
    tuple[str, ...],
    BeforeValidator(make_text_list_check("paths")),
    Field(max_length=_MAX_SOURCES),
    AfterValidator(_reject_repeated_names),
]
DnsNames = Annotated[
    tuple[str, ...],
    BeforeValidator(make_text_list_check("names with a port, such as decode.example.com:7100")),
    Field(max_length=_MAX_SOURCES),
    AfterValidator(_reject_repeated_names),
    AfterValidator(_check_dns_names),
]
Servers = Annotated[
    tuple[str, ...],
    BeforeValidator(make_text_list_check("addresses, such as 127.0.0.1:8600")),
    AfterValidator(_check_dns_servers),
]


class Discovery(Section):
    """Sources of instances that join and leave while the gateway runs, in addition to the configured instances."""

    files: FilePatterns = ()
    """Paths of watched files with instances, in the format of Prometheus' file_sd_configs (JSON or YAML). * and ? are
    wildcards. Labels of a group: role (prefill, decode or encode), bootstrap_port (of its prefillers), model (served
    by all of its instances) and elastic (true: role is only the first one of its instances). A relative path is
    relative to the directory of the configuration file that names it."""
    prefill_dns: DnsNames = ()
    """DNS names of prefillers. name:port or name:first-last: each address of the name (A, or AAAA if there is no A
    record) is an instance. _service._tcp.name: the SRV records contain hosts and ports. A bootstrap port and models may
    follow, as for prefill. Names are resolved again when their records expire. Requires the extra dns."""
    decode_dns: DnsNames = ()
    """DNS names of decoders. See prefill_dns."""
    encode_dns: DnsNames = ()
    """DNS names of encoders. See prefill_dns."""
    dns_servers: Servers = ()
    """DNS servers, as address:port. If empty, the servers of /etc/resolv.conf are used."""
    dns_min_seconds: Seconds = 5.0
    """Minimum time between two look-ups of a name, in seconds, even if its records expire earlier."""
    dns_max_seconds: Seconds = 60.0
    """Maximum time between two look-ups of a name, in seconds, even if its records expire later."""

    @model_validator(mode="after")
    def _dns_is_in_order(self) -> Self:
        _reject_repeated_names(self.dns_names)
        for name in (*self.decode_dns, *self.encode_dns):
            if parse_dns_name(name).bootstrap_port is not None:
                raise ValueError(f"{name} has a bootstrap port, which only prefillers have")
        if self.dns_max_seconds < self.dns_min_seconds:
            raise ValueError(f"dns_max_seconds {self.dns_max_seconds} is below dns_min_seconds {self.dns_min_seconds}")
        return self

    @property
    def dns_names(self) -> tuple[str, ...]:
        """Return the names of all roles."""
        return self.prefill_dns + self.decode_dns + self.encode_dns

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources of instances of all kinds."""
        return self.files + self.dns_names

    def may_list(self, role: str) -> bool:
        """Return whether these sources may name instances of a role."""
        return bool(self.files or getattr(self, f"{role}_dns"))


# Options of instances that exchange their roles.


class Elastic(Section):
    """Elastic instances, which exchange their role between prefill and decode while the gateway runs.

    The connector must allow it: vllm_pull and vllm_store with engines of kv_role kv_both, and sglang_bootstrap with
    engines of --enable-pd-role-switch.
    """

    instances: Endpoints = ()
    """Addresses of elastic instances, as for prefill. An instance that prefill or decode lists, too, starts in that
    role, with the details that are given here. The others start, in this order, in the role that has fewer instances.
    An instance of SGLang starts in the role that it reports."""
    evacuate_after_seconds: Delay | None = 10.0
    """Time after the start of a move at which other instances continue the running requests of the instance as after a
    failure, in seconds. null lets the requests finish. The evacuate_after parameter of /instances/role takes
    precedence."""
    drain_seconds: Seconds = 300.0
    """Maximum time for the requests of an instance to end before it gets its new role, in seconds. After this time it
    keeps its old role."""
    min_prefill: Positive = 1
    """Minimum number of available prefillers that a move leaves."""
    min_decode: Positive = 1
    """Minimum number of available decoders that a move leaves."""
    mode: Literal["off", "advise", "auto"] = "advise"
    """Whether pdproxy moves elastic instances when that pays. auto: it does. advise: it only reports the move in the
    log. off: it measures nothing, and pdproxy_desired_instances is missing."""
    window_seconds: Seconds = 60.0
    """Time over which pdproxy measures the demand for prefill and decode, in seconds. A third of it passes between two
    moves."""
    horizon_seconds: Seconds = 900.0
    """Time within which a move must gain more than it costs, in seconds. Losses that are older do not count. A move
    back within half of this time doubles the gain that the next move needs."""
    margin: Ratio = 0.02
    """Minimum gain of a move beyond its cost, as a share of the demand, from 0 to 1."""
    token_seconds: Seconds = 0.1
    """Time between two tokens of an answer at which a decoder is full, in seconds."""

    def min_instances(self, role: str) -> int:
        """Return the minimum number of available instances of a role that a move leaves."""
        return self.min_prefill if role == "prefill" else self.min_decode


# The options of discovery in Kubernetes.


_is_kubernetes_name = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?").fullmatch  # RFC 1123, for names of namespaces
_is_api_server_url = re.compile(r"https?://[^\s/?#@]+").fullmatch


def _check_namespace(name: str) -> str:
    if not _is_kubernetes_name(name):
        raise ValueError("must be the name of a namespace")
    return name


def _check_api_server(url: str) -> str:
    if not _is_api_server_url(url.rstrip("/")):
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
    namespace: Annotated[str, AfterValidator(_check_namespace)] | None = None
    """Namespace of the services. null uses the gateway's own namespace."""
    port_name: str | None = None
    """Names of the service ports of the engines, with the wildcards * and ?. Each port is an instance, as for
    data-parallel ranks. null selects the only port, or the port named http. The bootstrap port of prefillers is the
    port named bootstrap, or the annotation or label sglang.ai/bootstrap-port of the slice. The annotation or label
    pdproxy/model names the served models, and pdproxy/elastic: true makes the instances elastic."""
    api_server: Annotated[str, AfterValidator(_check_api_server)] | None = None
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
        """Return the label selectors by role, without roles that have none."""
        given = {"prefill": self.prefill_selector, "decode": self.decode_selector, "encode": self.encode_selector}
        return {role: selector for role, selector in given.items() if selector}

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the Kubernetes sources of instances, one for each role."""
        return tuple(self.selectors)

    def may_list(self, role: str) -> bool:
        """Return whether these sources may name instances of a role."""
        return role in self.selectors


# Options of KV events, which engines publish about their prefix caches.


ASK_ENGINES: Final = "auto"
"""Value that means: ask engines for their endpoints."""
# The form in engines' options: any address, with a port, or with a number that is added to the instance's port.
_match_zmq_endpoint = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\]):(\+?)([0-9]{1,5})").fullmatch


def _check_publisher_endpoint(text: str | None) -> str | None:
    return text if text == ASK_ENGINES else _check_tcp_endpoint(text, f", or {ASK_ENGINES}")


def _check_tcp_endpoint(text: str | None, others: str = "") -> str | None:
    if text is not None:
        found = _match_zmq_endpoint(text)
        if not found or not 0 < int(found[3]) < 65536:
            raise ValueError(f"must be like tcp://*:5557, or tcp://*:+1000 for the instance's port and 1000{others}")
    return text


def replace_port(endpoint: str, port: int) -> int:
    """Return the port of the first rank of an instance with this port. Raises ValueError."""
    found = _match_zmq_endpoint(endpoint)
    assert found
    return int(found[3]) + (port if found[2] else 0)


class KvEvents(Section):
    """KV events: engines publish changes of their prefix caches, so the gateway does not have to infer them.

    Requires the extra events: pip install '.[events]' in the checkout. With endpoint auto, the other options of this
    section are ignored.
    """

    endpoint: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_check_publisher_endpoint)] = None
    """Endpoint at which engines publish KV events, as in their --kv-events-config. tcp://*:5557: this port.
    tcp://*:+1000: the port of the instance plus 1000, for several instances on one host. auto: pdproxy asks each engine
    (vLLM 0.32 and later, and SGLang). null disables KV events. Requires a restart."""
    replay_endpoint: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_check_tcp_endpoint)] = None
    """Endpoint for the replay of lost events, as replay_endpoint of the engines' --kv-events-config. null disables the
    replay. Not needed with endpoint auto. Requires a restart."""
    topic: str = ""
    """Prefix of the topics that pdproxy subscribes to. If empty, it subscribes to all topics. With endpoint auto,
    engines report it. Requires a restart."""
    ranks: Positive = 1
    """Number of data-parallel ranks of an instance. They publish at consecutive ports. With endpoint auto, engines
    report them. Requires a restart."""

    @property
    def journal_rings(self) -> int:
        """Return the number of journal rings that KV events need."""
        return 0 if self.endpoint is None else 1


# Options of gateways that share their loads.


_is_store_url = re.compile(r"(rediss?://[^\s/?#]+(/[0-9]*)?|unix:///[^\s?#]+)").fullmatch
_is_group_name = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch


def _check_store_url(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        is_right, password = bool(_is_store_url(url)), urlsplit(url).password
        urlsplit(url).port  # noqa: B018 raises
    except ValueError:
        is_right, password = False, None
    if not is_right:
        raise ValueError("must be a URL like redis://10.0.0.9:6379/0, rediss://… for TLS, or unix:///path")
    if password is not None:
        raise ValueError("must not contain a password: set replicas.password or replicas.password_file")
    return url


def _check_group_name(name: str) -> str:
    if not _is_group_name(name):
        raise ValueError("must be 1 to 64 letters, digits, `.`, `_` or `-`")
    return name


class Replicas(Section):
    """Several gateways in front of the same engines that share their loads through Redis or Valkey.

    Requires the extra redis: pip install '.[redis]' in the checkout.
    """

    url: Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_check_store_url)] = None
    """URL of the store: redis://10.0.0.9:6379/0, rediss://… for TLS, or unix:///path. A user may precede the host, as
    in redis://user@host. null disables sharing. Requires a restart."""
    password: Secret = None
    """Password of the store. Requires a restart."""
    password_file: FilePath = None
    """Path of a file that contains the password of the store. Requires a restart."""
    group: Annotated[str, AfterValidator(_check_group_name)] = "default"
    """Name of the group of gateways in front of the same engines. Other gateways must use another name. Requires a
    restart."""
    interval_seconds: Seconds = 0.1
    """Interval between two exchanges of the complete state, in seconds. Requires a restart."""
    news_seconds: Seconds | None = 0.005
    """Minimum time between two messages about changes, in seconds. null shares changes only in the exchanges of the
    complete state. Requires a restart."""
    ttl_seconds: Seconds = 1.0
    """Time for which the state of another gateway is valid, in seconds. At least twice interval_seconds. Requires a
    restart."""
    key_limits: bool = False
    """Whether the limits of client keys (auth.client_keys_file) apply to all gateways of the group together. With false
    they apply to each gateway. Requires a restart."""

    @model_validator(mode="after")
    def _check_ttl_covers_lost_exchange(self) -> Self:
        if self.ttl_seconds < 2 * self.interval_seconds:
            raise ValueError(f"ttl_seconds {self.ttl_seconds} is less than twice interval_seconds")
        return self

    @property
    def guest_rows(self) -> int:
        """Return the number of shared-memory rows for the loads of other gateways."""
        return 0 if self.url is None else 1
