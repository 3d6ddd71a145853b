"""The time that an engine's work takes, as a formula with fitted coefficients."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an engine's work, by its size. If all coefficients are zero, work takes no time.

    A prompt takes S(u, c) = t0 + a·u + b·u·(c + u/2), with u tokens to compute after c cached ones: every token costs
    the same except for its attention, which grows with the tokens before it. Chunks of a prompt add up to the same. A
    decode step of n sequences that hold K tokens of KV takes p + q·n + r·K, and more by a factor beyond a knee.
    """

    prompt: float = 0.0
    """The coefficient t0: seconds for each prompt."""
    prompt_token: float = 0.0
    """The coefficient a: seconds for each token to compute."""
    attention: float = 0.0
    """The coefficient b: seconds of attention for a pair of a token and one token before it."""
    step: float = 0.0
    """The coefficient p: seconds for each decode step."""
    step_sequence: float = 0.0
    """The coefficient q: seconds for each sequence in a decode step."""
    step_kv_token: float = 0.0
    """The coefficient r: seconds for each token of KV in a decode step."""
    knee: int | None = None
    """Number of sequences that decode efficiently together; None: no limit."""
    past_knee: float = 1.0
    """The factor by which a step of more sequences takes longer."""

    def prefill(self, uncached: int, cached: int = 0) -> float:
        """Return S(u, c): the seconds for a prompt with `uncached` tokens to compute after `cached` tokens."""
        return self.prompt + self.chunk(uncached, cached)

    def chunk(self, tokens: int, before: int) -> float:
        """Return the seconds for some tokens of a prompt after its first `before`, without the constant t0."""
        return tokens * (self.prompt_token + self.attention * (before + tokens / 2))

    def decode(self, sequences: int, kv_tokens: int) -> float:
        """Return the seconds of one decode step of all sequences."""
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
