"""Roster: members, origins, slots, draining, and agreement of forked workers."""

from __future__ import annotations

import os

import pytest

from proxy.balancer.roster import ADMIN, CONFIG, JoiningList, RoleMove, Roster, RosterMember
from proxy.balancer.shared.scoreboard import Scoreboard
from proxy.common.backend import Backend, Role
from tests.clock import Clock
from tests.forking import in_child

P, D = Role.PREFILL, Role.DECODE


def roster_of(scoreboard: Scoreboard, decoders: int = 0) -> Roster:
    return Roster([], [("d", port) for port in range(decoders)], scoreboard)


def names(roster: Roster, role: Role = D) -> list[str]:
    return [
        member.backend.name + (" draining" if member.is_draining else "") for member in roster.members_of_role(role)
    ]


def slots(roster: Roster) -> list[int]:
    return [member.backend.slot for role in Role for member in roster.members_of_role(role)]


def test_every_backend_has_a_separate_slot() -> None:
    roster = Roster([("p", 1), ("p", 2)], [("d", 1)], Scoreboard(slots=3))
    assert names(roster, P) == ["p:1", "p:2"]
    assert names(roster, D) == ["d:1"]
    assert slots(roster) == [0, 1, 2]


def test_encoders_are_a_separate_role() -> None:
    roster = Roster([("p", 1)], [("d", 1)], Scoreboard(slots=3), [("e", 1)])
    (encoder,) = (member.backend for member in roster.members_of_role(Role.ENCODE))
    assert (encoder.name, encoder.is_trusted, encoder.slot) == ("e:1", True, 2)
    with pytest.raises(ValueError, match="already"):
        roster.add_for_administrator(Backend(P, "e", 1))


def test_adding_a_member_changes_only_its_origins() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=1)
    assert roster.add_for_administrator(Backend(D, "d", 0)) is False
    before = roster.version_cells[0]
    assert roster.add_for_administrator(Backend(D, "d", 0)) is False
    assert roster.version_cells[0] == before
    assert roster.add_for_administrator(Backend(D, "d", 1)) is True
    assert names(roster) == ["d:0", "d:1"]


def test_models_are_the_last_given_ones() -> None:
    roster = Roster([("p", 1, None, ("x",)), ("p", 2)], [], Scoreboard(slots=4))

    def models() -> list[tuple[str, ...]]:
        return [member.backend.models for member in roster.members_of_role(P)]

    assert models() == [("x",), ()]
    assert roster.add_for_administrator(Backend(P, "p", 1)) is False
    assert roster.add_for_administrator(Backend(P, "p", 2, models=("y", "z"))) is False
    assert models() == [("x",), ("y", "z")]
    roster.sync_origin("dns", [Backend(P, "p", 1), Backend(P, "p", 2, models=("z",))])
    assert models() == [("x",), ("z",)]
    roster.sync_origin(CONFIG, [Backend(P, "p", 1), Backend(P, "p", 2, models=("x",))], restores_removed=True)
    assert models() == [(), ("x",)]
    assert Roster([], [], Scoreboard(slots=4), previous_state=roster.export_state()).members_of_role(P)[
        1
    ].backend.models == ("x",)


def test_bootstrap_port_is_the_last_given_one() -> None:
    roster = Roster([("p", 1, 8998), ("p", 2, None), ("p", 3)], [], Scoreboard(slots=4))

    def ports() -> list[int | None]:
        return [member.backend.bootstrap_port for member in roster.members_of_role(P)]

    assert ports() == [8998, None, None]
    assert roster.add_for_administrator(Backend(P, "p", 1)) is False
    assert roster.add_for_administrator(Backend(P, "p", 2, bootstrap_port=5)) is False
    roster.remove_backend(P, "p", 3)
    assert roster.add_for_administrator(Backend(P, "p", 3, bootstrap_port=6)) is True
    assert ports() == [8998, 5, 6]
    roster.remove_backend(P, "p", 3)
    assert roster.add_for_administrator(Backend(P, "p", 3)) is True
    assert ports() == [8998, 5, 6]
    roster.sync_origin("dns", [Backend(P, "p", 1), Backend(P, "p", 2, bootstrap_port=9)])
    assert ports() == [8998, 9, 6]
    roster.sync_origin(
        CONFIG, [Backend(P, "p", 1, bootstrap_port=7), Backend(P, "p", 2), Backend(P, "p", 3)], restores_removed=True
    )
    assert ports() == [7, None, None]


def test_members_are_cached_while_nothing_changes() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=1)
    assert roster.members_of_role(D) is roster.members_of_role(D)


def test_address_has_only_one_role() -> None:
    roster = Roster([("a", 1)], [], Scoreboard(slots=3))
    with pytest.raises(ValueError, match=r"^a:1 is already a prefill instance$"):
        roster.add_for_administrator(Backend(D, "a", 1))
    assert roster.remove_backend(D, "a", 1) is False
    roster.remove_backend(P, "a", 1)
    with pytest.raises(ValueError, match=r"^a:1 is still draining as a prefill instance$"):
        roster.add_for_administrator(Backend(D, "a", 1))
    roster.drop_drained_backends()
    assert roster.add_for_administrator(Backend(D, "a", 1)) is True


def test_address_listed_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^a:1 is listed twice as a decode instance$"):
        Roster([], [("a", 1), ("a", 1)], Scoreboard(slots=3))


@pytest.mark.parametrize(
    ("slots", "host", "problem"), [(2, "d", "all 2 slots are in use"), (3, "x" * 5000, "too long")]
)
def test_backend_without_room_is_rejected(slots: int, host: str, problem: str) -> None:
    roster = roster_of(Scoreboard(slots=slots), decoders=2)
    with pytest.raises(ValueError, match=problem):
        roster.add_for_administrator(Backend(D, host, 2))
    assert names(roster) == ["d:0", "d:1"]


def test_longest_host_names_fit_in_every_slot() -> None:
    roster = Roster([], [("x" * 253, 60_000 + port, 65_535) for port in range(50)], Scoreboard(slots=50))
    assert len(roster.members_of_role(D)) == 50


def test_removing_an_unknown_backend_returns_false() -> None:
    assert roster_of(Scoreboard(slots=2), decoders=1).remove_backend(D, "d", 9) is False


def test_removed_backend_drains_until_its_last_request_has_ended() -> None:
    scoreboard = Scoreboard(workers=2, slots=4)
    roster = roster_of(scoreboard, decoders=2)
    leaving, staying = (member.backend for member in roster.members_of_role(D))
    scoreboard.load_row(1).add_load(leaving.slot, requests=1)
    scoreboard.load_row(0).add_load(staying.slot, requests=1)
    assert roster.remove_backend(D, "d", 0) is True
    assert roster.remove_backend(D, "d", 0) is True
    assert roster.drop_drained_backends() == []
    assert names(roster) == ["d:0 draining", "d:1"]
    scoreboard.load_row(1).add_load(leaving.slot, requests=-1)
    assert roster.drop_drained_backends() == [leaving]
    assert roster.drop_drained_backends() == []
    assert names(roster) == ["d:1"]


def test_draining_backend_added_again_keeps_its_slot_and_requests() -> None:
    scoreboard = Scoreboard(slots=4)
    roster = roster_of(scoreboard, decoders=2)
    backend = roster.members_of_role(D)[1].backend
    scoreboard.load_row(0).add_load(backend.slot, requests=3)
    roster.remove_backend(D, "d", 1)
    assert roster.add_for_administrator(Backend(D, "d", 1)) is True
    member = roster.members_of_role(D)[1]
    assert member == RosterMember(backend, (ADMIN,))
    assert scoreboard.open_leases(member.backend.slot) == 3
    assert roster.drop_drained_backends() == []


def test_slot_is_reused_only_when_its_column_is_zero() -> None:
    scoreboard = Scoreboard(workers=2, slots=3)
    roster = roster_of(scoreboard, decoders=2)
    roster.remove_backend(D, "d", 0)
    assert [backend.slot for backend in roster.drop_drained_backends()] == [0]
    # A worker that had picked the backend before it was removed charges it a moment too late.
    scoreboard.load_row(1).add_load(0, requests=1, compute=5, kv=5)
    roster.add_for_administrator(Backend(D, "late", 1))
    assert slots(roster) == [1, 2]
    with pytest.raises(ValueError, match="no room"):
        roster.add_for_administrator(Backend(D, "full", 1))
    scoreboard.load_row(1).add_load(0, requests=-1, compute=-5, kv=-5)
    roster.add_for_administrator(Backend(D, "next", 1))
    assert names(roster) == ["next:1", "d:1", "late:1"]


def test_change_in_one_process_is_visible_in_the_others() -> None:
    scoreboard = Scoreboard(slots=8)
    roster = roster_of(scoreboard, decoders=2)
    assert names(roster) == ["d:0", "d:1"]

    def change() -> None:
        roster.add_for_administrator(Backend(P, "p", 1))
        roster.remove_backend(D, "d", 0)

    in_child(change)
    assert names(roster) == ["d:0 draining", "d:1"]
    assert names(roster, P) == ["p:1"]
    assert roster.drop_drained_backends() == [Backend(D, "d", 0)]

    def look() -> None:
        assert names(roster) == ["d:1"]

    in_child(look)


def test_concurrent_additions_of_several_processes_are_all_kept() -> None:
    workers, each = 4, 25
    roster = roster_of(Scoreboard(slots=workers * each))
    start, go = os.pipe()
    children = []
    for worker in range(workers):
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(start, 1)  # returns when the parent closes its end
            for port in range(each):
                roster.add_for_administrator(Backend(D, f"worker{worker}", port))
            os._exit(0)
        children.append(child)
    os.close(start)
    os.close(go)
    seen = 0
    while seen < workers * each:  # a reader meanwhile never sees less than before, nor anything broken
        now = len(roster.members_of_role(D))
        assert now >= seen
        seen = now
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * workers
    assert slots(roster) == list(range(workers * each))
    assert len(set(names(roster))) == workers * each


def backends(role: Role, *ports: int) -> list[Backend]:
    return [Backend(role, "d", port, is_trusted=True) for port in ports]


def test_configured_backends_are_replaced_in_one_step() -> None:
    roster = roster_of(Scoreboard(slots=8), decoders=3)
    version = roster.version_cells[0]
    added, removed = roster.sync_origin(CONFIG, backends(D, 1, 5, 6))
    assert (added, removed) == (backends(D, 5, 6), backends(D, 0, 2))
    assert names(roster) == ["d:0 draining", "d:1", "d:2 draining", "d:5", "d:6"]
    assert slots(roster) == [0, 1, 2, 3, 4]
    assert roster.version_cells[0] == version + 1
    assert [member.backend.is_trusted for member in roster.members_of_role(D)] == [True] * 5


def test_origin_does_not_remove_backends_of_other_origins() -> None:
    roster = roster_of(Scoreboard(slots=8), decoders=1)
    roster.add_for_administrator(Backend(D, "d", 7))
    roster.add_for_administrator(Backend(P, "d", 8))
    assert roster.sync_origin(CONFIG, backends(D, 1)) == (backends(D, 1), backends(D, 0))
    assert names(roster) == ["d:0 draining", "d:7", "d:1"]
    assert names(roster, P) == ["d:8"]
    assert [member.backend.is_trusted for member in roster.members_of_role(P)] == [False]


def test_administrator_may_trust_a_member_or_a_draining_backend() -> None:
    scoreboard = Scoreboard(slots=8)
    roster = roster_of(scoreboard)
    roster.add_for_administrator(Backend(D, "d", 0))
    roster.add_for_administrator(Backend(D, "d", 1))
    scoreboard.load_row(0).add_load(1, requests=1)
    roster.remove_backend(D, "d", 1)
    assert [roster.add_for_administrator(Backend(D, "d", port, is_trusted=True)) for port in (0, 1)] == [False, True]
    assert [member.backend.is_trusted for member in roster.members_of_role(D)] == [True, True]
    roster.add_for_administrator(Backend(D, "d", 0))
    assert [member.backend.is_trusted for member in roster.members_of_role(D)] == [True, True]


def test_reload_restores_removed_backends_and_trusts_added_ones() -> None:
    scoreboard = Scoreboard(slots=8)
    roster = roster_of(scoreboard, decoders=2)
    scoreboard.load_row(0).add_load(1, requests=1)
    roster.remove_backend(D, "d", 0)
    roster.remove_backend(D, "d", 1)
    roster.drop_drained_backends()
    roster.add_for_administrator(Backend(D, "d", 2))
    assert roster.sync_origin(CONFIG, backends(D, 0, 1, 2), restores_removed=True) == (backends(D, 0, 1), [])
    assert sorted(names(roster)) == ["d:0", "d:1", "d:2"]
    assert {member.backend.port: member.backend.slot for member in roster.members_of_role(D)}[1] == 1
    assert [member.backend.is_trusted for member in roster.members_of_role(D)] == [True] * 3


def test_draining_backend_is_not_reported_as_removed_again() -> None:
    scoreboard = Scoreboard(slots=8)
    roster = roster_of(scoreboard, decoders=1)
    scoreboard.load_row(0).add_load(0, requests=1)
    roster.remove_backend(D, "d", 0)
    assert roster.sync_origin(CONFIG, []) == ([], [])
    assert names(roster) == ["d:0 draining"]


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (backends(D, 0, 1, 2, 3, 4), "all 4 slots are in use"),
        ([*backends(D, 1), *backends(P, 0)], "^d:0 is already a decode instance$"),
    ],
)
def test_impossible_sync_changes_nothing(after: list[Backend], problem: str) -> None:
    roster = roster_of(Scoreboard(slots=4), decoders=2)
    version = roster.version_cells[0]
    with pytest.raises(ValueError, match=problem):
        roster.sync_origin(CONFIG, after)
    assert roster.version_cells[0] == version
    assert names(roster) == ["d:0", "d:1"]


def test_removed_backend_may_have_a_time_of_evacuation() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=3)
    assert roster.leaving_members() == ()
    roster.remove_backend(D, "d", 0, 5.0)
    roster.remove_backend(D, "d", 1)
    assert [(member.backend.port, member.must_leave_at) for member in roster.leaving_members()] == [(0, 5.0)]
    roster.remove_backend(D, "d", 0, 7.5)  # another time
    roster.remove_backend(D, "d", 1, 2.0)
    assert [(member.backend.port, member.must_leave_at) for member in roster.leaving_members()] == [(0, 7.5), (1, 2.0)]
    roster.add_for_administrator(Backend(D, "d", 0))
    roster.remove_backend(D, "d", 1)
    assert roster.leaving_members() == ()


def test_backend_dropped_by_the_configuration_may_have_a_time_of_evacuation() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=2)
    before = [member.backend for member in roster.members_of_role(D)]
    roster.sync_origin(CONFIG, before[:1], 5.0)
    assert [(member.backend.port, member.must_leave_at) for member in roster.leaving_members()] == [(1, 5.0)]
    roster.sync_origin(CONFIG, before, 6.0)
    assert roster.leaving_members() == ()


def test_backend_of_two_origins_stays_until_both_drop_it() -> None:
    roster = roster_of(Scoreboard(slots=8), decoders=1)
    assert roster.sync_origin("dns", backends(D, 0, 1)) == (backends(D, 1), [])
    assert [member.origins for member in roster.members_of_role(D)] == [("config", "dns"), ("dns",)]
    assert roster.sync_origin(CONFIG, []) == ([], [])
    assert names(roster) == ["d:0", "d:1"]
    assert roster.add_for_administrator(Backend(D, "d", 1)) is False
    assert roster.sync_origin("dns", [], 5.0) == ([], backends(D, 0))
    assert [(member.origins, member.must_leave_at) for member in roster.members_of_role(D)] == [
        ((), 5.0),
        ((ADMIN,), None),
    ]


def test_removed_backend_stays_away_until_an_origin_wants_it_again() -> None:
    roster = roster_of(Scoreboard(slots=8))
    roster.sync_origin("dns", backends(D, 0, 1))
    assert roster.remove_backend(D, "d", 0) is True
    assert roster.sync_origin("dns", backends(D, 0, 1, 2)) == (backends(D, 2), [])
    assert names(roster) == ["d:0 draining", "d:1", "d:2"]
    roster.drop_drained_backends()
    assert roster.sync_origin("dns", backends(D, 0, 1)) == ([], backends(D, 2))
    assert names(roster) == ["d:1", "d:2 draining"]
    roster.sync_origin("dns", backends(D, 1))
    assert roster.sync_origin("dns", backends(D, 0, 1)) == (backends(D, 0), [])
    assert names(roster) == ["d:0", "d:1", "d:2 draining"]


def test_backend_removed_and_added_by_an_administrator_has_that_origin() -> None:
    roster = roster_of(Scoreboard(slots=8))
    roster.sync_origin("dns", backends(D, 0))
    roster.remove_backend(D, "d", 0)
    roster.add_for_administrator(Backend(D, "d", 0))
    assert roster.sync_origin("dns", []) == ([], [])
    assert [member.origins for member in roster.members_of_role(D)] == [(ADMIN,)]


def test_processes_share_the_backends_that_an_origin_wanted() -> None:
    roster = roster_of(Scoreboard(slots=8))
    in_child(lambda: roster.sync_origin("dns", backends(D, 0, 1)))
    assert roster.sync_origin("dns", backends(D, 1)) == ([], backends(D, 0))


# Disabled members, and weights


def states(roster: Roster) -> list[tuple[str, bool, int, float | None]]:
    return [(m.backend.name, m.may_serve, m.weight_percent, m.must_leave_at) for m in roster.members_of_role(D)]


def test_member_may_be_disabled_and_weighted_in_any_worker() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=2)

    def change() -> None:
        assert roster.disable_backend(D, "d", 0, 7.0)
        assert roster.set_backend_weight(D, "d", 1, 30)

    in_child(change)
    assert states(roster) == [("d:0", False, 100, 7.0), ("d:1", True, 30, None)]
    assert [member.backend.port for member in roster.leaving_members()] == [0]
    roster.disable_backend(D, "d", 0)
    assert states(roster)[0] == ("d:0", False, 100, None)
    roster.enable_backend(D, "d", 0)
    assert states(roster) == [("d:0", True, 100, None), ("d:1", True, 30, None)]


def test_disabled_member_stays_disabled_while_it_is_wanted() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=2)
    roster.disable_backend(D, "d", 0, 7.0)
    roster.set_backend_weight(D, "d", 0, 30)
    assert roster.add_for_administrator(Backend(D, "d", 0)) is False
    roster.sync_origin("file", [Backend(D, "d", 0)])
    roster.sync_origin(CONFIG, [Backend(D, "d", 1)], restores_removed=True)
    assert states(roster)[0] == ("d:0", False, 30, 7.0)
    assert roster.drop_drained_backends() == []
    roster.remove_backend(D, "d", 0)
    assert roster.add_for_administrator(Backend(D, "d", 0)) is True
    assert states(roster)[0] == ("d:0", True, 100, None)


def test_absent_or_draining_backend_cannot_be_changed() -> None:
    scoreboard = Scoreboard(slots=3)
    roster = roster_of(scoreboard, decoders=1)
    before = roster.version_cells[0]
    assert not roster.disable_backend(D, "d", 5)
    assert not roster.enable_backend(P, "d", 0)
    assert roster.enable_backend(D, "d", 0)
    assert roster.set_backend_weight(D, "d", 0, 100)
    assert roster.version_cells[0] == before
    roster.remove_backend(D, "d", 0, leaves_at=3.0)
    assert not roster.enable_backend(D, "d", 0)
    assert not roster.disable_backend(D, "d", 0)
    assert states(roster) == [("d:0", False, 100, 3.0)]


def test_dry_run_of_a_sync_changes_nothing() -> None:
    roster = roster_of(Scoreboard(slots=3), decoders=2)
    before = roster.version_cells[0]
    came, went = roster.sync_origin(CONFIG, [Backend(D, "d", 1), Backend(D, "d", 2)], is_dry_run=True)
    assert ([b.port for b in came], [b.port for b in went]) == ([2], [0])
    assert roster.version_cells[0] == before
    assert states(roster) == [("d:0", True, 100, None), ("d:1", True, 100, None)]


# State of another process


def after(before: Roster, decoders: int = 2) -> Roster:
    return Roster(
        [], [("d", port) for port in range(decoders)], Scoreboard(slots=4), previous_state=before.export_state()
    )


def test_roster_restores_the_state_of_another() -> None:
    before = roster_of(Scoreboard(slots=8), decoders=2)
    before.add_for_administrator(Backend(D, "added", 1))
    before.remove_backend(D, "d", 0)
    before.set_backend_weight(D, "d", 1, 30)
    before.disable_backend(D, "added", 1, 5.0)
    went_on = after(before)
    assert went_on.is_restored
    assert states(went_on) == [("d:1", True, 30, None), ("added:1", False, 100, 5.0)]
    assert sorted(slots(went_on)) == [0, 1]
    went_on.sync_origin(CONFIG, [Backend(D, "d", 0), Backend(D, "d", 1)])  # removed by hand, and not by mistake
    assert names(went_on) == ["d:1", "added:1"]
    went_on.sync_origin(CONFIG, [Backend(D, "d", 0), Backend(D, "d", 1)], restores_removed=True)
    assert "d:0" in names(went_on)


def test_configuration_overrides_the_restored_state() -> None:
    before = roster_of(Scoreboard(slots=4), decoders=2)
    before.sync_origin("file", [Backend(D, "found", 1)])
    went_on = after(before, decoders=1)
    assert names(went_on) == ["d:0", "d:1 draining", "found:1"]
    went_on.sync_origin("file", [])
    went_on.drop_drained_backends()
    assert names(went_on) == ["d:0"]


@pytest.mark.parametrize("state", [7, [], [[[1, 2]], {}], [[], {"config": [["nobody", "d", 1]]}], {"rows": []}])
def test_unreadable_state_is_ignored(state: object) -> None:
    roster = Roster([], [("d", 0)], Scoreboard(slots=4), previous_state=state)
    assert names(roster) == ["d:0"]
    assert not roster.is_restored


# Joining instances


A, B = Backend(Role.DECODE, "a", 1), Backend(Role.PREFILL, "b", 2, bootstrap_port=8998, models=("x",))


@pytest.fixture
def joining(clock: Clock) -> JoiningList:
    return JoiningList(4, lambda: clock.now)


def test_joining_list_has_each_instance_once(joining: JoiningList) -> None:
    assert joining.add_instance(A, 10.0) is not None
    assert joining.add_instance(B, 10.0) is not None
    assert joining.add_instance(A, 10.0) is None
    assert joining.joining_backends() == [A, B]
    assert [backend.bootstrap_port for backend in joining.joining_backends()] == [None, 8998]
    assert [backend.models for backend in joining.joining_backends()] == [(), ("x",)]


def test_joining_list_gives_a_new_ticket_to_an_instance_added_again(joining: JoiningList) -> None:
    first = joining.add_instance(A, 10.0)
    assert first is not None
    assert joining.remove_instance(A)
    second = joining.add_instance(A, 10.0)
    assert second is not None
    assert (joining.has_instance(A, first), joining.has_instance(A, second)) == (False, True)
    assert not joining.remove_instance(A, first)
    assert joining.remove_instance(A, second)
    assert not joining.remove_instance(A)
    assert joining.joining_backends() == []


def test_joining_list_entries_expire(joining: JoiningList, clock: Clock) -> None:
    ticket = joining.add_instance(A, 10.0)
    assert ticket is not None
    clock.now += 10.0
    assert (joining.joining_backends(), joining.has_instance(A, ticket), joining.remove_instance(A, ticket)) == (
        [],
        False,
        False,
    )
    assert joining.add_instance(A, 10.0) is not None


def test_joining_list_is_shared_by_all_workers(joining: JoiningList) -> None:
    ticket = joining.add_instance(A, 10.0)
    assert ticket is not None

    def child() -> None:
        assert joining.joining_backends() == [A]
        assert joining.add_instance(A, 10.0) is None
        assert joining.remove_instance(A)
        assert joining.add_instance(B, 10.0) is not None

    in_child(child)
    assert not joining.has_instance(A, ticket)
    assert joining.joining_backends() == [B]


# Elastic members


E = Backend(D, "d", 0, is_elastic=True)


def elastic_roster() -> Roster:
    """Return a roster of a prefiller, and of two decoders of which the first is elastic."""
    return Roster([("p", 0)], [("d", 0), ("d", 1)], Scoreboard(slots=4), elastic={("d", 0)})


def begin(roster: Roster, to: Role = P, leaves_at: float | None = 5.0) -> bool:
    (member,) = roster.elastic_members()
    return roster.begin_move(member.backend, RoleMove(to, 9.0, "test"), leaves_at)


def configured(roster: Roster, *, is_elastic: bool = True) -> list[Backend]:
    """Return the instances as the configuration gives them, whatever their present roles are."""
    return [Backend(P, "p", 0), Backend(D, "d", 0, is_elastic=is_elastic), Backend(D, "d", 1)]


def test_moving_member_gets_no_requests_and_is_evacuated() -> None:
    roster = elastic_roster()
    assert begin(roster)
    (member,) = roster.elastic_members()
    assert (member.may_serve, member.is_draining, member.must_leave_at) == (False, False, 5.0)
    assert roster.leaving_members() == (member,)


def test_finished_move_replaces_the_member_in_one_step() -> None:
    roster = elastic_roster()
    begin(roster)
    moved = roster.finish_move(E)
    assert moved is not None
    assert (moved.role, moved.slot, moved.is_elastic) == (P, 3, True)
    assert (names(roster, P), names(roster, D)) == (["p:0", "d:0"], ["d:1"])
    (member,) = roster.elastic_members()
    assert (member.may_serve, member.origins, member.must_leave_at) == (True, (CONFIG,), None)
    assert roster.finish_move(moved) is None


def test_abandoned_move_leaves_the_old_role_and_the_reason() -> None:
    roster = elastic_roster()
    begin(roster)
    assert roster.abandon_move(E, "refused" + "!" * 300)
    (member,) = roster.elastic_members()
    assert (member.backend.role, member.may_serve, member.must_leave_at) == (D, True, None)
    assert member.move_problem == "refused" + "!" * 193
    assert not roster.abandon_move(E, "again")


def test_order_for_the_present_role_ends_a_move() -> None:
    roster = elastic_roster()
    begin(roster)
    assert begin(roster, to=D)
    assert roster.elastic_members()[0].may_serve


def test_move_that_may_have_reached_the_engine_cannot_be_cancelled() -> None:
    roster = elastic_roster()
    begin(roster)
    roster.mark_switching(E, True)
    with pytest.raises(ValueError, match="is exchanging its role already"):
        begin(roster, to=D)


def test_only_elastic_members_move_and_never_the_last_one() -> None:
    roster = elastic_roster()
    with pytest.raises(ValueError, match="d:1 is not elastic"):
        roster.begin_move(Backend(D, "d", 1), RoleMove(P, 9.0), None)
    assert not roster.begin_move(Backend(D, "nobody", 1), RoleMove(P, 9.0), None)
    roster.disable_backend(D, "d", 1)
    with pytest.raises(ValueError, match="d:0 is the only decode instance"):
        begin(roster)


def test_present_role_outlives_what_origins_give() -> None:
    roster = elastic_roster()
    begin(roster)
    roster.finish_move(E)
    before = roster.version_cells[0]
    assert roster.sync_origin(CONFIG, configured(roster), restores_removed=True) == ([], [])
    assert roster.version_cells[0] == before
    roster.sync_origin("file:x", [Backend(D, "d", 0)])
    assert roster.elastic_members()[0].origins == (CONFIG, "file:x")
    assert (names(roster, P), names(roster, D)) == (["p:0", "d:0"], ["d:1"])


def test_configuration_cannot_fix_the_other_role_of_a_moved_member() -> None:
    roster = elastic_roster()
    begin(roster)
    roster.finish_move(E)
    with pytest.raises(ValueError, match="d:0 is already a prefill instance"):
        roster.sync_origin(CONFIG, configured(roster, is_elastic=False), restores_removed=True)


def test_sync_and_enabling_do_not_stop_the_evacuation_of_a_moving_member() -> None:
    roster = elastic_roster()
    begin(roster)
    roster.sync_origin(CONFIG, configured(roster), restores_removed=True)
    roster.enable_backend(D, "d", 0)
    assert roster.elastic_members()[0].must_leave_at == 5.0


def test_removed_member_does_not_move_any_more() -> None:
    roster = elastic_roster()
    begin(roster)
    roster.remove_backend(D, "d", 0)
    assert roster.elastic_members() == ()
    assert roster.finish_move(E) is None
    assert roster.drop_drained_backends() == [E]
    roster.sync_origin(CONFIG, configured(roster))
    assert names(roster) == ["d:1"]


def test_move_is_taken_over_and_older_rows_are_read() -> None:
    roster = elastic_roster()
    begin(roster)
    taken_over = Roster([("p", 0)], [("d", 0), ("d", 1)], Scoreboard(slots=4), previous_state=roster.export_state())
    assert taken_over.elastic_members()[0].pending_move == RoleMove(P, 9.0, "test")
    (row, *_) = roster.export_state()[0]
    assert RosterMember.from_stored_row(row[:-1]).backend == RosterMember.from_stored_row(row).backend
    assert RosterMember.from_stored_row(row[:10]).backend == RosterMember.from_stored_row(row).backend
