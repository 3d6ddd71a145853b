"""What the gateway is put in front of: a row for each way that KV cache travels between real engines.

A family is a kind of engine, with the names of its options and metrics. A stack is a family whose engines were started
with a connector, and the gateway's word for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tests.real.programs import HOST, MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Kind = Literal["single", "prefill", "decode"]
"""An ordinary engine, which does both by itself, or one that was started for one stage."""

BLOCK_SIZE: Final = 32
KV_BYTES_PER_TOKEN: Final = 2 * 2 * 2 * 32 * 4
"""Of the tiny model: layers, keys and values, heads, dimensions, bytes of a number."""

_PROJECT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one engine is started."""

    kind: Kind
    port: int
    second_port: int
    """For what its connector listens on."""
    directory: Path
    """For files that the engines of a stack share."""

    @property
    def store_config(self) -> Path:
        """Of Mooncake's store."""
        return self.directory / "mooncake.json"


@dataclass(frozen=True, slots=True)
class Options:
    """What an engine is started with."""

    flags: Mapping[str, str] = field(default_factory=dict)
    """By name; without a value it is a switch."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """Engines of one make."""

    venv_variable: str
    """Names the virtual environment that they are installed in."""
    command: tuple[str, ...]
    """Arguments of Python, before the directory of the model."""
    options: Options
    busy: tuple[str, ...]
    """Metrics of how many requests an engine works on or keeps waiting."""
    kept: tuple[str, ...]
    """Metrics of how much KV cache is in use; of an idle engine: kept for another."""
    generated: str
    """The metric of how many tokens were generated."""
    prompted: str
    """The metric of how many tokens prompts had."""


VLLM: Final = Family(
    venv_variable="PDPROXY_REAL_VENV",
    command=("-m", "vllm.entrypoints.cli.main", "serve"),
    options=Options(
        {
            "--served-model-name": MODEL,
            "--host": HOST,
            "--dtype": "float32",
            "--max-model-len": "4096",
            "--max-num-seqs": "16",
            "--kv-cache-memory-bytes": str(64 << 20),
            "--block-size": str(BLOCK_SIZE),
            "--enforce-eager": "",
            "--enable-prompt-tokens-details": "",
        },
        # Nothing goes out or comes in from elsewhere, and one thread each, because there are more engines than cores.
        {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    ),
    busy=("vllm:num_requests_running", "vllm:num_requests_waiting"),
    kept=("vllm:kv_cache_usage_perc",),
    generated="vllm:generation_tokens_total",
    prompted="vllm:prompt_tokens_total",
)

SGLANG: Final = Family(
    venv_variable="PDPROXY_REAL_SGLANG_VENV",
    command=("-m", "sglang.launch_server", "--model-path"),
    options=Options(
        {
            "--served-model-name": MODEL,
            "--host": HOST,
            "--device": "cpu",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--disable-overlap-schedule": "",
            "--max-total-tokens": "16384",
            "--max-running-requests": "16",
            "--mem-fraction-static": "0.1",
            # So that a used KV cache is one that a request uses.
            "--disable-radix-cache": "",
            # Else an idle engine takes a whole core.
            "--sleep-on-idle": "",
            "--enable-metrics": "",
        },
        {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": HOST,
            "SGLANG_LOCAL_IP_NIC": "lo",
            "MC_FORCE_TCP": "1",
            "MOONCAKE_PROTOCOL": "tcp",
        },
    ),
    busy=(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_prefill_inflight_queue_reqs",
        "sglang:num_decode_prealloc_queue_reqs",
        "sglang:num_decode_transfer_queue_reqs",
    ),
    kept=("sglang:num_used_tokens",),
    generated="sglang:generation_tokens_total",
    prompted="sglang:prompt_tokens_total",
)


def _whole(prompt_tokens: int) -> int:
    return prompt_tokens


def _none(prompt_tokens: int) -> int:
    return 0


def _blocks(prompt_tokens: int) -> int:
    """Full blocks, but not the last token: there must be something to compute."""
    return (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def _example_blocks(prompt_tokens: int) -> int:
    """It looks for one token less than it stores (`align_to_block_size` in vLLM's example_connector.py), and so finds
    nothing of a prompt that is one token longer than its blocks.
    """
    return _blocks(prompt_tokens) if (prompt_tokens - 1) % BLOCK_SIZE else 0


@dataclass(frozen=True, slots=True)
class Stack:
    """Engines that can hand KV cache over to each other, and the gateway's connector for them."""

    name: str
    """What scripts/test-real is told to run it alone."""
    connector: str
    family: Family
    options: Callable[[Place], Options]
    """What prefillers and decoders are started with; an ordinary engine has no such options."""
    sizes: tuple[tuple[int, int], ...] = ((1, 2),)
    """How many prefillers and decoders the gateway is put in front of."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """For all of its engines, ordinary ones too."""
    model: str = ""
    """Its kind; see make_tiny_model.py."""
    service: Callable[[Place], Sequence[str]] | None = None
    """What its engines share: a command of their virtual environment, which tells at its port how it is."""
    has_bootstrap: bool = False
    """Whether a prefiller has a server where decoders ask for it."""
    transferred: Callable[[int], int] = _whole
    """Of a prompt of so many tokens, how many a decoder gets from elsewhere."""


def _role(place: Place) -> str:
    return {"prefill": "kv_producer", "decode": "kv_consumer", "single": "kv_both"}[place.kind]


def _transfer_config(**config: object) -> dict[str, str]:
    return {"--kv-transfer-config": json.dumps(config)}


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


def _mooncake(place: Place) -> Options:
    extra = {"mooncake_protocol": "tcp"}
    return Options(
        _transfer_config(kv_connector="MooncakeConnector", kv_role=_role(place), kv_connector_extra_config=extra),
        {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(place.second_port),
            # How long a prefiller keeps what nobody fetches, and a decoder waits for what nobody has; by default 480.
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "12",
        },
    )


def _example_store(place: Place) -> Options:
    extra = {"shared_storage_path": str(place.directory / "store")}
    return Options(
        _transfer_config(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    )


def _mooncake_store(place: Place) -> Options:
    extra = {"lookup_rpc_port": place.second_port}  # one of its own in the names of sockets, else engines share them
    return Options(
        _transfer_config(kv_connector="MooncakeStoreConnector", kv_role="kv_both", kv_connector_extra_config=extra),
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
    return Options(flags)


def _nothing(place: Place) -> Options:
    return Options()


NIXL: Final = Stack("nixl", "vllm_pull", VLLM, _nixl, sizes=((1, 1), (2, 2)))

THINKING: Final = Stack(
    "thinking", "vllm_pull", VLLM, _nixl, sizes=(), flags={"--reasoning-parser": "kimi_k2"}, model="thinks"
)

STACKS: Final = (
    NIXL,
    THINKING,
    Stack("mooncake", "mooncake_bootstrap", VLLM, _mooncake, has_bootstrap=True),
    Stack("store", "vllm_store", VLLM, _example_store, transferred=_example_blocks),
    Stack("mooncake-store", "vllm_store", VLLM, _mooncake_store, service=_mooncake_master, transferred=_blocks),
    Stack("plain", "plain", VLLM, _nothing, sizes=((0, 2),), transferred=_none),
    Stack("sglang", "sglang_bootstrap", SGLANG, _sglang, has_bootstrap=True),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a stack is deployed."""

    stack: Stack
    prefillers: int
    decoders: int

    def __str__(self) -> str:
        return f"{self.stack.name}-{self.prefillers}P{self.decoders}D"


SIZES: Final = tuple(Size(stack, *size) for stack in STACKS for size in stack.sizes)
