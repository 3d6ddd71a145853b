"""What an engine says of itself when it comes up, read from its own answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

EngineVersion = tuple[int, ...]
"""Of vLLM major and minor, for example (0, 23), of SGLang one number more: (0, 5, 17)."""
UNKNOWN_VERSION: Final[EngineVersion] = (0, 0)
_KINDS: Final = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """None, or UNKNOWN_VERSION, is what it does not tell."""

    version: EngineVersion = UNKNOWN_VERSION
    max_model_len: int | None = None
    """Tokens that fit into a sequence, prompt and answer together."""
    max_num_seqs: int | None = None
    """Sequences it works on at a time; more wait inside."""
    kv_tokens: int | None = None
    """Tokens that fit into its KV memory."""
    ranks: int | None = None
    """Data-parallel ranks among which its address shares out what is sent there; each is an engine by itself."""
    identity: Identity = field(default_factory=lambda: Identity(), compare=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine is, as far as it has told by now."""

    kind: str | None = None
    """`vLLM` or `SGLang`; None for what is neither, or does not tell."""
    models: frozenset[str] = frozenset()
    """What its models are called; adapters, which come and go, are not among them."""
    adapters: frozenset[str] = frozenset()
    """What its adapters are called (LoRA), which requests name in the place of a model."""
    is_gateway: bool = False
    """The address is that of a gateway like this one."""
    refused_key: bool = False
    """The engine did not tell its models: it wants a key, or another one than it was sent."""
    setup: Setup | None = None
    """How it was started; None: it has not been asked yet."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine was started. SGLang tells, and vLLM with VLLM_SERVER_DEV_MODE=1. None is what it does not tell."""

    disaggregation_mode: str | None = None
    """SGLang only: `prefill`, `decode`, or `null` for neither."""
    bootstrap_port: int | None = None
    """SGLang only."""
    is_deterministic: bool = False
    """SGLang only: the same seed gives the same answer (`--enable-deterministic-inference`)."""
    tells_whole_events: bool = False
    """SGLang only: each event of `/generate` has the whole answer so far, its text and its token ids."""
    tool_parser: str | None = None
    """SGLang only: how it reads tool calls (`--tool-call-parser`)."""
    reasoning_parser: str | None = None
    """SGLang only: how it reads reasoning (`--reasoning-parser`)."""
    tells_chat_ids: bool = False
    """SGLang only: it tells token ids in the stream of a chat. Its setup does not say: it is asked besides."""
    tells_transfer: bool = False
    """vLLM tells how its KV cache travels."""
    kv_connectors: tuple[str, ...] = ()
    """Of vLLM, in its words: what moves its KV cache, several if they work together; nothing: it stays where it is."""
    kv_role: str | None = None
    """vLLM only: `kv_producer`, `kv_consumer` or `kv_both`."""
    lease_seconds: float | None = None
    """vLLM's NixlConnector only, where it is set: `kv_lease_duration`, for which it keeps KV that is not fetched."""
    engine_id: str | None = None
    """vLLM only: what its KV connector calls it, with `_dp` and a number behind it where it has several ranks."""
    dp_size: int = 1
    """vLLM only: data-parallel ranks, which may be behind other addresses, and then share an `engine_id`."""


def parse_kind(models: Any) -> str | None:
    """Whose engine it is, by its `/v1/models`: ModelCard.owned_by, which is the same for every model and in every
    version of either.
    """
    owners = (_member(model, "owned_by") for model in _list(models, "data"))
    return next((_KINDS[owner] for owner in owners if isinstance(owner, str) and owner in _KINDS), None)


def parse_models(models: Any) -> frozenset[str]:
    """The names in an engine's `/v1/models`, without those of adapters, which have a parent."""
    return _names(models, of_adapters=False)


def parse_adapters(models: Any) -> frozenset[str]:
    """The names of adapters in an engine's `/v1/models`."""
    return _names(models, of_adapters=True)


def _names(models: Any, *, of_adapters: bool) -> frozenset[str]:
    listed = _list(models, "data")
    names = (_member(model, "id") for model in listed if (_member(model, "parent") is not None) is of_adapters)
    return frozenset(name for name in names if isinstance(name, str))


def parse_setup(info: Any) -> Setup:
    """How it was started, as far as `/server_info?config_format=json` tells; older SGLang has `/get_server_info`."""
    mode = _member(info, "disaggregation_mode")
    if isinstance(mode, str):
        return Setup(
            mode,
            _count(_member(info, "disaggregation_bootstrap_port")),
            is_deterministic=_member(info, "enable_deterministic_inference") is True,
            tells_whole_events=not (
                _member(info, "incremental_streaming_output") or _member(info, "skip_tokenizer_init")
            ),
            tool_parser=_text(_member(info, "tool_call_parser")),
            reasoning_parser=_text(_member(info, "reasoning_parser")),
        )
    config = _member(info, "vllm_config")
    if not isinstance(config, dict) or "kv_transfer_config" not in config:
        return Setup()
    transfer = config["kv_transfer_config"]
    told = _member(transfer, "kv_connector")
    parts = (told,)
    if told == "MultiConnector":
        listed = _list(_member(transfer, "kv_connector_extra_config"), "connectors")
        parts = tuple(_member(part, "kv_connector") for part in listed) or parts
    lease = _member(_member(transfer, "kv_connector_extra_config"), "kv_lease_duration")
    role, engine_id = _member(transfer, "kv_role"), _member(transfer, "engine_id")
    return Setup(
        tells_transfer=True,
        kv_connectors=() if told is None else tuple(map(str, parts)),
        kv_role=role if isinstance(role, str) else None,
        lease_seconds=float(lease) if isinstance(lease, int | float) and lease > 0 else None,
        engine_id=engine_id if isinstance(engine_id, str) else None,
        dp_size=_count(_member(_member(config, "parallel_config"), "data_parallel_size")) or 1,
    )


def parse_engine_version(answer: Any) -> EngineVersion:
    """What an engine's `/version` tells; UNKNOWN_VERSION when that is not a version."""
    return _version(answer, 2)


def parse_sglang_version(info: Any) -> EngineVersion:
    """What `/server_info` of SGLang tells, which has no `/version`; UNKNOWN_VERSION when it does not."""
    return _version(info, 3) if _member(info, "disaggregation_mode") is not None else UNKNOWN_VERSION


def _version(answer: Any, count: int) -> EngineVersion:
    told = _member(answer, "version")
    numbers = re.match(rf"v?\d{{1,4}}(?:\.\d{{1,4}}){{{count - 1}}}", told) if isinstance(told, str) else None
    return tuple(int(number) for number in numbers[0].lstrip("v").split(".")) if numbers else UNKNOWN_VERSION


def parse_max_model_len(answer: Any) -> int | None:
    """What an engine's `/v1/models` tells of the first model it tells it of, in tokens; None when of none. Adapters,
    which are listed, too, have no length of their own.
    """
    models = _member(answer, "data")
    for model in models if isinstance(models, list) else ():
        length = _count(_member(model, "max_model_len"))
        if length is not None:
            return length
    return None


def parse_max_num_seqs(answer: Any) -> int | None:
    """What an engine's `/server_info?config_format=json` tells, over all data-parallel ranks behind its address.

    SGLang: a member of `internal_states` per rank, each with what its scheduler made of max_running_requests
    (Scheduler.get_internal_state). vLLM with VLLM_SERVER_DEV_MODE=1: the whole VllmConfig, whose SchedulerConfig is one
    rank's; max_num_active_seqs, where it is set, says how many of max_num_seqs may run.
    """
    states = _member(answer, "internal_states")
    if isinstance(states, list):
        ranks = [_count(_member(state, "effective_max_running_requests_per_dp")) for state in states]
        return sum(rank for rank in ranks if rank is not None) if ranks and all(ranks) else None
    config = _member(answer, "vllm_config")
    scheduler = _member(config, "scheduler_config")
    per_rank = _count(_member(scheduler, "max_num_active_seqs")) or _count(_member(scheduler, "max_num_seqs"))
    return None if per_rank is None else per_rank * _vllm_ranks(_member(config, "parallel_config"))


def parse_kv_tokens(answer: Any) -> int | None:
    """How many tokens fit into its KV memory by the same answer, over all data-parallel ranks behind its address; None:
    it does not tell. SGLang: max_total_num_tokens is one rank's (Scheduler.max_total_num_tokens).
    """
    ranks = len(_list(answer, "internal_states")) or 1
    if (tokens := _count(_member(answer, "max_total_num_tokens"))) is not None:
        return ranks * tokens
    config = _member(answer, "vllm_config")
    cache = _member(config, "cache_config")
    blocks, size = _count(_member(cache, "num_gpu_blocks")), _count(_member(cache, "block_size"))
    return blocks * size * _vllm_ranks(_member(config, "parallel_config")) if blocks and size else None


def parse_ranks(answer: Any) -> int | None:
    """How many data-parallel ranks an engine's `/server_info?config_format=json` says are behind its address; None: the
    answer does not say.
    """
    if states := _list(answer, "internal_states"):
        return len(states)
    parallel = _member(_member(answer, "vllm_config"), "parallel_config")
    return None if _count(_member(parallel, "data_parallel_size")) is None else _vllm_ranks(parallel)


def _vllm_ranks(parallel: Any) -> int:
    """Ranks that one API server of vLLM feeds: all of them, unless somebody else balances between them, outside each
    rank or outside each node (ParallelConfig.local_engines_only).
    """
    if _member(parallel, "data_parallel_external_lb"):
        return 1
    size = "data_parallel_size_local" if _member(parallel, "data_parallel_hybrid_lb") else "data_parallel_size"
    return _count(_member(parallel, size)) or 1


def _list(value: Any, name: str) -> list[Any]:
    listed = _member(value, name)
    return listed if isinstance(listed, list) else []


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    """A positive whole number; None for anything else. In Python True is one, too."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
