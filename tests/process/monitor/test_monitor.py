"""Memory, CPU time and loop lag of a worker, with fake files of the system and a clock that tests move."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import pytest

from proxy.observe import logs
from proxy.observe.metrics import Metrics
from proxy.process.monitor import MemoryUse, MonitorParts, OpenFds, OverloadState, WorkerMonitor, overload_of
from proxy.settings import Log
from tests.clock import Clock

MIB = 1024 * 1024
NO_LIMIT = resource.RLIM_INFINITY


def value(metrics: Metrics, name: str) -> float:
    return next(sample.value for family in metrics.collect() for sample in family.samples if sample.name == name)


class Machine:
    """A /proc and a /sys. The process has 100 MiB in memory, 200 MiB of address space, the machine 1000 MiB."""

    def __init__(self, root: Path) -> None:
        self.root = root
        page = resource.getpagesize()
        self.write("proc/self/statm", f"{200 * MIB // page} {100 * MIB // page} 1000 1 0 2000 0\n")
        self.write("proc/meminfo", f"MemTotal:       {1000 * 1024} kB\nMemFree:   5 kB\nHugePages_Total:       0\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def use(self, mib: int) -> None:
        page = resource.getpagesize()
        self.write("proc/self/statm", f"{2 * mib * MIB // page} {mib * MIB // page} 1000 1 0 2000 0\n")

    def group(self, path: str, limit: str | int, used: int, *, cache: int = 0, anonymous: int = 100) -> None:
        """Create a control group of version 2. Sizes are in MiB."""
        tree = f"sys/fs/cgroup/{path}"
        self.write(f"{tree}/memory.max", f"{limit if isinstance(limit, str) else limit * MIB}\n")
        self.write(f"{tree}/memory.current", f"{used * MIB}\n")
        self.write(f"{tree}/memory.stat", f"anon {anonymous * MIB}\nfile 12345\ninactive_file {cache * MIB}\n")

    def share(self, workers: int = 1, address_space_bytes: int = NO_LIMIT) -> float:
        return round(MemoryUse(workers, self.root, address_space_bytes).used_share(), 3)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_without_other_limits_the_machines_memory_is_there_to_be_used(machine: Machine) -> None:
    assert machine.share() == 0.1
    assert machine.share(workers=4) == 0.4


def test_memory_share_compares_mapped_memory_with_the_address_space_limit(machine: Machine) -> None:
    assert machine.share(address_space_bytes=250 * MIB) == 0.8


@pytest.mark.parametrize(
    ("named", "group"),
    [("0::/\n", ""), ("0::/system.slice/pdproxy.service\n", "system.slice/pdproxy.service"), ("0::/elsewhere\n", "")],
    ids=["container", "service", "container that sees the host's name of its group"],
)
def test_control_group_limits_memory(machine: Machine, named: str, group: str) -> None:
    machine.write("proc/self/cgroup", named)
    machine.group(group, limit=200, used=150)
    assert machine.share() == 0.75


def test_closest_of_several_control_groups_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.group("", limit="max", used=900)
    machine.group("a", limit=400, used=320)
    machine.group("a/b", limit=300, used=150)
    assert machine.share() == 0.8


def test_idle_page_cache_is_not_in_use(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group("", limit=200, used=199, cache=99)
    assert machine.share() == 0.5


def test_buffers_of_sockets_are_in_use(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group("", limit=500, used=475, anonymous=100)
    assert machine.share() == 0.95


def test_engine_that_fills_the_container_does_not_count(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group("", limit=900, used=860, anonymous=800)
    assert machine.share() == 0.8  # of 200 MiB that the engine leaves


def test_other_workers_do_count(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group("", limit=420, used=400, anonymous=400)
    assert machine.share(workers=4) == 0.952


def test_control_groups_of_version_1_limit_memory_too(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/x\n")
    tree = "sys/fs/cgroup/memory"
    machine.write(f"{tree}/memory.limit_in_bytes", f"{200 * MIB}\n")
    machine.write(f"{tree}/memory.usage_in_bytes", f"{180 * MIB}\n")
    machine.write(
        f"{tree}/memory.stat", f"rss 1\ninactive_file 1\ntotal_rss {100 * MIB}\ntotal_inactive_file {20 * MIB}\n"
    )
    assert machine.share() == 0.8
    machine.write(f"{tree}/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.share() == 0.1


def test_resident_memory_is_in_bytes(machine: Machine) -> None:
    assert MemoryUse(4, machine.root, NO_LIMIT).resident_bytes() == 100 * MIB
    (machine.root / "proc/self/statm").unlink()
    assert MemoryUse(4, machine.root, NO_LIMIT).resident_bytes() == 0


def test_limits_are_read_again(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group("", limit=200, used=150)
    memory = MemoryUse(1, machine.root, NO_LIMIT)
    assert memory.used_share() == 0.75
    machine.group("", limit=300, used=150)
    assert memory.used_share() == 0.5


def test_memory_share_is_zero_when_the_system_reports_nothing(tmp_path: Path) -> None:
    assert MemoryUse(1, tmp_path, NO_LIMIT).used_share() == 0.0


def test_this_machine_tells_its_share() -> None:
    assert 0.0 < MemoryUse().used_share() < 1.0


# --- file descriptors ------------------------------------------------------------------------------------------------


def test_open_descriptors_are_counted() -> None:
    before = OpenFds(limit=1000).used_share()
    assert before is not None
    pipes = [os.pipe() for _ in range(50)]
    share = OpenFds(limit=1000).used_share()
    for fd in (fd for pipe in pipes for fd in pipe):
        os.close(fd)
    assert share == pytest.approx(before + 0.1)


@pytest.mark.parametrize(("more", "steps"), [(0, 1), (500, 2), (1000, 3)])
def test_on_old_kernels_they_are_listed_piece_by_piece(more: int, steps: int) -> None:
    # It has the same entries, and the size 0 that /proc/self/fd had before Linux 6.2.
    fds = OpenFds("/proc/self/fdinfo", limit=10_000)
    few = fds.used_share()
    assert few is not None
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(more)]
    try:
        for _ in range(2):
            assert [fds.used_share() for _ in range(steps)] == [
                *[None] * (steps - 1),
                pytest.approx(few + more / 10_000),
            ]
    finally:
        for fd in opened:
            os.close(fd)


def test_uncountable_descriptors_count_as_closed(tmp_path: Path) -> None:
    assert OpenFds(str(tmp_path / "nothing")).used_share() == 0.0


# --- overload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "states"),
    [
        ([0.0, 0.91, 0.92, 0.949, 0.95, 1.0], [0, 0, 1, 1, 2, 2]),
        ([0.95, 0.94, 0.935, 0.925, 0.91, 0.905, 0.89, 0.91], [2, 2, 2, 1, 1, 1, 0, 0]),
        ([0.93, 0.899, 0.99, 0.5], [1, 0, 2, 0]),
    ],
)
def test_overload_is_left_lower_than_it_is_entered(shares: list[float], states: list[int]) -> None:
    state, seen = OverloadState.NONE, []
    for share in shares:
        state = overload_of(share, state)
        seen.append(state)
    assert seen == states


def monitor(metrics: Metrics, machine: Machine, clock: Clock, **options: object) -> WorkerMonitor:
    memory, fds = MemoryUse(1, machine.root, NO_LIMIT), OpenFds(limit=1 << 20)
    parts = MonitorParts(memory=memory, open_fds=fds, clock=clock, shrink_heap=lambda: None, **options)  # type: ignore[arg-type]
    return WorkerMonitor(metrics, parts)


def test_monitor_reports_cpu_time_and_memory_of_the_process(machine: Machine, clock: Clock) -> None:
    metrics = Metrics()
    watching = monitor(metrics, machine, clock)
    watching.run_due_measurements()
    before = value(metrics, "pdproxy_cpu_seconds_total")
    assert 0 < before <= time.process_time()
    clock.now += 2.0
    watching.run_due_measurements()
    assert before < value(metrics, "pdproxy_cpu_seconds_total") <= time.process_time()
    assert value(metrics, "pdproxy_resident_memory_bytes") == 100 * MIB


def test_each_change_of_overload_is_one_line_and_the_metric(
    machine: Machine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    watching = monitor(metrics, machine, clock)
    seen = []
    with caplog.at_level(logging.INFO, "proxy.monitor"):
        for mib in (100, 930, 930, 960, 940, 500, 500):
            machine.use(mib)
            clock.now += 1.0
            watching.run_due_measurements()
            seen.append(
                (watching.closes_connections, watching.refuses_requests, value(metrics, "pdproxy_overload_state"))
            )
    assert value(metrics, "pdproxy_memory_share") == 0.5
    calm, closing, refusing = (False, False, 0.0), (True, False, 1.0), (True, True, 2.0)
    assert seen == [calm, closing, closing, refusing, refusing, calm, calm]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "memory: new state: connections are closed after each answer: 93.0 % of the limit in use"),
        ("WARNING", "memory: new state: new requests are refused: 96.0 % of the limit in use"),
        ("INFO", "memory: new state: no measures are needed: 50.0 % of the limit in use"),
    ]


def test_monitor_reports_the_load_of_the_event_loop(
    machine: Machine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_seconds = iter([10.0, 10.25, 10.25, 10.75])
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu_seconds))
    shares: list[float] = []
    watching = monitor(Metrics(), machine, clock, on_busy_share=shares.append)
    clock.now += 0.5
    watching.run_due_measurements()
    watching.run_due_measurements()  # at the same time
    clock.now += 0.5
    watching.run_due_measurements()
    assert shares == [0.5, 1.0]


def test_memory_is_looked_at_once_a_second(machine: Machine, clock: Clock) -> None:
    metrics = Metrics()
    watching = monitor(metrics, machine, clock)
    watching.run_due_measurements()
    machine.use(960)
    clock.now += 0.99
    watching.run_due_measurements()
    assert not watching.refuses_requests
    clock.now += 0.01
    watching.run_due_measurements()
    assert watching.refuses_requests


def test_memory_that_is_free_is_given_back_while_there_is_too_little(machine: Machine, clock: Clock) -> None:
    shrunk: list[float] = []
    memory = MemoryUse(1, machine.root, NO_LIMIT)
    watching = WorkerMonitor(
        Metrics(),
        MonitorParts(memory=memory, clock=clock, shrink_heap=lambda: shrunk.append(clock.now - 1000.0)),
    )
    for mib in [100, *[930] * 12, *[100] * 20, 930]:
        machine.use(mib)
        watching.run_due_measurements()
        clock.now += 1.0
    assert shrunk == [1.0, 11.0, 33.0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can")
def test_free_memory_goes_back_to_the_system(machine: Machine, clock: Clock) -> None:
    blocks = [bytes(10_000) for _ in range(10_000)]
    last = blocks.pop()  # the allocator returns free memory behind the last block to the system
    blocks.clear()
    before = MemoryUse().used_share()
    machine.use(930)
    WorkerMonitor(
        Metrics(), MonitorParts(memory=MemoryUse(1, machine.root, NO_LIMIT), clock=clock)
    ).run_due_measurements()
    assert MemoryUse().used_share() < before
    assert last


def test_share_of_open_descriptors_is_measured_every_five_seconds(machine: Machine, clock: Clock) -> None:
    metrics = Metrics()
    watching = monitor(metrics, machine, clock)
    watching.run_due_measurements()
    before = value(metrics, "pdproxy_open_fds_share")
    with tempfile.TemporaryFile():
        clock.now += 4.9
        watching.run_due_measurements()
        assert value(metrics, "pdproxy_open_fds_share") == before
        clock.now += 0.1
        watching.run_due_measurements()
        assert value(metrics, "pdproxy_open_fds_share") > before


# --- the event loop --------------------------------------------------------------------------------------------------


def test_lag_is_the_worst_of_the_last_fifteen_seconds(machine: Machine, clock: Clock) -> None:
    metrics = Metrics()
    watching = monitor(metrics, machine, clock, tick_seconds=0.5)
    seen = []
    for late in [0.0, 1.0, 2.0, 0.5, *[0.0] * 31]:
        clock.now += 0.5 + late
        watching.run_due_measurements()
        seen.append(value(metrics, "pdproxy_loop_lag_seconds"))
    # The tick that was 2 s late counts until the one 15 s after it; the next worst came 1 s after it.
    assert seen[1:] == [1.0, *[2.0] * 30, 0.5, 0.5, 0.0]


def test_loop_that_has_not_ticked_for_long_is_not_alive(machine: Machine, clock: Clock) -> None:
    watching = monitor(Metrics(), machine, clock, is_ready=lambda: True)
    watching.run_due_measurements()
    clock.now += 30.0
    assert watching.is_alive()
    assert watching.was_ready()
    clock.now += 0.1
    assert not watching.is_alive()
    assert not watching.was_ready()
    watching.run_due_measurements()
    assert watching.is_alive()


def test_readiness_is_what_it_was_at_the_last_tick(machine: Machine, clock: Clock) -> None:
    ready = [False]
    watching = monitor(Metrics(), machine, clock, is_ready=lambda: ready[0])
    assert not watching.was_ready()
    ready[0] = True
    assert not watching.was_ready()
    watching.run_due_measurements()
    ready[0] = False
    assert watching.was_ready()
    watching.run_due_measurements()
    assert not watching.was_ready()


async def test_running_monitor_ticks_and_calls_its_listeners() -> None:
    ticks = 0
    enough = asyncio.Event()

    def count() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 3:
            enough.set()

    metrics = Metrics()
    async with WorkerMonitor(metrics, MonitorParts(tick_callbacks=(count,), tick_seconds=0.001)) as watching:
        await enough.wait()
        assert watching.was_ready()
        assert 0.0 < value(metrics, "pdproxy_memory_share") < 1.0
        assert 0.0 < value(metrics, "pdproxy_open_fds_share") < 1.0


async def test_caller_that_fails_stops_neither_the_others_nor_the_ticking() -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))
    twice = asyncio.Event()
    calls: list[None] = []

    def fail() -> None:
        raise ZeroDivisionError

    def note() -> None:
        calls.append(None)
        if len(calls) == 2:
            twice.set()

    async with WorkerMonitor(Metrics(), MonitorParts(tick_callbacks=(fail, note), tick_seconds=0.001)):
        await twice.wait()
    assert all(isinstance(problem, ZeroDivisionError) for problem in problems)
    assert len(problems) >= 2


async def test_monitor_that_was_left_ticks_no_more() -> None:
    ticked = asyncio.Event()
    async with WorkerMonitor(Metrics(), MonitorParts(tick_callbacks=(ticked.set,), tick_seconds=0.0)) as watching:
        await ticked.wait()
    assert watching._timer is not None
    assert watching._timer.cancelled()


# --- the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("logging_as_before")
def test_lost_log_lines_are_logged_and_counted(machine: Machine, clock: Clock) -> None:
    metrics = Metrics()
    with tempfile.TemporaryFile("w+") as file:
        logs.set_up_logging(Log(format="text"), file, clock=clock)
        watching = monitor(metrics, machine, clock)
        for _ in range(25):
            logs.access_line({"term": "PR", "code": 400})
        clock.now += 1.0
        watching.run_due_measurements()
        watching.run_due_measurements()
        assert os.pread(file.fileno(), 1 << 16, 0).endswith(b" left out: request term=PR code=400 suppressed=5\n")
    assert value(metrics, "pdproxy_log_lines_suppressed_total") == 5.0
    with open("/dev/full", "w") as full:
        logs.set_up_logging(Log(format="text"), full, clock=clock)
        watching = monitor(metrics, machine, clock)
        for _ in range(3):
            logs.access_line({"term": "--", "code": 200})
            watching.run_due_measurements()
    assert value(metrics, "pdproxy_log_lines_dropped_total") == 3.0
