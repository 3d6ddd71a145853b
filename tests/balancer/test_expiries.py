"""What a prefiller's expired leases say of hand-overs."""

from __future__ import annotations

import pytest

from proxy.balancer.handoff_verdicts import ExpiryWatch, HandoffVerdict, Totals

LEASE = 30.0


def watch(**before: int) -> ExpiryWatch:
    """One that has read this at second 0, or zeros."""
    watch = ExpiryWatch()
    assert watch.read(0.0, totals(**before), (), LEASE) is None
    return watch


def totals(expired: int = 0, orphans: int = 0, **sent: int) -> Totals:
    return Totals(float(expired), orphans, sent)


@pytest.mark.parametrize(
    ("at", "read", "fetch_nothing", "found"),
    [
        (10.0, totals(d=9), "", None),  # leases of these may still expire
        (40.0, totals(expired=2, d=9), "", None),  # a few
        (40.0, totals(expired=3, d=9), "", (HandoffVerdict.COMPUTED, 3)),
        (40.0, totals(expired=9, d=9), "", (HandoffVerdict.COMPUTED, 9)),
        (40.0, totals(expired=3, d=90), "", None),
        (60.0, totals(expired=3, d=90), "", (HandoffVerdict.TRANSFERRED, 3)),
        (60.0, totals(d=9), "", (HandoffVerdict.TRANSFERRED, 0)),
        (60.0, totals(d=2), "", None),  # too few to say
        (59.0, totals(d=9), "", None),
        (40.0, totals(expired=9, orphans=9, d=9), "", None),  # this gateway knows of them
        (40.0, totals(expired=9, orphans=5, d=9), "", (HandoffVerdict.COMPUTED, 4)),
        (40.0, totals(expired=9, d=9), "d", None),  # the decoder explains it
        (40.0, totals(expired=9, orphans=9, d=9, e=9), "d", None),  # and this gateway counts its as orphans
        (40.0, totals(expired=15, orphans=9, d=9, e=9), "d", (HandoffVerdict.COMPUTED, 6)),
        (40.0, totals(expired=50, d=9), "", None),  # others have it prefill, too
        (40.0, None, "", None),
    ],
)
def test_verdict_on_expired_leases(
    at: float, read: Totals | None, fetch_nothing: str, found: tuple[HandoffVerdict, int] | None
) -> None:
    one = watch()
    assert one.read(0.0, totals(d=1), fetch_nothing, LEASE) is None
    assert one.read(at, read, fetch_nothing, LEASE) == found


def test_expired_leases_of_the_previous_window_count() -> None:
    first = watch()
    assert first.read(0.0, totals(d=1), (), LEASE) is None
    assert first.read(60.0, totals(d=5), (), LEASE) == (HandoffVerdict.TRANSFERRED, 0)
    assert first.read(70.0, totals(expired=4, d=5), (), LEASE) == (HandoffVerdict.COMPUTED, 4)


def test_time_without_handoffs_does_not_count_for_expiries() -> None:
    idle = watch()
    assert idle.read(600.0, totals(), (), LEASE) is None
    assert idle.read(900.0, totals(d=5), (), LEASE) is None
    assert idle.read(960.0, totals(d=5), (), LEASE) == (HandoffVerdict.TRANSFERRED, 0)


def test_no_verdict_on_expiries_after_counters_were_reset() -> None:
    one = watch(expired=40, d=40)
    assert one.read(60.0, totals(expired=3, d=45), (), LEASE) is None
    assert one.read(61.0, totals(expired=3, d=50), (), LEASE) is None
    assert one.read(90.0, totals(expired=8, d=50), (), LEASE) == (HandoffVerdict.COMPUTED, 5)
    assert one.read(91.0, totals(expired=9, d=20), (), LEASE) is None
