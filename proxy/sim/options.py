"""How one simulated engine is configured; every field is a flag of `mock-engine`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.machines import MACHINES
from proxy.sim.profile import ALL_PROFILES, ConnectorName, Profile

if TYPE_CHECKING:
    from proxy.sim.hardware.work import Shape

AtSigterm = Literal["exit", "silent", "abort", "core-dead"]
SimRole = Literal["prefill", "decode", "both"]
ProtocolName = Literal["pull", "bootstrap", "layerwise", "transfer", "store", "none"]
LoadFailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class Options:
    """Fixed for the life of an engine. All delays default to zero: as fast as the machine goes."""

    role: SimRole = "both"
    model: str = "sim"
    profile_name: str = "v0.30"
    connector_name: ConnectorName | None = None
    protocol: ProtocolName | None = None
    api_key: str | None = None
    max_model_len: int = 131_072
    default_max_tokens: int = 256
    """Chat without max_tokens stops here, as with `max_new_tokens` in a model's generation config."""
    block_size: int = 128
    num_gpu_blocks: int = 100_000
    prefill_ms_per_1k_tokens: float = 0.0
    decode_step_ms: float = 0.0
    decode_step_ms_per_seq: float = 0.0
    machine: str | None = None
    """Work takes as long as on this one of `hardware.machines.MACHINES`, in batches and KV memory as there, whatever
    the three delays and `num_gpu_blocks` say. None: as these say.
    """
    max_num_seqs: int = 256
    max_num_queued_reqs: int | None = None
    """Requests that may wait or run. Further ones are refused with 503 (vLLM `--max-num-queued-reqs`). None: any."""
    tokens_per_step: int = 1
    stream_interval: int = 1
    eos_after: int | None = None
    first_token_eos: bool = False
    pin_seconds: float | None = None
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    prompt_tokens_details: bool = True
    reasoning_parser: str = "kimi_k2"
    tool_call_parser: str = ""
    private_prompt_ids: bool = False
    """A chat's prompt may be given as `kv_transfer_params._vllm_ascend_recompute_token_ids` (vllm-ascend
    `patch/recompute_proxy.py`)."""
    dev_mode: bool = False
    """Whether the engine reports its configuration, as with VLLM_SERVER_DEV_MODE=1."""
    ec_role: Literal["", "producer", "consumer"] = ""
    """Role in the transfer of encoded media, as with ECCPUConnector. Empty: there is no such connector."""
    bidirectional_kv_xfer: bool = False
    """Whether a decoder reports its own KV cache, as with NIXL's option of this name."""
    request_id_headers: bool = False
    request_id_randomization: bool = True
    """Without it a request whose id is live already is refused, and remote request ids carry no suffix."""
    kv_host: str | None = None
    """The address prefillers announce for pulling; the listening address unless given."""
    adapters: list[str] = field(default_factory=list, compare=False)
    """Names of the adapters (LoRA) that are loaded; `POST /v1/load_lora_adapter` adds one."""
    unreachable_ports: frozenset[int] = frozenset()
    """Ports of prefillers that this decoder cannot reach for pulling."""
    bootstrap_port: int = 0
    """A prefiller's second port, in the protocols that have one; 0 takes a free one. For a decoder of SGLang: the port
    to ask where a request names none, 8998 unless given."""
    dp_size: int = 1
    """Data-parallel ranks behind the one address of this engine."""
    waiting_seconds: float = 300.0
    """How long a leg waits for its partner."""
    handshake_seconds: float = 14.0
    """How long a decoder of SGLang looks for a bootstrap server that it does not know."""
    metaserver_delay_seconds: float = 0.0
    """Layerwise: how long a decoder queues before it calls back."""
    clock_offset_seconds: float = 0.0
    """How much its clock is ahead."""
    at_sigterm: AtSigterm = "exit"
    """Behaviour at SIGTERM: exit at once, or stop like a vLLM engine; see `SimulatedEngine.stop`."""
    keep_alive_seconds: float = 75.0
    """An idle connection is closed after this long."""
    kv_events_config: str | None = None
    """JSON, as engines are given it: publisher, endpoint, replay_endpoint, topic."""
    store: str | None = None
    """The directory that stands for a KV store; None has nothing and keeps nothing."""

    @property
    def cost(self) -> Cost:
        """How long work takes."""
        if self.machine is not None:
            return MACHINES[self.machine].cost
        return Cost(
            prompt_token=self.prefill_ms_per_1k_tokens / 1e6,
            step=self.decode_step_ms / 1e3,
            step_sequence=self.decode_step_ms_per_seq / 1e3,
        )

    @property
    def shape(self) -> Shape | None:
        """Return a known machine with this block size and at most this number of sequences; None without one."""
        if self.machine is None:
            return None
        machine = MACHINES[self.machine]
        shape = machine.prefill if self.role == "prefill" else machine.decode
        return replace(shape, max_num_seqs=min(shape.max_num_seqs, self.max_num_seqs), block_tokens=self.block_size)

    @property
    def kv_blocks(self) -> int:
        """Return the number of blocks that fit into KV memory."""
        return self.num_gpu_blocks if self.shape is None else self.shape.kv_tokens // self.block_size

    @property
    def kv_protocol(self) -> ProtocolName:
        return self.protocol or ("bootstrap" if self.profile.is_sglang else "pull")

    @property
    def profile(self) -> Profile:
        return ALL_PROFILES[self.profile_name]

    @property
    def connector(self) -> ConnectorName:
        return self.connector_name or self.profile.connector

    @property
    def lease_seconds(self) -> float:
        return self.profile.pin_seconds(self.connector) if self.pin_seconds is None else self.pin_seconds

    @property
    def releases_unused(self) -> bool:
        return self.profile.releases_unused(self.connector)
