"""Text in which a stop string may begin is kept back until it is known whether one does."""

from __future__ import annotations

from proxy.resume.seam import StopGuard


def test_text_is_kept_back_only_until_it_tells() -> None:
    guard = StopGuard(["STOP"], "xST")
    assert guard.add_text("r", is_last=False) == ("x", None)
    assert guard.withheld_text == "STr"
    assert guard.add_text("ee", is_last=False) == ("STree", None)
    assert guard.is_finished
    assert guard.withheld_text == ""


def test_no_more_is_kept_back_than_a_stop_string_can_begin_in() -> None:
    """However little of each engine comes through, one after the other."""
    guard = StopGuard(["STOP"], "a long text with a ST")
    assert guard.add_text("", is_last=False) == ("a long text with a", None)
    assert guard.withheld_text == " ST"


def test_stop_string_that_two_engines_wrote_is_found_by_the_third() -> None:
    assert StopGuard(["STOP"], "xSTOP it").add_text("", is_last=False) == ("x", "STOP")


def test_with_the_end_there_is_nothing_to_wait_for() -> None:
    assert StopGuard(["STOP"], "xST").add_text("O", is_last=True) == ("xSTO", None)
    assert StopGuard(["STOP"], "xST").add_text("OP", is_last=True) == ("x", "STOP")


def test_text_that_a_stop_string_is_shown_with_is_not_kept_back() -> None:
    guard = StopGuard(["STOP"], "", before="xST", shows_stop=True)
    assert guard.add_text("O", is_last=False) == ("O", None)
    assert guard.withheld_text == ""
    assert guard.add_text("Pper", is_last=False) == ("P", "STOP")
