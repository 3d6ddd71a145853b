"""The configuration of one simulated engine. Every field is a flag of `mock-engine`."""

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
ProtocolName = Literal["pull", "bootstrap", "layerwise", "push", "transfer", "store", "none"]
LoadFailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one engine, which never change, except for the role. All delays are zero by default."""

    role: SimRole = "both"
    model: str = "sim"
    profile_name: str = "v0.30"
    connector_name: ConnectorName | None = None
    protocol: ProtocolName | None = None
    api_key: str | None = None
    max_model_len: int = 131_072
    default_max_tokens: int = 256
    """Maximum tokens of a chat without `max_tokens`, like `max_new_tokens` in a model's generation config."""
    block_size: int = 128
    num_gpu_blocks: int = 100_000
    prefill_ms_per_1k_tokens: float = 0.0
    decode_step_ms: float = 0.0
    decode_step_ms_per_seq: float = 0.0
    machine: str | None = None
    """Name of a machine in `hardware.machines.MACHINES`, whose times, batches and KV memory the engine simulates.

    It overrides the three delays and `num_gpu_blocks`. None: those options apply.
    """
    max_num_seqs: int = 256
    max_num_queued_reqs: int | None = None
    """Maximum number of requests that wait or run.

    More are refused with 503 (vLLM `--max-num-queued-reqs`). None: no limit.
    """
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
    """Whether a chat's prompt may be given in `kv_transfer_params._vllm_ascend_recompute_token_ids`.

    See vllm-ascend `patch/recompute_proxy.py`.
    """
    dev_mode: bool = False
    """Whether the engine reports its configuration, as with VLLM_SERVER_DEV_MODE=1."""
    ec_role: Literal["", "producer", "consumer"] = ""
    """The role in the transfer of encoded media. Empty: the engine has no connector for them."""
    ec_connector: Literal["ECCPUConnector", "ECMooncakeConnector"] = "ECCPUConnector"
    """The connector for encoded media."""
    allocates_after_prefill: bool = False
    """Whether a decoder of SGLang reports the allocation policy `prefill_complete`."""
    bidirectional_kv_xfer: bool = False
    """Whether a decoder reports its own KV cache, as with NIXL's option of this name."""
    request_id_headers: bool = False
    request_id_randomization: bool = True
    """Whether request IDs get a random suffix. If not, the engine refuses a request whose ID is already in use."""
    kv_host: str | None = None
    """The address that prefillers report to decoders; None: the listening address."""
    adapters: list[str] = field(default_factory=list, compare=False)
    """Names of the loaded adapters (LoRA). `POST /v1/load_lora_adapter` adds one."""
    unreachable_ports: frozenset[int] = frozenset()
    """Ports of prefillers that this decoder cannot reach when it pulls KV."""
    bootstrap_port: int = 0
    """The second port of a prefiller, if its protocol has one; 0: any free port.

    For a decoder of SGLang: the bootstrap port for requests that name none. Its default is then 8998.
    """
    pd_role_switch: bool = False
    """Whether an engine of SGLang exchanges its role on request (`--enable-pd-role-switch`)."""
    reports_only_role_at_start: bool = False
    """Whether `/server_info` of SGLang has the role of the start alone, as before 0.5.23."""
    free_gpu_gb: float = 16.0
    """GPU memory in GB that is free for the CUDA graphs of a prefiller of SGLang that becomes a decoder."""
    dp_size: int = 1
    """The number of data-parallel ranks at the address of this engine."""
    waiting_seconds: float = 300.0
    """Maximum time that a leg waits for its partner, in seconds."""
    handshake_seconds: float = 14.0
    """Maximum time for which a decoder of SGLang tries to reach an unknown bootstrap server, in seconds."""
    metaserver_delay_seconds: float = 0.0
    """Seconds until a decoder of the layerwise protocol calls back."""
    clock_offset_seconds: float = 0.0
    """Seconds by which the engine's clock is ahead of the host's clock."""
    at_sigterm: AtSigterm = "exit"
    """The behaviour at SIGTERM: exit at once, or stop like a vLLM engine; see `SimulatedEngine.stop`."""
    keep_alive_seconds: float = 75.0
    """Seconds after which the engine closes an idle connection."""
    kv_events_config: str | None = None
    """JSON in the form that engines accept: publisher, endpoint, replay_endpoint, topic. None: no KV events."""
    store: str | None = None
    """The directory that simulates a KV store. None: KV is neither stored nor found."""

    def switch_role(self, role: SimRole) -> None:
        """Change the role, as SGLang does at `/pd_role_switch`."""
        object.__setattr__(self, "role", role)

    @property
    def cost(self) -> Cost:
        """Return the cost of work on this engine."""
        if self.machine is not None:
            return MACHINES[self.machine].cost
        return Cost(
            prompt_token=self.prefill_ms_per_1k_tokens / 1e6,
            step=self.decode_step_ms / 1e3,
            step_sequence=self.decode_step_ms_per_seq / 1e3,
        )

    @property
    def shape(self) -> Shape | None:
        """Return the machine's shape with this block size and number of sequences; None without a known machine."""
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
        return self.connector_name or ("nixl" if self.protocol == "push" else self.profile.connector)

    @property
    def lease_seconds(self) -> float:
        return self.profile.pin_seconds(self.connector) if self.pin_seconds is None else self.pin_seconds

    @property
    def releases_unused(self) -> bool:
        return self.profile.releases_unused(self.connector)
