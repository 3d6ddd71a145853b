"""How long an engine's work takes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of work, by its size. All of it zero: as fast as the machine goes.

    A prompt takes S(u, c) = t0 + a·u + b·u·(c + u/2), with u tokens to compute behind c cached ones: every token costs
    the same but for its attention, which grows with the tokens before it. Chunks of a prompt add up to the same. A
    decode step of n sequences that hold K tokens of KV takes p + q·n + r·K, and more by a factor beyond a knee.
    """

    prompt: float = 0.0
    """t0, of each prompt."""
    prompt_token: float = 0.0
    """a."""
    attention: float = 0.0
    """b, for a token and one before it."""
    step: float = 0.0
    """p."""
    step_sequence: float = 0.0
    """q."""
    step_kv_token: float = 0.0
    """r."""
    knee: int | None = None
    """Number of sequences that decode efficiently together; None: no limit."""
    past_knee: float = 1.0
    """How much longer a step of more takes."""

    def prefill(self, uncached: int, cached: int = 0) -> float:
        """S(u, c)."""
        return self.prompt + self.chunk(uncached, cached)

    def chunk(self, tokens: int, before: int) -> float:
        """Return the time for tokens of a prompt after its first `before`, without the constant time per prompt."""
        return tokens * (self.prompt_token + self.attention * (before + tokens / 2))

    def decode(self, sequences: int, kv_tokens: int) -> float:
        """One step of all sequences."""
        seconds = self.step + self.step_sequence * sequences + self.step_kv_token * kv_tokens
        return seconds if self.knee is None or sequences <= self.knee else seconds * self.past_knee

    def faster(self, factor: float) -> Cost:
        """Return the cost with all times divided by this factor."""
        return replace(
            self,
            prompt=self.prompt / factor,
            prompt_token=self.prompt_token / factor,
            attention=self.attention / factor,
            step=self.step / factor,
            step_sequence=self.step_sequence / factor,
            step_kv_token=self.step_kv_token / factor,
        )

    def knee_rate(self, max_sequences: int, kv_tokens_each: int) -> float:
        """Return the maximum tokens per second of a decoder with up to this number of sequences.

        Infinite if steps take no time.
        """
        numbers = range(1, max_sequences + 1)
        seconds = [self.decode(number, number * kv_tokens_each) for number in numbers]
        if not all(seconds):
            return float("inf")
        return max(number / each for number, each in zip(numbers, seconds, strict=True))
