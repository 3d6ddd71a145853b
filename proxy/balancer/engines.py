"""Facts about an engine from its own answers, its capabilities by version, and the key that it is sent.

Capabilities are one table. A row has the version of vLLM that introduced it (vLLM-Ascend uses the same numbers), the
assumption for a vLLM of unknown version, and the SGLang engines that have it.

The gateway's engine key goes only to trusted backends: those of the configuration, and those that an administrator
added with `"send_key": true`. Other added instances get traffic without it, so that a mistyped address cannot collect
the key. Without an engine key, pdproxy passes on the client's credential.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.common.backend import Backend


EngineVersion = tuple[int, ...]
"""Version numbers of an engine: two of vLLM, such as (0, 23), and three of SGLang, such as (0, 5, 17)."""
UNKNOWN_VERSION: Final[EngineVersion] = (0, 0)
_KINDS: Final = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that an engine reports. None or UNKNOWN_VERSION: the engine does not report the fact."""

    version: EngineVersion = UNKNOWN_VERSION
    max_model_len: int | None = None
    """Maximum length of a sequence with its prompt, in tokens."""
    max_num_seqs: int | None = None
    """Maximum running sequences. Further ones wait inside the engine."""
    kv_memory_tokens: int | None = None
    """Size of the KV memory, in tokens."""
    data_parallel_ranks: int | None = None
    """Data-parallel ranks behind the address, which distributes requests among them."""
    identity: EngineIdentity = field(default_factory=lambda: EngineIdentity(), compare=False)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Kind, models and setup of an engine, as far as it has reported them."""

    engine_kind: str | None = None
    """`vLLM` or `SGLang`. None: it is neither, or has not answered."""
    models: frozenset[str] = frozenset()
    """Names of its models, without adapters."""
    adapters: frozenset[str] = frozenset()
    """Names of its LoRA adapters, which requests use in place of a model."""
    is_gateway: bool = False
    """Whether the address is that of a gateway like this one."""
    has_refused_key: bool = False
    """Whether the engine rejected the request for its models, because it requires a key or another one."""
    engine_setup: EngineSetup | None = None
    """How the engine was started. None: not read yet."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How an engine was started. SGLang reports it, and vLLM with VLLM_SERVER_DEV_MODE=1. None: not reported."""

    disaggregation_mode: str | None = None
    """SGLang only: `prefill`, `decode` or `null`. It changes when the engine exchanges its role."""
    can_switch_role: bool = False
    """SGLang only: whether it may exchange its role (`--enable-pd-role-switch`)."""
    decode_graph_gb: float | None = None
    """SGLang only: memory of a decoder's CUDA graphs in GB, on the rank with most (0.5.23). None: not a decoder."""
    decode_graph_sizes: tuple[int, ...] = ()
    """SGLang only: batch sizes of a decoder's CUDA graphs (0.5.23)."""
    bootstrap_port: int | None = None
    """SGLang only: port of the bootstrap server."""
    is_deterministic: bool = False
    """SGLang only: whether the same seed gives the same answer (`--enable-deterministic-inference`)."""
    has_cumulative_events: bool = False
    """SGLang only: whether each event of `/generate` has the whole answer so far, as text and token ids."""
    allocates_after_prefill: bool = False
    """SGLang only: whether a decoder takes KV memory only when the prompt is computed
    (`--disaggregation-decode-allocation-policy prefill_complete`, 0.5.23)."""
    tool_parser: str | None = None
    """SGLang only: parser of tool calls (`--tool-call-parser`)."""
    reasoning_parser: str | None = None
    """SGLang only: parser of reasoning (`--reasoning-parser`)."""
    has_chat_token_ids: bool = False
    """SGLang only: whether chat streams have token ids. A test request finds it out."""
    has_transfer_config: bool = False
    """vLLM only: whether it reports its KV transfer configuration."""
    kv_connectors: tuple[str, ...] = ()
    """vLLM only: names of its KV connectors. Empty: the KV cache is not transferred."""
    ec_connector: str | None = None
    """vLLM only: name of its connector for encoded media (`--ec-transfer-config`)."""
    ec_port: int | None = None
    """vLLM's ECMooncakeConnector only: port to which encoders send encoded media (`reservation_zmq_port`)."""
    kv_role: str | None = None
    """vLLM only: `kv_producer`, `kv_consumer` or `kv_both`."""
    lease_seconds: float | None = None
    """vLLM's NixlConnector only: `kv_lease_duration`, the time for which it keeps KV that is not fetched."""
    has_bidirectional_kv: bool = False
    """vLLM's NixlConnector only: whether decoders keep the KV of answers for prefillers (`bidirectional_kv_xfer`)."""
    answer_kv_seconds: float | None = None
    """vLLM's NixlConnector only: `decoder_kv_blocks_ttl`, the time for which a decoder keeps the KV of an answer."""
    engine_id: str | None = None
    """vLLM only: ID of its KV connector. With several ranks, the connector appends `_dp` and a number to it."""
    dp_size: int = 1
    """vLLM only: data-parallel ranks. Those behind other addresses share the `engine_id`."""


def parse_kind(models_answer: Any) -> str | None:
    """Return the kind of an engine from its `/v1/models`, or None.

    ModelCard.owned_by is the same for every model and in every version of vLLM and SGLang.
    """
    owners = (_object_member(model, "owned_by") for model in _list_member(models_answer, "data"))
    return next((_KINDS[owner] for owner in owners if isinstance(owner, str) and owner in _KINDS), None)


def parse_models(models_answer: Any) -> frozenset[str]:
    """Return the names in an engine's `/v1/models`, without adapters, which have a parent."""
    return _model_names(models_answer, of_adapters=False)


def parse_adapters(models_answer: Any) -> frozenset[str]:
    """Return the names of adapters in an engine's `/v1/models`."""
    return _model_names(models_answer, of_adapters=True)


def _model_names(models: Any, *, of_adapters: bool) -> frozenset[str]:
    listed = _list_member(models, "data")
    names = (
        _object_member(model, "id") for model in listed if (_object_member(model, "parent") is not None) is of_adapters
    )
    return frozenset(name for name in names if isinstance(name, str))


def parse_setup(server_info: Any) -> EngineSetup:
    """Return the setup from `/server_info?config_format=json`, or from `/get_server_info` of an older SGLang."""
    mode = _object_member(server_info, "disaggregation_mode")
    if isinstance(mode, str):
        # The options keep the mode of the start. The state of the scheduler has the present one.
        states = _list_member(server_info, "internal_states")
        present = _object_member(states[0], "disaggregation_mode") if states else None
        if isinstance(present, str):
            mode = present
        graph_gb, graph_sizes = _parse_decode_graphs(states) if mode == "decode" else (None, ())
        return EngineSetup(
            mode,
            can_switch_role=_object_member(server_info, "enable_pd_role_switch") is True,
            decode_graph_gb=graph_gb,
            decode_graph_sizes=graph_sizes,
            bootstrap_port=_positive_count(_object_member(server_info, "disaggregation_bootstrap_port")),
            is_deterministic=_object_member(server_info, "enable_deterministic_inference") is True,
            allocates_after_prefill=_object_member(server_info, "disaggregation_decode_allocation_policy")
            == "prefill_complete",
            has_cumulative_events=not (
                _object_member(server_info, "incremental_streaming_output")
                or _object_member(server_info, "skip_tokenizer_init")
            ),
            tool_parser=_text_or_none(_object_member(server_info, "tool_call_parser")),
            reasoning_parser=_text_or_none(_object_member(server_info, "reasoning_parser")),
        )
    config = _object_member(server_info, "vllm_config")
    if not isinstance(config, dict) or "kv_transfer_config" not in config:
        return EngineSetup()
    ec_config = _object_member(config, "ec_transfer_config")
    transfer = config["kv_transfer_config"]
    connector = _object_member(transfer, "kv_connector")
    parts, extra = (connector,), _object_member(transfer, "kv_connector_extra_config")
    if connector == "MultiConnector":
        listed = _list_member(extra, "connectors")
        parts = tuple(_object_member(part, "kv_connector") for part in listed) or parts
        # Each of its connectors has separate options (vLLM `multi_connector.py`).
        own = (_object_member(part, "kv_connector_extra_config") for part in listed)
        extra = {name: value for options in own if isinstance(options, dict) for name, value in options.items()}
    role, engine_id = _object_member(transfer, "kv_role"), _object_member(transfer, "engine_id")
    return EngineSetup(
        has_transfer_config=True,
        kv_connectors=() if connector is None else tuple(map(str, parts)),
        ec_connector=_text_or_none(_object_member(ec_config, "ec_connector")),
        ec_port=_positive_count(
            _object_member(_object_member(ec_config, "ec_connector_extra_config"), "reservation_zmq_port")
        ),
        kv_role=role if isinstance(role, str) else None,
        lease_seconds=_positive_seconds(_object_member(extra, "kv_lease_duration")),
        answer_kv_seconds=_positive_seconds(_object_member(extra, "decoder_kv_blocks_ttl")),
        has_bidirectional_kv=_object_member(extra, "bidirectional_kv_xfer") is True,
        engine_id=engine_id if isinstance(engine_id, str) else None,
        dp_size=_positive_count(_object_member(_object_member(config, "parallel_config"), "data_parallel_size")) or 1,
    )


def _parse_decode_graphs(states: Sequence[Any]) -> tuple[float | None, tuple[int, ...]]:
    """Return the memory of a decoder's CUDA graphs on the rank with most, in GB, and their batch sizes.

    The memory is None if a rank does not report it.
    """
    memory = [_object_member(state, "decode_cuda_graph_memory_gb") for state in states]
    if not memory or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in memory):
        return None, ()
    return max(memory), tuple(size for size in _list_member(states[0], "decode_cuda_graph_bs") if _positive_count(size))


def parse_engine_version(answer: Any) -> EngineVersion:
    """Return the version from an engine's `/version`, or UNKNOWN_VERSION."""
    return _parse_version_text(answer, 2)


def parse_sglang_version(server_info: Any) -> EngineVersion:
    """Return the version from SGLang's `/server_info`, because it has no `/version`, or UNKNOWN_VERSION."""
    return (
        _parse_version_text(server_info, 3)
        if _object_member(server_info, "disaggregation_mode") is not None
        else UNKNOWN_VERSION
    )


def _parse_version_text(answer: Any, count: int) -> EngineVersion:
    text = _object_member(answer, "version")
    numbers = re.match(rf"v?\d{{1,4}}(?:\.\d{{1,4}}){{{count - 1}}}", text) if isinstance(text, str) else None
    return tuple(int(number) for number in numbers[0].lstrip("v").split(".")) if numbers else UNKNOWN_VERSION


def parse_max_model_len(answer: Any) -> int | None:
    """Return the first maximum length in an engine's `/v1/models`, in tokens, or None. Adapters have no length."""
    models = _object_member(answer, "data")
    for model in models if isinstance(models, list) else ():
        length = _positive_count(_object_member(model, "max_model_len"))
        if length is not None:
            return length
    return None


def parse_max_num_seqs(answer: Any) -> int | None:
    """Return the maximum running sequences of all ranks from `/server_info?config_format=json`, or None.

    SGLang reports one member of `internal_states` per rank, with the effective max_running_requests
    (Scheduler.get_internal_state). vLLM with VLLM_SERVER_DEV_MODE=1 reports its VllmConfig, whose SchedulerConfig is
    that of one rank. If max_num_active_seqs is set, it replaces max_num_seqs.
    """
    states = _object_member(answer, "internal_states")
    if isinstance(states, list):
        ranks = [_positive_count(_object_member(state, "effective_max_running_requests_per_dp")) for state in states]
        return sum(rank for rank in ranks if rank is not None) if ranks and all(ranks) else None
    config = _object_member(answer, "vllm_config")
    scheduler = _object_member(config, "scheduler_config")
    per_rank = _positive_count(_object_member(scheduler, "max_num_active_seqs")) or _positive_count(
        _object_member(scheduler, "max_num_seqs")
    )
    return None if per_rank is None else per_rank * _count_vllm_ranks(_object_member(config, "parallel_config"))


def parse_kv_tokens(answer: Any) -> int | None:
    """Return the tokens in the KV memory of all ranks from `/server_info?config_format=json`, or None.

    SGLang's max_total_num_tokens is that of one rank (Scheduler.max_total_num_tokens).
    """
    ranks = len(_list_member(answer, "internal_states")) or 1
    if (tokens := _positive_count(_object_member(answer, "max_total_num_tokens"))) is not None:
        return ranks * tokens
    config = _object_member(answer, "vllm_config")
    cache = _object_member(config, "cache_config")
    blocks, size = (
        _positive_count(_object_member(cache, "num_gpu_blocks")),
        _positive_count(_object_member(cache, "block_size")),
    )
    return blocks * size * _count_vllm_ranks(_object_member(config, "parallel_config")) if blocks and size else None


def parse_ranks(answer: Any) -> int | None:
    """Return the data-parallel ranks behind an address from `/server_info?config_format=json`, or None."""
    if states := _list_member(answer, "internal_states"):
        return len(states)
    parallel = _object_member(_object_member(answer, "vllm_config"), "parallel_config")
    return (
        None if _positive_count(_object_member(parallel, "data_parallel_size")) is None else _count_vllm_ranks(parallel)
    )


def _count_vllm_ranks(parallel: Any) -> int:
    """Return the ranks that one API server of vLLM feeds (ParallelConfig.local_engines_only).

    These are all ranks, unless a load balancer in front distributes requests to each rank or each node.
    """
    if _object_member(parallel, "data_parallel_external_lb"):
        return 1
    size = "data_parallel_size_local" if _object_member(parallel, "data_parallel_hybrid_lb") else "data_parallel_size"
    return _positive_count(_object_member(parallel, size)) or 1


def _list_member(value: Any, name: str) -> list[Any]:
    listed = _object_member(value, name)
    return listed if isinstance(listed, list) else []


def _object_member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _positive_seconds(value: Any) -> float | None:
    """Return a positive number of seconds, or None for any other value."""
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _positive_count(value: Any) -> int | None:
    """Return a positive integer, or None for any other value. True is an int in Python, too."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """A capability of engines that depends on their version."""

    since_vllm_version: EngineVersion
    """First version of vLLM that has it."""
    if_unknown: bool = False
    """Whether a vLLM of unknown version is assumed to have it."""
    since_sglang_version: EngineVersion | Callable[[EngineSetup], bool] | None = None
    """First version of SGLang that has it, or a function that returns whether an SGLang with a setup has it. None: none
    has it. An SGLang of unknown version or setup does not have it."""

    def is_in_vllm_version(self, vllm_version: EngineVersion | None) -> bool:
        """Return whether a vLLM of a version has it. None: the version is unknown."""
        return self.if_unknown if vllm_version is None else vllm_version >= self.since_vllm_version

    def is_available_in(self, engine_facts: EngineFacts | None, engine_kind: str) -> bool:
        """Return whether an engine of a kind (`vLLM` or `SGLang`) has it.

        `engine_facts` None: nothing is known about it.
        """
        if engine_kind != "SGLang":
            return self.is_in_vllm_version(
                None if engine_facts is None or engine_facts.version == UNKNOWN_VERSION else engine_facts.version
            )
        if engine_facts is None or self.since_sglang_version is None:
            return False
        if callable(self.since_sglang_version):
            return engine_facts.identity.engine_setup is not None and self.since_sglang_version(
                engine_facts.identity.engine_setup
            )
        return engine_facts.version >= self.since_sglang_version


TOKEN_IDS: Final = Capability((0, 0), if_unknown=True, since_sglang_version=(0, 5, 17))
"""Completion streams have token ids if the request sets `return_token_ids`, and a prompt may be token ids (SGLang
`serving_completions.py`, PR #30917; older versions ignore the member)."""
CHAT_STREAM_TOKEN_IDS: Final = Capability(
    (0, 0), if_unknown=True, since_sglang_version=lambda setup: setup.has_chat_token_ids
)
"""Chat streams have token ids, too. SGLang up to 0.5.23 rejects such a chat with 400 (`serving_chat.py`);
sgl-project/sglang#37365 would add it. So pdproxy sends a test request to each engine that comes up."""
WHOLE_EVENTS: Final = Capability((0, 0), since_sglang_version=lambda setup: setup.has_cumulative_events)
"""Each event of SGLang's `/generate` has the answer so far, as text and token ids, unless an option changes that."""
KIMI_TOOLS: Final = Capability((0, 0), since_sglang_version=lambda setup: setup.tool_parser == "kimi_k2")
"""SGLang parses the tool calls of Kimi K2 in chats."""
KIMI_REASONING: Final = Capability((0, 0), since_sglang_version=lambda setup: setup.reasoning_parser == "kimi_k2")
"""SGLang separates the reasoning of Kimi K2 from the content in chats."""
SEEDS_REPEAT: Final = Capability((0, 0), if_unknown=True, since_sglang_version=lambda setup: setup.is_deterministic)
"""The same request with the same seed has the same answer. SGLang ignores seeds unless it was started with
`--enable-deterministic-inference` (`sampling_batch_info.py`)."""


CHAT_TOKEN_IDS: Final = Capability((0, 27), since_sglang_version=(0, 5, 13))
"""The prompt of a chat can be token ids. The member is `kv_transfer_params.prompt_token_ids` in vLLM
(renderers/online_renderer.py, PR #48145), and `input_ids` in SGLang (`serving_chat.py`, PR #23751)."""
LENGTH_BESIDE_TOOL_CALLS: Final = Capability((0, 32), since_sglang_version=(0, 5))
"""An answer cut off by its length has finish reason `length` even if it calls tools (chat_completion/serving.py)."""
REASONING_USAGE: Final = Capability((0, 30))
"""The usage of a chat counts reasoning tokens if the engine has a reasoning parser."""
ROUTED_EXPERTS: Final = Capability((0, 27))
"""Whole answers have `metrics`, and each of their choices `routed_experts` (chat_completion/protocol.py). Both are null
unless the engine runs with `--enable-per-request-metrics` or `--enable-return-routed-experts`."""
TRAILING_BLANKS_HELD: Final = Capability((0, 27))
"""White space at the end of reasoning is held back until the next token (parser/engine/parser_engine.py)."""
FORCED_TOOL_PREFILL: Final = Capability((0, 23), if_unknown=True)
"""A one-token answer to a request with a forced tool call succeeds. Older versions fail with 500 after they have pinned
the KV cache: `assert content is not None` in vLLM 0.18 entrypoints/openai/engine/serving.py."""
NIXL_RELEASE: Final = Capability((0, 32))
"""A decoder that rejects a request sends the prefiller a NIXL message that frees the request's KV cache.

vLLM wraps its handlers in `_with_kv_transfer_rejection_cleanup` and sends the message since 0.23. But NIXL must first
shake hands with a prefiller that is new to it. If that fails because the prefiller has died, the decoder's engine core
ends as well (PR #57570). The code of 0.32 has the repair. In older versions the release is not worth the risk, because
the lease lasts only 30 s. After a handshake the message waits for the engine's next step, so an idle decoder may send
it after the end of the lease."""
ASCEND_MOONCAKE_RELEASE: Final = Capability((0, 28))
"""The same for vLLM-Ascend's MooncakeConnectorV1, since PR #14142, which no release before 0.28 has."""
NIXL_LEASE: Final = Capability((0, 23))
"""`kv_lease_duration` (default 30 s) replaces VLLM_NIXL_ABORT_REQUEST_TIMEOUT."""


_MASK: Final = b"***"
_MIN_SECRET_BYTES: Final = 8
"""Minimum length of a key that is masked. A shorter one occurs in ordinary words."""


def mask_credential(error_body: bytes, authorization: str | None) -> bytes:
    """Return an engine's error body with the credential masked that it may quote.

    `authorization` is the value of the header that the engine was sent. None or empty: it was sent none.
    """
    key = (authorization or "").removeprefix("Bearer ")
    for spelling in {key, json.dumps(key)[1:-1]}:
        if len(spelling) >= _MIN_SECRET_BYTES:
            error_body = error_body.replace(spelling.encode("utf-8", "surrogateescape"), _MASK)
    return error_body


class EngineKeys:
    """Credentials for engines. `key` is the gateway's engine key. None or empty: there is none."""

    def __init__(self, key: str | None) -> None:
        self.use_key(key)

    def use_key(self, key: str | None) -> None:
        """Use another API key for engines from now on."""
        self.authorization = f"Bearer {key}" if key else ""
        """Value of the header for trusted backends. Empty: backends get the client's own header."""

    def advice_after_401(self, backend: Backend) -> str:
        """Return the problem, and what to check, after a backend has answered 401."""
        if not self.authorization:
            return (
                "requires a key, and this gateway has none: set OPENAI_API_KEY or auth.engine_api_key, unless clients "
                "send the engine's own key"
            )
        if not backend.is_trusted:
            return 'requires a key, and pdproxy sends it none because it was added without "send_key": true'
        return "rejects the key that pdproxy sends: check OPENAI_API_KEY or auth.engine_api_key"

    @property
    def forwards_client_key(self) -> bool:
        """Whether engines get the credential of the client."""
        return not self.authorization

    def mask_key(self, error_body: bytes) -> bytes:
        """Return an engine's error body with the gateway's key masked. See without_key."""
        return mask_credential(error_body, self.authorization)

    def credential_headers(self, backend: Backend, client_authorization: str | None = None) -> dict[str, str]:
        """Return the headers with the credential for a backend.

        `client_authorization` is the Authorization header of the client. None: it sent none.
        """
        if not self.authorization:
            return {"Authorization": client_authorization} if client_authorization else {}
        return {"Authorization": self.authorization} if backend.is_trusted else {}
