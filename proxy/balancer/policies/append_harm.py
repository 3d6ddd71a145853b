"""Harm to running answers: how much they slow down while their decoder computes a prompt.

The token clock of each answer counts timed gaps between tokens, one of eight. An answer that ended shows its gaps per
second while its decoder computed prompts, and at other times. The share that is missing is the harm: 1.0 if running
answers stop meanwhile, and 0.0 if they go on as before. Each answer is compared with itself, so neither the load nor
the speed of its decoder matters.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

# Each answer makes the older ones count less by this factor: some 500 of them count.
_KEPT: Final = 1 - 1 / 500
# Minimum number of an answer's gaps while no prompt was computed. Fewer do not show its usual pace.
_MIN_USUAL_GAPS: Final = 4
# Minimum number of gaps that were expected while prompts were computed, over all answers.
_MIN_EXPECTED_GAPS: Final = 30.0


class AppendHarm:
    """Harm to running answers as one worker has learned it, the same for all decoders."""

    def __init__(self) -> None:
        self.harm_per_second: float | None = None
        """Seconds that a running answer loses for each second of a prompt, at most 1.0. None: not known yet."""
        self._expected_gaps = self._found_gaps = 0.0
        """Gaps during prompts at the usual pace of each answer, and those that there were."""

    def learn_from_answer(self, gaps: int, seconds: float, *, gaps_computing: int, seconds_computing: float) -> None:
        """Learn from an answer that ended.

        Args:
            gaps: Timed gaps between its tokens.
            seconds: Its time.
            gaps_computing: The part of `gaps` that ended while its decoder computed a prompt.
            seconds_computing: The part of `seconds` in which its decoder computed a prompt.
        """
        usual_gaps, usual_seconds = gaps - gaps_computing, seconds - seconds_computing
        if usual_gaps < _MIN_USUAL_GAPS or usual_seconds <= 0.0 or seconds_computing <= 0.0:
            return
        self._expected_gaps = _KEPT * self._expected_gaps + usual_gaps / usual_seconds * seconds_computing
        self._found_gaps = _KEPT * self._found_gaps + gaps_computing
        self.harm_per_second = None
        if self._expected_gaps >= _MIN_EXPECTED_GAPS:
            # One standard deviation is subtracted, so that errors favour the running answers.
            found = self._found_gaps - sqrt(self._found_gaps)
            self.harm_per_second = max(0.0, min(1.0, 1 - found / self._expected_gaps))
