"""CPU time, memory and open files of any process, read from Linux's /proc."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, its descendants, and children that have ended."""
    seconds = 0.0
    for member in tree(pid):
        stat = _stat(member)
        if stat is not None:
            seconds += _clock_seconds(member)
            seconds += sum(int(value) for value in stat[13:15]) / _TICKS_PER_SECOND  # of children waited for
    return seconds


def _clock_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process in nanosecond resolution.

    /proc counts in ticks of 10 ms. The clock's number is that of clock_getcpuclockid(3).
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants. Shared pages count for each."""
    pages = 0
    for member in tree(pid):
        stat = _stat(member)
        pages += 0 if stat is None else int(stat[21])
    return pages * _PAGE_BYTES


def tree(pid: int) -> list[int]:
    """Return a process and its descendants, parents first."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    members = [pid]
    for member in members:
        members += [child for child, stat in parents.items() if stat is not None and int(stat[1]) == member]
    return members


def open_fds(pid: int) -> int:
    """Return the number of file descriptors that a process has open, or 0 if it has ended."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def accepted(pid: int, port: int) -> Counter[int]:
    """Count open accepted connections on a port, by process id of `pid` and its descendants."""
    established = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "01":
            established.add(f"socket:[{fields[9]}]")
    counts: Counter[int] = Counter()
    for member in tree(pid):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{member}/fd").iterdir():
                with suppress(OSError):
                    counts[member] += os.readlink(descriptor) in established
    return +counts


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process and its descendants, in bytes.

    `shared_out`: pages of several processes are divided among them.
    """

    resident: int
    shared_out: int


def memory(pid: int) -> Memory:
    """Return the memory that a process and its descendants use now."""
    sums = {"Rss": 0, "Pss": 0}
    for member in tree(pid):
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in sums:
                sums[name] += int(rest.split()[0]) * 1024
    return Memory(sums["Rss"], sums["Pss"])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat behind the name, or None if the process has ended.

    The name may contain any character.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
