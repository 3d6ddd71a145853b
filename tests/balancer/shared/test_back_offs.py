"""Back-offs: when a backend that refused requests gets requests again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from proxy.balancer.shared.back_offs import LONGEST_SECONDS, UNKNOWN, BackOffs
from proxy.common.backend import Backend, Role

A = Backend(Role.DECODE, "a", 1, slot=3)


@dataclass
class Story:
    """Events of one backend, written as words, some of which move the clock."""

    now: float = 1000.0
    back_offs: BackOffs = field(default_factory=lambda: BackOffs(slots=8))
    streak: int = 0

    def tell(self, words: str) -> str:
        """Apply each word, and return whether the backend would then refuse: `x` yes, `.` no."""
        states = []
        for word in words.split():
            match word.split(":"):
                case ["refuse"]:
                    self.streak = self.back_offs.record_refusal(A, self.now, None, doubles=True)
                case ["alone"]:
                    self.streak = self.back_offs.record_refusal(A, self.now, None, doubles=False)
                case ["refuse", seconds]:
                    self.streak = self.back_offs.record_refusal(A, self.now, float(seconds), doubles=True)
                case ["turn"]:
                    self.back_offs.use_turn(A, self.now)
                case ["begin"]:
                    self.back_offs.record_answer_begin(A, self.now, is_complete=False)
                case ["complete"]:
                    self.back_offs.record_answer_begin(A, self.now, is_complete=True)
                case ["left"]:
                    self.back_offs.record_end_without_success(A, self.now)
                case _:
                    self.now += float(word.removesuffix("s"))
            states.append("x" if self.back_offs.would_refuse(A, self.now) else ".")
        return "".join(states)


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("refuse 0.9s 0.1s", "xx."),
        # Each refusal doubles the time, and simultaneous ones count once.
        ("refuse 1s refuse 1.9s 0.1s refuse 3.9s 0.1s", "x.xx.xx."),
        ("refuse refuse refuse 1s", "xxx."),
        # The time stays short if no other backend is left.
        ("alone 1s alone 1s alone 1s", "x.x.x."),
        # Retry-After is obeyed up to the maximum.
        ("refuse:7 6.9s 0.1s", "xx."),
        ("refuse:0 0.9s 0.1s", "xx."),
        (f"refuse:3600 {LONGEST_SECONDS - 1}s 1s", "xx."),
        # After that time the backend gets one request at a time.
        ("refuse 1s turn 0.9s 0.1s turn", "x.xx.x"),
        # Each completed or otherwise ended request makes room for one more.
        ("refuse complete turn complete complete turn turn", "x.x...x"),
        ("refuse left turn", "x.x"),
        # A refusal of an earlier request does not take this room back, but a second one without an answer does.
        ("refuse complete complete refuse turn", "x...."),
        ("refuse left 1s refuse", "x..x"),
        # A request whose answer has begun makes no room.
        ("refuse begin", "xx"),
        # The backend gets any number after it has served and not refused for a while.
        ("refuse 1s turn begin 4s turn turn turn", "x.xx...."),
        ("refuse 1s turn 60s turn 0.1s", "x.x.xx"),
        ("refuse 1s turn 60s turn complete turn turn", "x.x.x..."),
    ],
)
def test_back_off_after_refusals(words: str, states: str) -> None:
    assert Story().tell(words) == states


def test_streak_counts_simultaneous_refusals_once_and_ends_with_an_answer() -> None:
    story = Story()
    story.tell("refuse refuse refuse")
    assert story.streak == 1
    story.tell("1s refuse 2s refuse")
    assert story.streak == 3
    story.tell("begin 1s refuse")
    assert story.streak == 1


def test_next_backend_in_a_slot_has_no_back_off() -> None:
    story = Story()
    story.tell("refuse")
    assert story.back_offs.standing_of(Backend(Role.DECODE, "b", 1, slot=3)) == UNKNOWN
    story.back_offs.forget_backend(A)
    assert story.back_offs.standing_of(A) == UNKNOWN


def test_every_write_of_a_back_off_is_a_change() -> None:
    story = Story()
    seen = [story.back_offs.change_cells[0]]
    for word in ("refuse", "1s", "turn", "complete"):
        story.tell(word)
        seen.append(story.back_offs.change_cells[0])
    assert len(set(seen)) == 4


def test_retry_after_of_a_backend_is_kept_without_a_maximum() -> None:
    story = Story()
    for words, closed_until in (
        ("refuse", 0.0),
        ("refuse:600", 1600.0),
        ("30s refuse:100", 1130.0),
        ("turn begin", 0.0),
        ("refuse:600 refuse", 0.0),
    ):
        story.tell(words)
        assert story.back_offs.standing_of(A).retry_after_until == closed_until, words
