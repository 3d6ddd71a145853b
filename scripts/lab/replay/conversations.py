"""Conversations of agents: turns that repeat all earlier ones, pauses, sub-agents, forks and compaction.

Lengths are drawn from the distributions of a Workload, or read from a file of recorded sessions. Such a file has a JSON
object per line, `{"turns": [...]}`. Each turn has `input_tokens` and `output_tokens`, and optionally `pause_seconds`
before it and `kept_tokens`, the leading tokens that it shares with the turn before. The default is all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import orjson

from lab.replay.trace import BLOCK_TOKENS, InvalidTrace

# A session draws its system prompt's blocks from a range of this size, far below the names of other blocks.
_SYSTEM_BLOCKS: Final = 10_000
_FIRST_NAME: Final = 10_000_000
_MIN_ANSWER_TOKENS: Final = 20


@dataclass(frozen=True, slots=True)
class Gaps:
    """Distribution of pauses between an answer and the next turn: even within each of three ranges."""

    short_share: float = 0.86
    """Share of pauses of 0.1 to 1 s."""
    medium_share: float = 0.09
    """Share of pauses of 1 to 10 s. The others last 10 s to `longest`."""
    longest: float = 120.0
    """Longest pause in seconds."""

    def draw(self, rng: random.Random) -> float:
        """Return one pause in seconds."""
        share = rng.random()
        if share < self.short_share:
            return rng.uniform(0.1, 1.0)
        if share < self.short_share + self.medium_share:
            return rng.uniform(1.0, 10.0)
        return rng.uniform(10.0, max(10.0, self.longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Distributions of conversations. Medians are of lognormal distributions, in tokens."""

    shared_tokens: int = 12_000
    """Tokens of a system prompt and its tools, at the beginning of many conversations."""
    systems: int = 1
    """Number of different system prompts."""
    first_tokens: float = 1_800.0
    """Median of the first message."""
    growth_tokens: float = 900.0
    """Median growth per turn, besides the answer."""
    answer_tokens: float = 164.0
    """Median of an answer, without its reasoning."""
    reasoning_tokens: float = 0.0
    """Median of the reasoning before an answer. 0: there is none."""
    drops_reasoning: bool = False
    """Whether the next prompt has an answer without its reasoning."""
    turns: float = 35.0
    """Mean number of turns, which is distributed exponentially."""
    gaps: Gaps = Gaps()
    subagents: float = 0.0
    """Probability that a turn starts 1 to 4 sub-agents and waits for them."""
    subagent_turns: float = 6.0
    """Mean number of turns of a sub-agent."""
    forks: float = 0.0
    """Probability that a client sends a turn twice at the same time and continues with one of the answers."""
    compaction_tokens: int | None = None
    """Length at which a client replaces the history by a summary. None: never."""
    single_turns: float = 0.0
    """Share of conversations with a single turn."""
    keeps_last_block: bool = False
    """Whether a partly filled last block keeps its name when it is full, so that engines find less than was sent."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    pause_seconds: float
    """Time between the answer before and this turn."""
    subagents: tuple[Conversation, ...] = ()
    """Conversations that run between this answer and the next turn."""
    copies: int = 1
    """Number of equal requests of this turn, sent at the same time."""
    repeats_answer: bool = False
    """Whether the prompt begins with exactly the tokens of the prompt before and its answer."""


@dataclass(slots=True)
class Conversation:
    """One conversation. `turns` yields its turns in order."""

    workload: Workload
    rng: random.Random
    names: Iterator[int]
    """Names of new blocks."""
    recorded: Sequence[dict[str, Any]] | None = None
    """Recorded turns. None: turns are drawn."""
    max_turns: int | None = None
    """Number of turns. None: it is drawn."""
    _blocks: list[int] = field(default_factory=list)
    _length: int = 0

    def turns(self) -> Iterator[Turn]:
        """Yield the turns."""
        return self._drawn() if self.recorded is None else self._replayed(self.recorded)

    def _drawn(self) -> Iterator[Turn]:
        load, rng = self.workload, self.rng
        first = rng.randrange(load.systems) * _SYSTEM_BLOCKS
        system = list(range(first, first + load.shared_tokens // BLOCK_TOKENS))
        if not self._blocks:
            self._blocks, self._length = system, load.shared_tokens
        self._grow(_around(rng, load.first_tokens, 0.6))
        left = self.max_turns or (1 if rng.random() < load.single_turns else 1 + int(rng.expovariate(1 / load.turns)))
        pause, repeats_answer = 0.0, False
        while left > 0:
            left -= 1
            answer = max(_MIN_ANSWER_TOKENS, _around(rng, load.answer_tokens, 0.7))
            reasoning = _around(rng, load.reasoning_tokens, 0.7) if load.reasoning_tokens else 0
            subagents = self._subagents(len(system)) if left and rng.random() < load.subagents else ()
            copies = 2 if rng.random() < load.forks else 1
            yield Turn(
                self._length, answer + reasoning, self._names(), pause, subagents, copies, repeats_answer=repeats_answer
            )
            pause, repeats_answer = load.gaps.draw(rng), not (reasoning and load.drops_reasoning)
            if load.compaction_tokens is not None and self._length > load.compaction_tokens:
                self._cut(load.shared_tokens)
                self._grow(_around(rng, load.first_tokens, 0.6))
                repeats_answer = False
            repeated = answer if load.drops_reasoning else answer + reasoning
            self._grow(repeated + _around(rng, load.growth_tokens, 0.8))

    def _subagents(self, shared: int) -> tuple[Conversation, ...]:
        """Return sub-agents. Half of them begin with the whole conversation, the others with its system prompt."""
        made = []
        for _ in range(self.rng.randint(1, 4)):
            kept = len(self._blocks) if self.rng.random() < 0.5 else shared
            turns = 1 + int(self.rng.expovariate(1 / self.workload.subagent_turns))
            agent = Conversation(self.workload, random.Random(self.rng.random()), self.names, max_turns=turns)
            agent._blocks, agent._length = self._blocks[:kept], max(1, kept * BLOCK_TOKENS)
            made.append(agent)
        return tuple(made)

    def _replayed(self, recorded: Sequence[dict[str, Any]]) -> Iterator[Turn]:
        for turn in recorded:
            tokens = int(turn["input_tokens"])
            self._cut(min(self._length, tokens, int(turn.get("kept_tokens", self._length))))
            self._grow(tokens - self._length)
            yield Turn(tokens, max(1, int(turn["output_tokens"])), self._names(), float(turn.get("pause_seconds", 0.0)))

    def _grow(self, tokens: int) -> None:
        self._length += tokens
        self._blocks += [next(self.names) for _ in range(self._length // BLOCK_TOKENS - len(self._blocks))]

    def _cut(self, tokens: int) -> None:
        self._length = tokens
        del self._blocks[tokens // BLOCK_TOKENS :]

    def _names(self) -> tuple[int, ...]:
        """Return the names of all blocks. The last, partly filled one is another block when it is full."""
        if self._length % BLOCK_TOKENS == 0:
            return tuple(self._blocks)
        last = next(self.names)
        if self.workload.keeps_last_block:
            self._blocks.append(last)
            return tuple(self._blocks)
        return (*self._blocks, last)


def _around(rng: random.Random, median: float, sigma: float) -> int:
    return int(median * rng.lognormvariate(0.0, sigma))


class Conversations:
    """Makes conversations: drawn ones, or recorded ones in turn from a random place."""

    def __init__(self, workload: Workload, recorded: Sequence[Sequence[dict[str, Any]]], seed: int) -> None:
        """Create the source. `recorded`: turns of each recorded session; empty: conversations are drawn."""
        self._workload = workload
        self._recorded = recorded
        self._rng = random.Random(seed)
        self._names = count(_FIRST_NAME)

    def new(self) -> Conversation:
        """Return the next conversation."""
        rng = random.Random(self._rng.random())
        recorded = self._rng.choice(self._recorded) if self._recorded else None
        return Conversation(self._workload, rng, self._names, recorded)


def read_sessions(path: Path) -> list[list[dict[str, Any]]]:
    """Read recorded sessions. Raises InvalidTrace and OSError."""
    sessions = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = orjson.loads(line)["turns"]
            for turn in turns:
                if int(turn["input_tokens"]) < 1 or int(turn["output_tokens"]) < 0:
                    raise ValueError("a turn has no tokens")
                if float(turn.get("pause_seconds", 0)) < 0 or int(turn.get("kept_tokens", 0)) < 0:
                    raise ValueError("a negative number")
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidTrace(f"{path.name}, line {number}: not a recorded session: {error}") from None
        if turns:
            sessions.append(turns)
    if not sessions:
        raise InvalidTrace(f"{path.name} has no sessions")
    return sessions
