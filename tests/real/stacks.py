"""The stacks that the gateway is tested with: one for each way in which KV cache travels between real engines.

A stack is a family of engines (families.py), the connector that its engines are started with, and the gateway's
connector for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final, Literal

from tests.real.families import BLOCK_SIZE, SGLANG, VLLM, Family, Options
from tests.real.programs import HOST

Kind = Literal["single", "prefill", "decode"]
"""A single engine, which prefills and decodes, or one that was started as prefiller or decoder."""

KV_BYTES_PER_TOKEN: Final = 2 * 2 * 2 * 32 * 4
"""KV cache of the tiny model: 2 layers, keys and values, 2 heads, 32 dimensions, 4 bytes per number."""

_PROJECT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Ports and directory of one engine."""

    kind: Kind
    port: int
    second_port: int
    """Port of its connector's server: NIXL's side channel, a bootstrap server, a store's RPC."""
    directory: Path
    """Directory of files that the engines of a stack share."""

    @property
    def store_config(self) -> Path:
        """The configuration file of Mooncake's store."""
        return self.directory / "mooncake.json"


def _whole(prompt_tokens: int) -> int:
    return prompt_tokens


def _none(prompt_tokens: int) -> int:
    return 0


def _blocks(prompt_tokens: int) -> int:
    """Full blocks without the last token, which a decoder always computes."""
    return (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def _example_blocks(prompt_tokens: int) -> int:
    """Return the transferred tokens of vLLM's example connector.

    It is like `_blocks`, but transfers nothing of a prompt that is one token longer than full blocks. The connector
    looks for one token less than it stores (`align_to_block_size` in vLLM's example_connector.py).
    """
    return _blocks(prompt_tokens) if (prompt_tokens - 1) % BLOCK_SIZE else 0


@dataclass(frozen=True, slots=True)
class Stack:
    """Engines that can hand KV cache over to each other, and the gateway's connector for them."""

    name: str
    """The name that scripts/test-real takes."""
    connector: str
    family: Family
    options: Callable[[Place], Options]
    """What prefillers and decoders are started with, in addition to the family's options; the single engine is not."""
    sizes: tuple[tuple[int, int], ...] = ((1, 2),)
    """Numbers of prefillers and decoders; the tests run with each of these pairs."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags of all engines, including the single one."""
    gateway: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the gateway."""
    model: str = ""
    """The kind of model that make_tiny_model.py makes; empty for its default."""
    service: Callable[[Place], Sequence[str]] | None = None
    """The command of a service that all engines share, from their virtual environment; None if there is none. It serves
    `/health` at the place's port."""
    has_bootstrap: bool = False
    """Whether prefillers have a bootstrap server, where decoders find them."""
    transferred: Callable[[int], int] = _whole
    """How many tokens of a prompt of this length a decoder does not compute but fetches."""


def _role(place: Place) -> str:
    return {"prefill": "kv_producer", "decode": "kv_consumer", "single": "kv_both"}[place.kind]


def _transfer_config(**config: object) -> dict[str, str]:
    return {"--kv-transfer-config": json.dumps(config)}


_NIXL_CONFIG: Final = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


def _nixl(place: Place) -> Options:
    flags = _transfer_config(kv_connector="NixlConnector", kv_role=_role(place), kv_buffer_device="cpu")
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.second_port),
        "UCX_NET_DEVICES": "lo",
    }
    if place.kind == "decode":
        flags["--scheduler-cls"] = "tests.real.recompute_scheduler.RecomputeScheduler"
        environment["PYTHONPATH"] = str(_PROJECT)
        environment["PDPROXY_RECOMPUTE_ORDERS"] = str(place.directory / "orders")
    return Options(flags, environment)


def _nixl_elastic(place: Place) -> Options:
    nixl = _nixl(replace(place, kind="prefill"))
    return Options(
        _transfer_config(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"), nixl.environment
    )


def _nixl_push(place: Place) -> Options:
    nixl = _nixl(replace(place, kind="prefill"))
    config = {"kv_connector": "NixlPushConnector", "kv_role": _role(place), "kv_buffer_device": "cpu"}
    return Options(_transfer_config(**config), nixl.environment)


def _nixl_read_back(place: Place) -> Options:
    nixl = _nixl(replace(place, kind="prefill"))
    # A test reads short caches, too, and waits until decoders have freed the others.
    extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0, "decoder_kv_blocks_ttl": 40}
    config = {"kv_connector": "NixlConnector", "kv_role": _role(place), "kv_buffer_device": "cpu"}
    return Options(
        _transfer_config(**config, kv_connector_extra_config=extra),
        {**nixl.environment, "VLLM_SERVER_DEV_MODE": "1"},
    )


_HOST_BYTES: Final = 16 << 20
"""Size of the host tier: 16,384 tokens."""
_DEVICE_BLOCKS: Final = 140
"""Blocks of a device with a host tier: 4,480 tokens, hardly more than the longest prompt."""


def events_port(port: int) -> int:
    """Return the port at which the engine at this port publishes KV events."""
    return port - 10_000


def _offloading(place: Place) -> Options:
    nixl = _nixl(replace(place, kind="prefill"))
    if place.kind != "prefill":
        return replace(nixl, flags=_transfer_config(**_NIXL_CONFIG, kv_role=_role(place)))
    extra = {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tests.real.host_offloading",
        "cpu_bytes_to_use": _HOST_BYTES,
    }
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    connectors = [{**_NIXL_CONFIG, "kv_role": _role(place)}, offloading]
    flags = _transfer_config(
        kv_connector="MultiConnector", kv_role=_role(place), kv_connector_extra_config={"connectors": connectors}
    )
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port(place.port)}",
        "topic": "kv",
    }
    flags |= {"--kv-events-config": json.dumps(events), "--num-gpu-blocks-override": str(_DEVICE_BLOCKS)}
    return Options(flags, {**nixl.environment, "PYTHONPATH": str(_PROJECT)})


_port_ranges: Final = count(10_000, 40)


def _mooncake_ports() -> dict[str, str]:
    """Ports for one process of Mooncake's transfer engine, which are no other's.

    By default they are random ones from 15000 to 17000, and a prefiller remembers by the first port of a decoder where
    its others are: a decoder that gets the port of one that was killed is not reached any more.
    """
    begin = next(_port_ranges)
    return {"MC_MIN_RPC_PORT": str(begin), "MC_MAX_RPC_PORT": str(begin + 39)}


def _mooncake(place: Place) -> Options:
    extra = {"mooncake_protocol": "tcp"}
    return Options(
        _transfer_config(kv_connector="MooncakeConnector", kv_role=_role(place), kv_connector_extra_config=extra),
        {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(place.second_port),
            # Time limit in seconds for a prefiller without a fetch, and for a decoder without a prefill (default 480).
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "12",
        },
        _mooncake_ports,
    )


def _example_store(place: Place) -> Options:
    extra = {"shared_storage_path": str(place.directory / "store")}
    return Options(
        _transfer_config(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    )


def _mooncake_store(place: Place) -> Options:
    extra = {"lookup_rpc_port": place.second_port}  # is part of a socket's name, which engines would share otherwise
    return Options(
        _transfer_config(
            kv_connector="MooncakeStoreConnector",
            kv_role="kv_both",
            # The store is memory of the engines. A killed one takes blocks along that the master still offers, and by
            # default vLLM fails each request that should load them.
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        # Blocks are found by hashes, which must be the same in every process.
        {"MOONCAKE_CONFIG_PATH": str(place.store_config), "PYTHONHASHSEED": "0"},
    )


def _mooncake_master(place: Place) -> Sequence[str]:
    place.store_config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"{HOST}:{place.second_port}",
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": 256 << 20,
                "local_buffer_size": 64 << 20,
            }
        )
    )
    ports = (f"--rpc_port={place.second_port}", f"--metrics_port={place.port}")
    return ("mooncake_master", f"--rpc_address={HOST}", *ports)


def _sglang(place: Place) -> Options:
    flags = {
        "--disaggregation-mode": place.kind,
        "--disaggregation-transfer-backend": "mooncake",
        "--disaggregation-bootstrap-port": str(place.second_port),
    }
    return Options(flags, per_start=_mooncake_ports)


def _nothing(place: Place) -> Options:
    return Options()


NIXL: Final = Stack("nixl", "vllm_pull", VLLM, _nixl, sizes=((1, 1), (2, 2)))

THINKING: Final = Stack(
    "thinking", "vllm_pull", VLLM, _nixl, sizes=(), flags={"--reasoning-parser": "kimi_k2"}, model="thinks"
)

ELASTIC: Final = Stack("elastic", "vllm_pull", VLLM, _nixl_elastic, sizes=())
"""Engines that exchange their roles."""

STACKS: Final = (
    NIXL,
    THINKING,
    ELASTIC,
    Stack("push", "nixl_push", VLLM, _nixl_push),
    Stack(
        "read-back",
        "vllm_pull",
        VLLM,
        _nixl_read_back,
        sizes=((2, 1),),
        gateway={"PROXY_BALANCE__PREFILL_POLICY": "round_robin"},
    ),
    Stack("offload", "vllm_pull", VLLM, _offloading, sizes=((1, 1),), gateway={"PROXY_KV_EVENTS__ENDPOINT": "auto"}),
    Stack("mooncake", "mooncake_bootstrap", VLLM, _mooncake, has_bootstrap=True),
    Stack("store", "vllm_store", VLLM, _example_store, transferred=_example_blocks),
    Stack("mooncake-store", "vllm_store", VLLM, _mooncake_store, service=_mooncake_master, transferred=_blocks),
    Stack("plain", "plain", VLLM, _nothing, sizes=((0, 2),), transferred=_none),
    Stack("sglang", "sglang_bootstrap", SGLANG, _sglang, has_bootstrap=True),
)


@dataclass(frozen=True, slots=True)
class Size:
    """A stack with its number of prefillers and decoders, written as 1P2D."""

    stack: Stack
    prefillers: int
    decoders: int

    def __str__(self) -> str:
        return f"{self.stack.name}-{self.prefillers}P{self.decoders}D"


SIZES: Final = tuple(Size(stack, *size) for stack in STACKS for size in stack.sizes)
