"""What an engine says of itself when it comes up, read from its own answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

EngineVersion = tuple[int, int]
"""Major and minor, for example (0, 23)."""
UNKNOWN_VERSION: Final[EngineVersion] = (0, 0)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """None, or UNKNOWN_VERSION, is what it does not tell."""

    version: EngineVersion = UNKNOWN_VERSION
    max_model_len: int | None = None
    """Tokens that fit into a sequence, prompt and answer together."""
    max_num_seqs: int | None = None
    """Sequences it works on at a time; more wait inside."""


def parse_engine_version(answer: Any) -> EngineVersion:
    """What an engine's `/version` tells; UNKNOWN_VERSION when that is not a version."""
    told = _member(answer, "version")
    numbers = re.match(r"v?(\d{1,4})\.(\d{1,4})", told) if isinstance(told, str) else None
    return (int(numbers[1]), int(numbers[2])) if numbers else UNKNOWN_VERSION


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


def _vllm_ranks(parallel: Any) -> int:
    """Ranks that one API server of vLLM feeds: all of them, unless somebody else balances between them, outside each
    rank or outside each node (ParallelConfig.local_engines_only).
    """
    if _member(parallel, "data_parallel_external_lb"):
        return 1
    size = "data_parallel_size_local" if _member(parallel, "data_parallel_hybrid_lb") else "data_parallel_size"
    return _count(_member(parallel, size)) or 1


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _count(value: Any) -> int | None:
    """A positive whole number; None for anything else. In Python True is one, too."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
