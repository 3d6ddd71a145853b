"""Engines on known hardware: published figures, and costs fitted to them.

`published()` returns every figure beside the value of the fit, and whether it is a target or a bound.

The KV cache of Kimi K2 takes 61 layers · (512 + 64) values · 2 bytes = 70 KB per token, the same on each rank of a
tensor-parallel group. Attention over the previous tokens takes as long as everything else at about 26,000 tokens (2.5
MFLOP for each against 64 GFLOP per token). So b is about a / 26,000 where no published figure determines it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.sim.hardware.cost import Cost
from proxy.sim.hardware.work import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of an engine, and the options with which it is started as a prefiller and as a decoder."""

    name: str
    cost: Cost
    prefill: Shape
    decode: Shape


@dataclass(frozen=True, slots=True)
class Figure:
    """One published measurement of a machine, in the unit that `what` names."""

    machine: str
    source: str
    what: str
    published: float
    fitted: float
    is_bound: bool = False
    """Whether the published value is only an upper bound, so that a lower value of the fit is equally good."""

    @property
    def error(self) -> float:
        """Return the relative error of the fit; 0 within a bound."""
        error = self.fitted / self.published - 1
        return max(0.0, error) if self.is_bound else error


# Prefillers of vllm-ascend's guides run one prompt at a time in chunks of 16,384 tokens. 1M tokens: with host memory.
_ASCEND_PREFILL: Final = Shape(max_num_seqs=1, max_num_batched_tokens=16_384, kv_tokens=1_000_000)

MACHINES: Final[dict[str, Machine]] = {
    machine.name: machine
    for machine in (
        Machine(
            "kimi-k2-thinking-a3",
            Cost(
                prompt=0.1,
                prompt_token=1.4e-4,
                attention=3e-9,
                step=0.054,
                step_sequence=0.00415,
                knee=8,
                past_knee=2.1,
            ),
            _ASCEND_PREFILL,
            # A tp8 rank with about 22 GB free for KV.
            Shape(max_num_seqs=12, max_num_batched_tokens=32, kv_tokens=300_000),
        ),
        Machine(
            "kimi-k2.5-h200",
            Cost(prompt=0.05, prompt_token=1 / 56_000, attention=7e-10, step=0.0079, step_sequence=0.00082),
            Shape(max_num_seqs=8, max_num_batched_tokens=16_384, kv_tokens=1_000_000),
            Shape(max_num_seqs=256, max_num_batched_tokens=8_192, kv_tokens=700_000),
        ),
        Machine(
            "kimi-k2.6-a3",
            Cost(
                prompt=0.1,
                prompt_token=1.4e-4,
                attention=1.9e-9,
                step=0.054,
                step_sequence=0.00415,
                knee=8,
                past_knee=2.1,
            ),
            _ASCEND_PREFILL,
            Shape(max_num_seqs=8, max_num_batched_tokens=32, kv_tokens=300_000),
        ),
    )
}


def published() -> Iterator[Figure]:
    """Yield all published figures with the values of the fits."""
    name = "kimi-k2-thinking-a3"
    cost, shape = MACHINES[name].cost, MACHINES[name].decode
    source = "vllm-ascend documentation, Kimi-K2-Thinking on 16 A3 dies, 1K/1K, max-num-seqs 12"
    for clients, milliseconds in ((1, 57.7), (2, 60.3), (4, 70.0), (8, 87.4), (16, 222.0)):
        running = min(clients, shape.max_num_seqs)
        yield Figure(name, source, f"ms a token, {clients} clients", milliseconds, 1e3 * cost.decode(running, 0))
    source = "the same, 10 at once on an engine that also decodes: 0.33 s more than alone"
    for tokens, milliseconds in ((512, 508.0), (1024, 566.0), (2048, 722.0)):
        yield Figure(
            name, source, f"ms to the first token of {tokens}", milliseconds, 1e3 * (0.33 + cost.prefill(tokens))
        )
    name = "kimi-k2.5-h200"
    cost = MACHINES[name].cost
    source = "InferenceX, Kimi-K2.5 INT4 on 8 H200, 8K/1K"
    for clients, rate in ((4, 91.2), (8, 70.3), (16, 46.6), (32, 28.9), (64, 16.7)):
        yield Figure(name, source, f"tokens/s a user, {clients} users", rate, 1 / cost.decode(clients, 0))
    source = "LMSYS, Kimi-K2 on 128 H200, 4 prefill nodes: 224,000 tokens/s"
    yield Figure(name, source, "prefill tokens/s a node", 56_000, 1 / cost.prompt_token)
    name = "kimi-k2.6-a3"
    cost, shape = MACHINES[name].cost, MACHINES[name].decode
    source = "SGLang, Kimi-K2.6 W4A8 on A3, PD, 90 % cached"
    for thousand, seconds in ((64, 3.0), (128, 5.0)):
        fitted = cost.prefill(thousand * 100, thousand * 900)
        yield Figure(name, source, f"s to the first token of {thousand}K", seconds, fitted, is_bound=True)
    yield Figure(name, source, f"ms a token, {shape.max_num_seqs} clients", 100, 1e3 * cost.decode(8, 0), is_bound=True)
