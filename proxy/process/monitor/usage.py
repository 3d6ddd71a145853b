"""How much of its memory and of its file descriptors the gateway has used up, as Linux tells it.

Where nothing is told, nothing counts as used.
"""

from __future__ import annotations

import os
import resource
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES_AT_A_TIME: Final = 500
"""To list this many takes less than a millisecond."""


class Memory:
    """What the gateway uses of the memory it could have.

    There are limits of the control groups around the process (version 1 or 2), of its address space, and of the
    machine. All workers count, each as this one. What is certainly other programs' is taken off both use and limit: an
    engine that fills the container is no reason to refuse requests as long as the gateway is small.
    """

    def __init__(self, workers: int = 1, root: Path = Path("/"), address_space_bytes: int | None = None) -> None:
        """`root` is where /proc and /sys are; `address_space_bytes` None stands for RLIMIT_AS."""
        self._workers = workers
        self._statm = root / "proc/self/statm"
        self._address_space_bytes = address_space_bytes or resource.getrlimit(resource.RLIMIT_AS)[0]
        self._machine_bytes = 1024 * _table(root / "proc/meminfo").get(b"MemTotal:", 0)
        self._groups = tuple(_groups(root))

    def resident_bytes(self) -> int:
        """What this process has in memory; 0 where nothing is told."""
        pages = _read(self._statm).split()
        return int(pages[1]) * resource.getpagesize() if pages else 0

    def share(self) -> float:
        """What is used of the closest limit: 0 is nothing, 1 is all."""
        pages = _read(self._statm).split()
        if not pages or not self._machine_bytes:
            return 0.0
        size, resident = (int(count) * resource.getpagesize() for count in pages[:2])
        ours = resident * self._workers
        shares = [ours / self._machine_bytes]
        if self._address_space_bytes != resource.RLIM_INFINITY:
            shares.append(size / self._address_space_bytes)
        for group in self._groups:
            limit = _read(group.limit).strip()
            # Without one, version 2 writes `max`, and version 1 a very large number.
            if limit.isdigit() and int(limit) < self._machine_bytes:
                shares.append(_share_of(int(limit), int(_read(group.usage) or 0), _table(group.stat), group, ours))
        return max(shares)


class OpenFds:
    """What the process has open of the descriptors it could have."""

    def __init__(self, path: str = "/proc/self/fd", limit: int | None = None) -> None:
        """`limit` None stands for RLIMIT_NOFILE."""
        self._path = path
        self._limit = limit
        self._listing: Iterator[os.DirEntry[str]] | None = None
        self._listed = 0

    def share(self) -> float | None:
        """From 0 to 1. None when it is still counting, and to be asked again soon."""
        limit = self._limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            count = os.stat(self._path).st_size or self._list_some()
        except FileNotFoundError:
            return 0.0
        except OSError:  # there is none left to look with
            return 1.0
        return None if count is None else count / limit

    def _list_some(self) -> int | None:
        """Before Linux 6.2 the size of that directory is 0, and listing 20,000 entries takes 20 ms."""
        if self._listing is None:
            self._listing, self._listed = os.scandir(self._path), 0
        some = sum(1 for _ in islice(self._listing, _ENTRIES_AT_A_TIME))
        self._listed += some
        if some == _ENTRIES_AT_A_TIME:
            return None
        self._listing = None
        return self._listed


class _Group(NamedTuple):
    """The files of a control group, and what `stat` calls anonymous memory and page cache that is not in use."""

    limit: Path
    usage: Path
    stat: Path
    anonymous: bytes
    cache: bytes


def _groups(root: Path) -> Iterator[_Group]:
    """The control groups of this process that may limit its memory, the innermost first.

    A container sees its own group as the root of the tree, whatever /proc/self/cgroup calls it.
    """
    for line in _read(root / "proc/self/cgroup").decode(errors="replace").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            tree = root / "sys/fs/cgroup"
            files = ("memory.max", "memory.current", "memory.stat")
            names = (b"anon", b"inactive_file")
        elif "memory" in controllers.split(","):
            tree = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            names = (b"total_rss", b"total_inactive_file")
        else:
            continue
        inner = tree / name.lstrip("/")
        for directory in (inner, *inner.parents):
            if (directory / files[0]).exists():
                limit, usage, stat = (directory / file for file in files)
                yield _Group(limit, usage, stat, *names)
            if directory == tree:
                break


def _share_of(limit: int, used: int, stat: dict[bytes, int], group: _Group, ours: int) -> float:
    # The kernel gives up idle page cache before it kills anybody; the kubelet counts so, too.
    used -= stat.get(group.cache, 0)
    # Sockets' buffers and the like stay in: they may well be ours.
    others = max(0, stat.get(group.anonymous, 0) - ours)
    return max(0, used - others) / max(1, limit - others)


def _table(path: Path) -> dict[bytes, int]:
    """Lines of a name, a number, and perhaps a unit."""
    return {words[0]: int(words[1]) for words in map(bytes.split, _read(path).splitlines()) if len(words) > 1}


def _read(path: Path) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:  # there is nothing to gather: the kernel gives all at once
            return file.read()
    except OSError:
        return b""
