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
    from collections.abc import Callable

    from proxy.common.backend import Backend


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


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """An ability of vLLM engines from version `since` on. Equal only to itself."""

    since: EngineVersion
    if_unknown: bool = False
    """Whether an engine that does not tell its version is taken to have it."""
    in_sglang: EngineVersion | Callable[[Setup], bool] | None = None
    """From which version on SGLang has it, or whether one that was started like this has it; None: none has. What does
    not tell has not.
    """

    def is_in(self, version: EngineVersion | None) -> bool:
        """Whether a vLLM of this version has it; None: the engine does not tell its version. SGLang's versions are
        lower than all of these.
        """
        return self.if_unknown if version is None else version >= self.since

    def is_in_engine(self, facts: EngineFacts | None, kind: str) -> bool:
        """Whether an engine of this kind (`vLLM` or `SGLang`) has it; None: nothing is known of it."""
        if kind != "SGLang":
            return self.is_in(None if facts is None or facts.version == UNKNOWN_VERSION else facts.version)
        if facts is None or self.in_sglang is None:
            return False
        if callable(self.in_sglang):
            return facts.identity.setup is not None and self.in_sglang(facts.identity.setup)
        return facts.version >= self.in_sglang


TOKEN_IDS: Final = Capability((0, 0), if_unknown=True, in_sglang=(0, 5, 17))
"""The stream of a completion tells token ids if it is asked for them with `return_token_ids`, and a prompt may be token
ids (SGLang `serving_completions.py`, PR #30917; older ones ignore the member)."""
CHAT_STREAM_TOKEN_IDS: Final = Capability((0, 0), if_unknown=True, in_sglang=lambda setup: setup.tells_chat_ids)
"""That of a chat does, too. SGLang up to 0.5.23 refuses such a chat with 400 (`serving_chat.py`), and
sgl-project/sglang#37365 would bring it. So each is asked when it comes up."""
WHOLE_EVENTS: Final = Capability((0, 0), in_sglang=lambda setup: setup.tells_whole_events)
"""Each event of SGLang's `/generate` has the answer so far, as text and as ids, unless it was started otherwise."""
KIMI_TOOLS: Final = Capability((0, 0), in_sglang=lambda setup: setup.tool_parser == "kimi_k2")
"""SGLang reads the tool calls of Kimi K2 in chats."""
KIMI_REASONING: Final = Capability((0, 0), in_sglang=lambda setup: setup.reasoning_parser == "kimi_k2")
"""SGLang tells the reasoning of Kimi K2 apart from content in chats."""
SEEDS_REPEAT: Final = Capability((0, 0), if_unknown=True, in_sglang=lambda setup: setup.is_deterministic)
"""The same request with the same seed has the same answer. SGLang ignores seeds, unless it was started with
`--enable-deterministic-inference` (`sampling_batch_info.py`)."""


CHAT_TOKEN_IDS: Final = Capability((0, 27), in_sglang=(0, 5, 13))
"""A chat's prompt can be given as token ids: `kv_transfer_params.prompt_token_ids` (renderers/online_renderer.py, PR
#48145), with SGLang `input_ids` (`serving_chat.py`, PR #23751)."""
LENGTH_BESIDE_TOOL_CALLS: Final = Capability((0, 32), in_sglang=(0, 5))
"""An answer that ends for length says so even if it calls tools (chat_completion/serving.py)."""
REASONING_USAGE: Final = Capability((0, 30))
"""The usage of a chat counts reasoning tokens, if the engine has a parser for them."""
ROUTED_EXPERTS: Final = Capability((0, 27))
"""Whole answers have `metrics`, and each of their choices `routed_experts` (chat_completion/protocol.py). Both are null
unless the engine runs with `--enable-per-request-metrics` or `--enable-return-routed-experts`."""
TRAILING_BLANKS_HELD: Final = Capability((0, 27))
"""White space at the end of reasoning is held back until it is known what follows (parser/engine/parser_engine.py)."""
FORCED_TOOL_PREFILL: Final = Capability((0, 23), if_unknown=True)
"""A one-token answer to a request with a forced tool call succeeds. Before, it fails with 500 after the KV cache was
pinned: `assert content is not None` in vLLM 0.18 entrypoints/openai/engine/serving.py."""
NIXL_RELEASE: Final = Capability((0, 32))
"""A decoder that rejects a request has NIXL tell the prefiller to free the KV cache that the request names.

vLLM wraps its handlers in `_with_kv_transfer_rejection_cleanup` since 0.23, and NIXL sends the message since then, but
first has to shake hands with a prefiller it does not know yet, and where that fails, because the prefiller has just
died, the decoder's engine core ends as well (PR #57570). 0.32 is the first version that was read to have the repair;
before that it is not worth the risk, as the lease is only 30 s. After a handshake the message waits for the engine's
next step, so that of an idle decoder may come after the lease."""
ASCEND_MOONCAKE_RELEASE: Final = Capability((0, 28))
"""Likewise vLLM-Ascend's MooncakeConnectorV1, since PR #14142, which no release before 0.28 has."""
NIXL_LEASE: Final = Capability((0, 23))
"""`kv_lease_duration`, which is 30 s unless configured, took the place of VLLM_NIXL_ABORT_REQUEST_TIMEOUT."""


_MASK: Final = b"***"
_MIN_SECRET_BYTES: Final = 8
"""A shorter key is no secret, and would be found in ordinary words."""


def without_key(body: bytes, authorization: str | None) -> bytes:
    """Return an engine's refusal without the credential that the engine was sent, which it may quote.

    `authorization`: the header's value; None or empty: the engine was sent none.
    """
    key = (authorization or "").removeprefix("Bearer ")
    for spelling in {key, json.dumps(key)[1:-1]}:
        if len(spelling) >= _MIN_SECRET_BYTES:
            body = body.replace(spelling.encode("utf-8", "surrogateescape"), _MASK)
    return body


class EngineKeys:
    """`key` None or empty: the engines ask for none."""

    def __init__(self, key: str | None) -> None:
        self.configure(key)

    def configure(self, key: str | None) -> None:
        """Send this key from now on."""
        self.authorization = f"Bearer {key}" if key else ""
        """What trusted backends are sent; empty: what clients show."""

    def advice(self, backend: Backend) -> str:
        """What to look at when a backend has answered 401."""
        if not self.authorization:
            return (
                "asks for a key, and this gateway has none for it: set OPENAI_API_KEY or auth.engine_api_key, unless "
                "clients are to show the engines' own"
            )
        if not backend.trusted:
            return 'asks for a key and is sent none, as it was added without "send_key": true'
        return "refuses the key it is sent: check that OPENAI_API_KEY or auth.engine_api_key is the engines' key"

    @property
    def forwards_client_key(self) -> bool:
        """Engines are sent what clients show."""
        return not self.authorization

    def mask(self, body: bytes) -> bytes:
        """Return an engine's refusal without the gateway's own key. See without_key."""
        return without_key(body, self.authorization)

    def headers(self, backend: Backend, clients_own: str | None = None) -> dict[str, str]:
        """Headers for a request to `backend`; `clients_own` is the Authorization that the client sent, if any."""
        if not self.authorization:
            return {"Authorization": clients_own} if clients_own else {}
        return {"Authorization": self.authorization} if backend.trusted else {}
