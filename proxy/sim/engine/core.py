"""Parts of a simulated engine that its requests share, and the metrics that `/metrics` shows.

The metrics are written by hand, because a client library would register them in the registry of the process, next to
the gateway's metrics if both run in one test.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from proxy.sim.kv.cache import PrefixCache, block_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.sim.engine.encoder_cache import EncoderCache
    from proxy.sim.engine.faults import Faults
    from proxy.sim.engine.kv_events import KvEventPublisher
    from proxy.sim.engine.scheduler import MachineCache, MachineScheduler, Scheduler
    from proxy.sim.kv.protocol import KvProtocol
    from proxy.sim.options import Options
    from proxy.sim.state import EngineState


@dataclass(frozen=True, slots=True)
class EngineCore:
    """The parts of a simulated engine that its requests share. Each start makes new ones, with a new `engine_id`."""

    options: Options
    state: EngineState
    faults: Faults
    scheduler: Scheduler | MachineScheduler
    cache: PrefixCache | MachineCache
    metrics: EngineMetrics
    protocol: KvProtocol
    encoder_cache: EncoderCache
    kv_events: KvEventPublisher | None = None

    @property
    def used_blocks(self) -> int:
        """Return the number of KV blocks that running sequences use or that are kept for decoders."""
        return self.scheduler.used_blocks + self.protocol.blocks_held()

    def cache_prompt(self, prompt: Sequence[int], salt: str) -> int:
        """Return how many tokens of a prompt are cached, and cache the prompt now or when it is computed."""
        if self.kv_events is not None:
            self.kv_events.expect(block_names(prompt, self.options.block_size, salt), prompt)
        return self.cache.add(prompt, salt)

    def new_request_id(self, headers: Mapping[str, str], body: Any) -> str:
        """Return the ID of an answer: the ID in the header, or else in the body, or else a new one."""
        named = body if isinstance(body, dict) else {}
        if self.options.profile.is_sglang:
            given = named.get("rid")
        else:
            given = headers.get("x-request-id") or named.get("request_id")
        return given if isinstance(given, str) and given else uuid.uuid4().hex


_PROMPT_TOKEN_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
_BUCKET_BOUNDS_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class SecondsHistogram:
    """Counts durations in buckets, in seconds."""

    __slots__ = ("counts", "sum", "total")

    def __init__(self) -> None:
        self.counts = [0] * len(_BUCKET_BOUNDS_SECONDS)
        self.sum = 0.0
        self.total = 0

    def observe(self, seconds: float) -> None:
        self.sum += seconds
        self.total += 1
        for index, bound in enumerate(_BUCKET_BOUNDS_SECONDS):
            if seconds <= bound:
                self.counts[index] += 1

    def lines(self, name: str, labels: str) -> list[str]:
        lines = [f"# TYPE {name} histogram"]
        for bound, count in zip(_BUCKET_BOUNDS_SECONDS, self.counts, strict=True):
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {count}')
        lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {self.total}')
        lines.append(f"{name}_sum{{{labels}}} {self.sum}")
        lines.append(f"{name}_count{{{labels}}} {self.total}")
        return lines


@dataclass(slots=True)
class EngineMetrics:
    """The counters that only `/metrics` shows. All other values are read from the engine's state when it is scraped."""

    model: str
    started_at: float = field(default_factory=time.time)
    prompt_tokens_by_source: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(_PROMPT_TOKEN_SOURCES, 0))
    )
    requests_by_reason: Counter[str] = field(default_factory=Counter)
    time_to_first_token: SecondsHistogram = field(default_factory=SecondsHistogram)
    request_seconds: SecondsHistogram = field(default_factory=SecondsHistogram)
    token_seconds: SecondsHistogram = field(default_factory=SecondsHistogram)

    def count_prompt(self, *, computed: int = 0, cached: int = 0, transferred: int = 0) -> None:
        self.prompt_tokens_by_source["local_compute"] += computed
        self.prompt_tokens_by_source["local_cache_hit"] += cached
        self.prompt_tokens_by_source["external_kv_transfer"] += transferred

    def count_finished_request(
        self, reason: str, queued_at: float, first_token_at: float, ended_at: float, tokens: int
    ) -> None:
        self.requests_by_reason[reason] += 1
        self.time_to_first_token.observe(first_token_at - queued_at)
        self.request_seconds.observe(ended_at - queued_at)
        if tokens > 1:
            self.token_seconds.observe((ended_at - first_token_at) / (tokens - 1))

    def render(self, gauges: dict[tuple[str, str], float], counters: dict[str, float]) -> str:
        """Return the exposition text.

        Names are given without `vllm:` and, for counters, without `_total_growth`; the name of a gauge includes its
        labels.
        """
        labels = f'engine="0",model_name="{self.model}"'
        started = f"process_start_time_seconds {self.started_at:.2f}"
        lines = ["# TYPE process_start_time_seconds gauge", started]
        for (name, more), value in gauges.items():
            all_labels = more if more.startswith("engine=") else f"{labels},{more}" if more else labels
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{all_labels}}} {value}"]
        for name, value in counters.items():
            lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{labels}}} {value}"]
        lines += _lines_by_label("prompt_tokens_by_source", "source", self.prompt_tokens_by_source, labels)
        lines += _lines_by_label("request_success", "finished_reason", self.requests_by_reason, labels)
        lines += self.time_to_first_token.lines("vllm:time_to_first_token_seconds", labels)
        lines += self.request_seconds.lines("vllm:e2e_request_latency_seconds", labels)
        lines += self.token_seconds.lines("vllm:request_time_per_output_token_seconds", labels)
        return "\n".join(lines) + "\n"


def _lines_by_label(name: str, label: str, values: Counter[str], labels: str) -> list[str]:
    lines = [f"# TYPE vllm:{name}_total counter"]
    return lines + [f'vllm:{name}_total{{{labels},{label}="{key}"}} {value}' for key, value in values.items()]
