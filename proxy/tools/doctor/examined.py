"""Data about engines, as input of the checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.balancer.engines import EngineFacts, EngineKeys
from proxy.common.backend import Backend, Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.settings import Settings

IDLE_SECONDS: Final = 2.2
"""Slightly longer than the gateway keeps an idle connection to an engine, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examined:
    """Data about one engine. A text in place of another type is the reason why the value is unknown."""

    backend: Backend
    addresses: tuple[str, ...] = ()
    name_problem: str = ""
    connects: dict[str, float | str] = field(default_factory=dict)
    """Seconds to connect, or the problem, by address."""
    health: int | str = ""
    """Status of its health route, or the problem; empty if not queried."""
    version: str | None = None
    """Version as the engine reports it."""
    models: int | str = ""
    """Status of /v1/models, or the problem; empty if not queried."""
    facts: EngineFacts = field(default_factory=EngineFacts)
    ahead_seconds: float | None = None
    """Seconds by which its clock is ahead of this host; None if unknown."""
    keeps_alive: bool | None = None
    """Whether a connection can be used again after IDLE_SECONDS; None: not known."""
    has_metrics: bool = False
    counts_prompts: bool = False
    """Whether its /metrics count the origin of KV cache."""
    started_at: float | None = None
    """Time of its start as its /metrics report it, in seconds since the Unix epoch; None if unknown."""
    served_tokens: float | None = None
    """Tokens that it has computed and generated since its start; None if unknown."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options with which it was started, by their flags, as far as it reports them. See `compared_options`."""
    bootstrap: str = ""
    """Why its bootstrap server is unreachable; empty if it is reachable or not needed."""

    @property
    def subject(self) -> str:
        """The name of the instance in findings."""
        return f"{self.backend.role} {self.backend.name}"

    @property
    def serves(self) -> frozenset[str]:
        """Models without adapters, from the configuration or else as the engine reports; empty if unknown."""
        return frozenset(self.backend.models) or self.facts.identity.models

    @property
    def is_reached(self) -> bool:
        """Whether the instance accepts connections."""
        return any(isinstance(told, float) for told in self.connects.values())

    @property
    def is_healthy(self) -> bool:
        """Whether the instance passes its health check."""
        return self.health == 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All engines, and the settings to check them against. `settings.connector` may still be `auto`."""

    settings: Settings
    keys: EngineKeys
    engines: Sequence[Examined]

    def of(self, role: Role) -> list[Examined]:
        """Return the engines of one role."""
        return [engine for engine in self.engines if engine.backend.role is role]

    @property
    def told(self) -> list[Examined]:
        """Engines that list their models, without encoders, which serve parts of other models."""
        return [engine for engine in self.engines if engine.models == 200 and engine.backend.role is not Role.ENCODE]


_MISSING: Final = object()
_COMPARED: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    # The configuration of vLLM, which it reports in development mode.
    ("--max-num-seqs", ("vllm_config", "scheduler_config", "max_num_seqs")),
    ("--max-num-batched-tokens", ("vllm_config", "scheduler_config", "max_num_batched_tokens")),
    ("--block-size", ("vllm_config", "cache_config", "block_size")),
    ("--kv-cache-dtype", ("vllm_config", "cache_config", "cache_dtype")),
    ("--enable-prefix-caching", ("vllm_config", "cache_config", "enable_prefix_caching")),
    ("--tensor-parallel-size", ("vllm_config", "parallel_config", "tensor_parallel_size")),
    ("--pipeline-parallel-size", ("vllm_config", "parallel_config", "pipeline_parallel_size")),
    ("--data-parallel-size", ("vllm_config", "parallel_config", "data_parallel_size")),
    ("--quantization", ("vllm_config", "model_config", "quantization")),
    ("--dtype", ("vllm_config", "model_config", "dtype")),
    ("--reasoning-parser", ("vllm_config", "structured_outputs_config", "reasoning_parser")),
    # The arguments of SGLang.
    ("--tp-size", ("tp_size",)),
    ("--dp-size", ("dp_size",)),
    ("--page-size", ("page_size",)),
    ("--max-running-requests", ("max_running_requests",)),
    ("--chunked-prefill-size", ("chunked_prefill_size",)),
    ("--disable-radix-cache", ("disable_radix_cache",)),
    ("--kv-cache-dtype", ("kv_cache_dtype",)),
    ("--quantization", ("quantization",)),
    ("--dtype", ("dtype",)),
    ("--tool-call-parser", ("tool_call_parser",)),
    ("--reasoning-parser", ("reasoning_parser",)),
)
"""Flags, and the members of `/server_info` that should be equal in one role."""


def compared_options(info: object) -> dict[str, object]:
    """Return the options in an engine's `/server_info` that should be equal in one role, by flag."""
    found: dict[str, object] = {}
    for flag, path in _COMPARED:
        value = info
        for member in path:
            value = value.get(member, _MISSING) if isinstance(value, dict) else _MISSING
        if value is None or isinstance(value, str | int | float):
            found[flag] = value
    return found
