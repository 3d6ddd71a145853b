"""Parse the addresses of engines, and find those of clients behind proxies.

An engine's address is `host:port`, and may have a range of ports and a list of hosts.
A bootstrap port may follow the address of a prefiller of SGLang, and `model=NAME` may follow every address. Host names
are resolved when a connection is opened. The text of each ValueError is for operators.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_serializer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Placeholders of deployment guides such as `141.xx.xx.1` are valid names. Names are resolved only when they are used.
_HOST_NAME_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_MODEL_NAME_PATTERN = "model="
_MAX_MODEL_NAME_LENGTH = 256
_PORT_NUMBERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def strip_host_brackets(text: str) -> str:
    """Return a host name or address without brackets, in lower case. Raises ValueError for anything else."""
    if _HOST_NAME_PATTERN.fullmatch(text):
        return text.lower()
    address = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if "%" not in address:  # a zone such as fe80::1%eth0 has no place in a Host header
        with contextlib.suppress(ipaddress.AddressValueError):
            return str(ipaddress.IPv6Address(address))
    raise ValueError(f"{text!r} is not a host name or an IP address")


Host = Annotated[str, AfterValidator(strip_host_brackets)]


def canonical_host(host: str) -> str:
    """Return one spelling for all spellings of a host: `localhost` and IPv4-mapped addresses become IPv4 addresses.

    `::1` does not change, because another process may listen there.
    """
    if host.lower().removesuffix(".") == "localhost":
        return "127.0.0.1"
    if ":" in host:
        with contextlib.suppress(ipaddress.AddressValueError):
            mapped = ipaddress.IPv6Address(host).ipv4_mapped
            return host if mapped is None else str(mapped)
    return host


def is_ip_address(host: str) -> bool:
    """Return whether a host is an address: a dotted quad, or an IPv6 address without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback_host(host: str) -> bool:
    """Return whether a host without brackets is a loopback address, or a name reserved for one (RFC 6761 6.3).

    Names are not looked up, so the result is False for any other name.
    """
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(canonical_host(host)).is_loopback
    except ValueError:
        return False


_parse_network = lru_cache(maxsize=64)(ipaddress.ip_network)


def is_in_networks(address: str, networks: Sequence[str]) -> bool:
    """Return whether an address is in one of the networks. The result is False for names."""
    try:
        parsed = ipaddress.ip_address(canonical_host(address))
    except ValueError:
        return False
    return any(parsed in _parse_network(network) for network in networks)


def find_client_address(peer: str, forwarded: Iterable[str], networks: Sequence[str]) -> str:
    """Return the address of the client behind trusted proxies.

    Each proxy appends the address of its peer, so the client is the last one that is no trusted proxy. A header is not
    used if another host could have written it, or from the first text on that is no address.

    Args:
        peer: Address at the other end of the connection; `-` if it is unknown.
        forwarded: Values of X-Forwarded-For, in their order.
        networks: Networks of the trusted proxies.
    """
    client = peer
    hops = [hop.strip() for value in forwarded for hop in value.split(",")]
    while hops and is_in_networks(client, networks):
        try:
            client = str(ipaddress.ip_address(hops.pop().strip("[]")))
        except ValueError:
            break
    return client


def connectable_host(host: str) -> str:
    """Return the address to reach a listener from the same host: loopback for a listener on all interfaces."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def engine_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the base URL of an engine without a path, for example `http://10.0.0.1:7100`."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Endpoint(BaseModel):
    """Address of one engine. An IPv6 host is stored without brackets. Its text form is `host:port`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Host
    port: int = Field(ge=1, le=65535)

    bootstrap_port: int | None = Field(default=None, ge=1, le=65535)
    """Port where decoders find a prefiller of SGLang or of the upstream MooncakeConnector; None: the default port."""

    models: tuple[str, ...] = ()
    """Names of the models that it serves; empty: the engine reports them."""

    tls: bool = False
    """Whether the engine is reached by TLS."""

    @model_serializer
    def _as_written(self) -> str:
        port = () if self.bootstrap_port is None else (str(self.bootstrap_port),)
        return " ".join(
            (
                f"https://{self}" if self.tls else str(self),
                *port,
                *(f"{_MODEL_NAME_PATTERN}{name}" for name in self.models),
            )
        )

    @property
    def place(self) -> tuple[str, int]:
        """Host and port, the same for all spellings of an address."""
        return canonical_host(self.host), self.port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_port_range(text: str) -> range:
    """Return the ports of `7100` or of `7100-7115`, including both ends. Raises ValueError."""
    match = _PORT_NUMBERS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a port or a port range like 7100-7115")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= 65535 or not 1 <= last <= 65535:
        raise ValueError(f"{text!r} is outside the ports 1 to 65535")
    if last < first:
        raise ValueError(f"{text!r} is a port range that ends before it begins")
    return range(first, last + 1)


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of `host:port`, `http://host:port`, `[::1]:port` or `host:first-last`. Raises ValueError.

    `https://host:port` is an engine with TLS. A single address may be followed by its bootstrap port or `none`, as in
    the options of the SGLang router. Every address may be followed by one or more `model=NAME`.
    """
    where, models = split_off_models(text)
    address, _, last = where.rpartition(" ")
    if not address or not is_bootstrap_port_suffix(last):
        address, port = where, None
    else:
        port = _parse_bootstrap_port(last)
    endpoints = _parse_address(address)
    if port is not None and len(endpoints) > 1:
        raise ValueError(f"{text!r} has one bootstrap port for several engines: write each on its own")
    if port is None and not models:
        return endpoints
    return tuple(each.model_copy(update={"bootstrap_port": port, "models": models}) for each in endpoints)


def split_off_models(text: str) -> tuple[str, tuple[str, ...]]:
    """Return an address text without its words `model=NAME`, and the names of the models. Raises ValueError."""
    first, *more = text.split(" ")
    names = tuple(dict.fromkeys(word.removeprefix(_MODEL_NAME_PATTERN) for word in more if is_model_name(word)))
    check_model_names(names)
    return " ".join((first, *(word for word in more if not is_model_name(word)))), names


def parse_model_names(text: str) -> tuple[str, ...]:
    """Return the model names in `NAME` or `NAME,NAME`. Raises ValueError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    check_model_names(names)
    return names


def is_model_name(word: str) -> bool:
    """Return whether a word names a model of the address before it."""
    return word.startswith(_MODEL_NAME_PATTERN)


def check_model_names(names: Sequence[str]) -> None:
    """Raise ValueError for empty model names, or for more than fit into the list of instances."""
    if not all(names):
        raise ValueError(f"{_MODEL_NAME_PATTERN} must be followed by the name of a model")
    if sum(map(len, names)) > _MAX_MODEL_NAME_LENGTH:
        raise ValueError(
            f"the names of an instance's models must not have more than {_MAX_MODEL_NAME_LENGTH} characters"
        )


def is_bootstrap_port_suffix(word: str) -> bool:
    """Return whether a word is meant as the bootstrap port of the address before it."""
    return word.isdecimal() or word.lower() == "none"


def _parse_bootstrap_port(word: str) -> int | None:
    if word.lower() == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,5}", word) or not 1 <= int(word) <= 65535:
        raise ValueError(f"{word!r} is not a bootstrap port: it must be a number from 1 to 65535, or none")
    return int(word)


def _parse_address(text: str) -> tuple[Endpoint, ...]:
    scheme, separator, rest = text.rpartition("://")
    if "@" in rest:
        # The text before the @ is not shown, because it may be a password.
        raise ValueError(f"the address of {rest.rpartition('@')[2]!r} must not hold a user name or password")
    if separator and scheme.lower() not in ("http", "https"):
        raise ValueError(f"{text!r} must begin with http:// or https://, or be host:port")
    rest = rest.removesuffix("/")
    if re.search(r"[/?#]", rest):
        raise ValueError(f"{text!r} must be host:port without a path")
    host, separator, ports = rest.rpartition(":")
    if not separator or ports.endswith("]"):
        raise ValueError(f"{text!r} has no port: write it as host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r} is ambiguous: write an IPv6 address in brackets, like [::1]:7100")
    name = strip_host_brackets(host)
    has_tls = scheme.lower() == "https"
    return tuple(Endpoint(host=name, port=port, tls=has_tls) for port in parse_port_range(ports))


def pair_endpoints(role_noun: str, hosts: Sequence[str], ports: Sequence[range]) -> tuple[Endpoint, ...]:
    """Combine the n-th host with the n-th port or port range to endpoints. Raises ValueError.

    One range applies to all hosts, and one host takes several ranges. Lists of single ports must be as long as the list
    of hosts, as in the example proxy of vLLM-Ascend.
    """
    if any(len(several) > 1 for several in ports):
        if len(ports) == 1:
            ports = [*ports] * len(hosts)
        elif len(hosts) == 1:
            hosts = [*hosts] * len(ports)
    if len(hosts) != len(ports):
        raise ValueError(
            f"{_describe_count(len(hosts), role_noun, 'host')} but {_describe_count(len(ports), role_noun, 'port')}"
        )
    pairs = zip(hosts, ports, strict=True)
    return tuple(Endpoint(host=host, port=port) for host, several in pairs for port in several)


def _describe_count(number: int, role_noun: str, thing: str) -> str:
    return f"{number} {role_noun} {thing}{'s' * (number != 1)}"
