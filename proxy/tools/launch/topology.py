"""The topology file: nodes, roles with their groups of data-parallel ranks, and options of engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError, model_validator

from proxy.common.endpoints import Host
from proxy.settings.connectors import CONNECTOR_TRAITS
from proxy.settings.kinds import Positive, Section
from proxy.settings.mistakes import SettingsError, explain_mistakes
from proxy.settings.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RoleName = Literal["prefill", "decode", "both"]
Engine = Literal["vllm", "vllm-ascend", "sglang"]
Launcher = Literal["launch_online_dp", "serve_ranks", "serve_nodes"]

OptionValue = bool | int | float | str | list[int | float | str] | dict[str, Any] | None
"""true: the flag alone; a list: several words after it; a mapping: JSON; null: remove a common option."""

_LAUNCHERS: Final = "launch_online_dp, serve_ranks or serve_nodes"
_FLAGS_OF_VLLM: Final = frozenset(
    """port served-model-name tensor-parallel-size data-parallel-size data-parallel-size-local data-parallel-rank
    data-parallel-start-rank data-parallel-address data-parallel-rpc-port headless kv-transfer-config""".split()
)
_OWN_FLAGS: Final[Mapping[Engine, frozenset[str]]] = {
    "vllm": _FLAGS_OF_VLLM,
    "vllm-ascend": _FLAGS_OF_VLLM,
    "sglang": frozenset(
        """model-path served-model-name host port tp-size dp-size nnodes node-rank dist-init-addr disaggregation-mode
        disaggregation-bootstrap-port""".split()
    ),
}
"""Flags that other parts of the file determine."""


_OWN_VARIABLES: Final = (
    *("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    *("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"),
)
_NIXL: Final = "NixlConnector"
_NIXL_PUSH: Final = "NixlPushConnector"
_MOONCAKE: Final = "MooncakeConnector"
_STORES: Final = tuple(name for traits in CONNECTOR_TRAITS.values() if traits.is_store for name in traits.kv_connectors)

_UNHEARD: Final[Mapping[Engine, frozenset[str]]] = {
    # NixlConnector makes an id for each engine.
    "vllm": frozenset({"engine_id"}),
    "vllm-ascend": frozenset({"bootstrap_port"}),
    "sglang": frozenset({"connector", "connector_options", "kv_port", "engine_id", "ranks"}),
}
"""Members that only other engines have."""


def _span(value: object) -> range:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value)) if isinstance(value, int | str) else None
    if match is None:
        raise ValueError("must be a number or a span like 0-7")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError("must not end before it begins")
    return range(first, last + 1)


def _flag(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9.-]*", name):
        raise ValueError(f"{name!r} must be a flag without its dashes, as in max-model-len")
    return name


def _not_false(value: OptionValue) -> OptionValue:
    if value is False:
        raise ValueError("must not be false: leave it out, or use the negated flag, such as no-enable-prefix-caching")
    return value


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not a valid name of a variable")
    return name


def _text(value: object) -> object:
    """YAML's false and 1 become texts in an environment."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _share(value: object) -> object:
    return {"node": value} if isinstance(value, str) else value


def _group(value: object) -> object:
    return {"nodes": value} if isinstance(value, list) else value


def _one_line(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be one line of text")
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
Span = Annotated[range, PlainValidator(_span)]
Line = Annotated[str, AfterValidator(_one_line)]
Word = Annotated[str, BeforeValidator(_text), AfterValidator(_one_line)]
Options = dict[Annotated[str, AfterValidator(_flag)], Annotated[OptionValue, AfterValidator(_not_false)]]
Environment = dict[Annotated[str, AfterValidator(_variable)], Word]


class Common(Section):
    """Common options of engines; options of a role override them."""

    environment: Environment = Field(default_factory=dict)
    """Environment variables, whose values may refer to others: /usr/lib/some.so:$LD_PRELOAD."""
    options: Options = Field(default_factory=dict)
    """Flags without their dashes."""


class Node(Section):
    """A host with devices, in a topology file."""

    address: Host
    """Address at which the other nodes reach it."""
    nic: Line | None = None
    """Network interface of that address; null: the engines' libraries search for one."""
    devices: Positive = 16
    """Number of NPUs or GPUs."""


class Share(Section):
    """The part of a group that one node runs. The name of the node alone suffices."""

    node: str
    ranks: Span | None = None
    """Data-parallel ranks, such as 0-3; null: the ranks of the group are distributed evenly, in the order of nodes."""
    devices: Span | None = None
    """Devices, such as 0-7; null: the first free ones. launch_online_dp.py always takes devices from 0 on."""
    port: Port | None = None
    """Port of its first endpoint; null: that of the role."""
    kv_port: Port | None = None
    """null: that of the role."""
    engine_id: Word | None = None
    """null: the engine makes one up at each start. vLLM-Ascend appends a random part to a configured one."""


class Group(Section):
    """Data-parallel ranks that work in step, on one or several nodes. A list of nodes suffices."""

    nodes: Annotated[list[Annotated[Share, BeforeValidator(_share)]], Field(min_length=1)]
    dp_address: Host | None = None
    """Address at which the ranks connect; null: that of the node with rank 0, which it must be in any case."""


class Part(Common):
    """The engines of one role, in a topology file."""

    groups: Annotated[list[Annotated[Group, BeforeValidator(_group)]], Field(min_length=1)]
    dp: Positive = 1
    """Number of data-parallel ranks of each group."""
    tp: Positive = 1
    """Number of devices of each rank; for SGLang, of all devices of a group."""
    port: Port
    """Port of a node's first endpoint; each further rank has the next port."""
    rpc_port: Port = 12321
    """Port at which the ranks of a group connect, on the node with rank 0."""
    kv_port: Port | None = None
    """First port for transfers of KV cache. Each device listens at this port plus its number in the group.

    NixlConnector and NixlPushConnector: port of the side channel. Each rank listens at this port plus its number in the
    group."""
    bootstrap_port: Port = 8998
    """SGLang, and MooncakeConnector of vLLM: port at which decoders connect to a prefiller."""


class Gateway(Section):
    """The gateway in front of the fleet, in a topology file."""

    node: str | None = None
    """Node of the gateway, whose ports must be free there; null: another host."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Options besides the engines, as in a configuration file."""


class Topology(Common):
    """The content of a topology file: nodes, engines and gateway."""

    engine: Engine
    version: Word | None = None
    """Beginning of the engines' version; null: any. Only the comparison with a running fleet uses it."""
    launcher: Launcher | None = None
    """Launcher of vLLM.

    launch_online_dp: a process per rank, by vllm-ascend's launch_online_dp.py and run_dp_template.sh. serve_ranks: the
    same without that script. serve_nodes: a process per node, with one endpoint for the group."""
    model: Word
    served_model_name: Word | None = None
    """Clients' name of the model; null: the name of `model`."""
    connector: Word | None = None
    """vLLM's name of the connector for KV cache; null: every engine does both stages."""
    connector_options: dict[str, Any] = Field(default_factory=dict)
    """More members of kv_connector_extra_config."""
    nodes: dict[str, Node]
    roles: dict[RoleName, Part]
    prepare: list[Line] = Field(default_factory=list)
    """Shell lines that every node runs before its engines."""
    gateway: Gateway = Gateway()

    @property
    def name(self) -> str:
        """Return the clients' name of the model."""
        return self.served_model_name or self.model

    @property
    def has_side_channels(self) -> bool:
        """Return whether engines listen at `kv_port` for each other."""
        return self.connector is not None and (
            self.connector in (_NIXL, _NIXL_PUSH)
            if self.engine == "vllm"
            else self.connector.startswith(("Mooncake", "Nixl")) and not self.has_store
        )

    @property
    def has_bootstrap_ports(self) -> bool:
        """Return whether decoders connect to prefillers at `bootstrap_port`."""
        return self.engine == "sglang" or (self.engine == "vllm" and self.connector == _MOONCAKE)

    @property
    def has_store(self) -> bool:
        """Return whether the KV cache is transferred through a store that engines share."""
        return self.connector in _STORES

    def options_of(self, role: RoleName) -> dict[str, OptionValue]:
        """Return the options of a role's engines, including common ones."""
        merged = {**self.options, **self.roles[role].options}
        return {flag: value for flag, value in merged.items() if value is not None}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if {*self.roles} not in ({"prefill", "decode"}, {"both"}):
            raise ValueError("roles must be prefill and decode, or both alone")
        if (self.launcher is None) != (self.engine == "sglang"):
            raise ValueError(f"launcher must be {_LAUNCHERS} for vLLM, and must be left out for SGLang")
        if self.engine == "vllm" and self.launcher == "launch_online_dp":
            raise ValueError("launch_online_dp is a script of vllm-ascend: take launcher serve_nodes or serve_ranks")
        self._check_engine()
        self._check_nodes()
        self._check_connector()
        parts: list[Common] = [self, *self.roles.values()]
        for part in parts:
            for flag in part.options:
                if flag in _OWN_FLAGS[self.engine]:
                    raise ValueError(f"--{flag} follows from the rest of the file: leave it out of options")
            for variable in _OWN_VARIABLES:
                if variable in part.environment:
                    raise ValueError(f"{variable} follows from the nodes and ports: leave it out of environment")
        return self

    def _check_engine(self) -> None:
        """Check that no member is set that these engines ignore."""
        unheard = _UNHEARD[self.engine]
        if self.engine == "vllm":
            has_port = {"bootstrap_port": self.has_bootstrap_ports, "kv_port": self.has_side_channels}
            unheard |= {port for port, is_used in has_port.items() if not is_used}
        told: list[Section] = [self, *self.roles.values()]
        told += [group for part in self.roles.values() for group in part.groups]
        told += [share for part in self.roles.values() for group in part.groups for share in group.nodes]
        for section in told:
            if names := sorted(section.model_fields_set & unheard):
                of_connector = f" with connector {self.connector}" if self.connector else ""
                raise ValueError(f"{names[0]} has no effect for engine {self.engine}{of_connector}")

    def _check_nodes(self) -> None:
        shares = [share.node for part in self.roles.values() for group in part.groups for share in group.nodes]
        for name in (*shares, *filter(None, [self.gateway.node])):
            if name not in self.nodes:
                raise ValueError(f"there is no node {name!r}: nodes has {', '.join(self.nodes)}")
        for name in self.nodes:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise ValueError(
                    f"{name!r} is not a valid node name: use letters and digits, because it names a directory"
                )
        for role, part in self.roles.items():
            for group in part.groups:
                given = [share.ranks is not None for share in group.nodes]
                if any(given) and not all(given):
                    raise ValueError(f"{role}: a group must give the ranks of all of its nodes, or of none")
                if not any(given) and part.dp % len(group.nodes) and self.engine != "sglang":
                    raise ValueError(f"{role}: {part.dp} ranks cannot be dealt out evenly to {len(group.nodes)} nodes")

    def _check_connector(self) -> None:
        is_split = "both" not in self.roles
        if self.engine == "sglang":
            return
        if is_split != (self.connector is not None):
            raise ValueError(
                "prefill and decode need a connector, which moves the KV cache"
                if is_split
                else "connector applies to prefill and decode: engines of role both hand nothing over"
            )
        if self.engine == "vllm" and self.connector not in (None, _NIXL, _NIXL_PUSH, _MOONCAKE, *_STORES):
            names = f"{_NIXL}, {_NIXL_PUSH}, {_MOONCAKE}"
            raise ValueError(f"connector must be {names} or that of a KV store for engine vllm")
        if self.has_bootstrap_ports and self.launcher == "serve_ranks" and self.roles["prefill"].dp > 1:
            raise ValueError(f"{_MOONCAKE} has one bootstrap port for all ranks of a node: take launcher serve_nodes")
        for role, part in self.roles.items():
            given = [share.kv_port or part.kv_port for group in part.groups for share in group.nodes]
            if self.has_side_channels and None in given:
                raise ValueError(f"{role} needs a kv_port")


def read_topology(path: Path) -> Topology:
    """Read a topology file. Raises SettingsError."""
    tree = read_yaml(path, texts="environment")
    if not isinstance(tree, dict):
        raise SettingsError(f"{path} must hold a topology: engine, model, nodes and roles")
    return parse_topology(tree, str(path))


def parse_topology(tree: object, path: str) -> Topology:
    """Return the topology in the content of a file. Raises SettingsError."""
    try:
        return Topology.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            raise SettingsError(f"{path}: {'.'.join(map(str, first['loc']))} is not an option of a topology") from None
        text = explain_mistakes(error, lambda option: f"{path}: {option}", ())
        raise SettingsError(text if text.startswith(path) else f"{path}: {text}") from None
