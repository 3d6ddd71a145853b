"""One sequence in an engine's batch, and the limits within which the batch has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.sim.hardware.blocks import Held

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine was started."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    """That fit into its KV memory, host memory included where it serves as a cache."""
    block_tokens: int = 512


@dataclass(slots=True, eq=False)
class Work:
    """One sequence. The batch has it between `submit` and its last token, or `drop`."""

    prompt_tokens: int
    answer_tokens: int
    names: Sequence[Hashable] = ()
    """Of the prompt's full blocks."""
    keeps_kv: bool = False
    """Its blocks stay used after its end, until they are given back: a decoder will fetch them."""
    awaits_kv: bool = False
    """Nothing of its prompt is computed here: once admitted it waits for `arrive`."""
    cached_tokens: int = 0
    """Of the prompt, found in the cache when it was first admitted."""
    computed: int = 0
    """Tokens whose KV is there."""
    generated: int = 0
    is_decoding: bool = False
    """All of its KV is there but the last token's, which the next step computes."""
    preemptions: int = 0
    held: Held = field(default_factory=Held)
    began_behind: int = 0
    """Of the tokens to compute, those that its first chunk stands behind."""

    @property
    def is_ended(self) -> bool:
        return self.generated >= self.answer_tokens

    @property
    def is_begun(self) -> bool:
        """Some of what it has to compute is computed."""
        return self.computed > self.began_behind

    @property
    def tokens(self) -> int:
        """Of the prompt and of the answer so far: the KV that the next token needs."""
        return self.prompt_tokens + self.generated
