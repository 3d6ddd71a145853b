"""Use of memory and file descriptors, as Linux reports them. Unknown values count as unused."""

from __future__ import annotations

import os
import resource
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRIES_AT_A_TIME: Final = 500
"""listing this many entries takes less than a millisecond"""


class Memory:
    """The share of available memory that the gateway uses.

    Limits are those of the control groups around the process (version 1 or 2), of its address space, and of the
    machine. All workers count, each like this one. Memory that other programs certainly use is subtracted from both use
    and limit: an engine that fills the container is no reason to refuse requests while the gateway is small.
    """

    def __init__(self, workers: int = 1, root: Path = Path("/"), address_space_bytes: int | None = None) -> None:
        """Keep the sources. `root`: directory of /proc and /sys. `address_space_bytes` None: RLIMIT_AS."""
        self._workers = workers
        self._statm = root / "proc/self/statm"
        self._address_space_bytes = address_space_bytes or resource.getrlimit(resource.RLIMIT_AS)[0]
        self._machine_bytes = 1024 * _table(root / "proc/meminfo").get(b"MemTotal:", 0)
        self._groups = tuple(_groups(root))

    def resident_bytes(self) -> int:
        """Return the resident memory of this process in bytes; 0 if not known."""
        pages = _read(self._statm).split()
        return int(pages[1]) * resource.getpagesize() if pages else 0

    def share(self) -> float:
        """Return the used share of the closest limit, from 0 to 1."""
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
            # Without a limit, version 2 writes `max`, and version 1 a very large number.
            if limit.isdigit() and int(limit) < self._machine_bytes:
                shares.append(_share_of(int(limit), int(_read(group.usage) or 0), _table(group.stat), group, ours))
        return max(shares)


class OpenFds:
    """The share of file descriptors that the process uses."""

    def __init__(self, path: str = "/proc/self/fd", limit: int | None = None) -> None:
        """Keep the sources. `limit` None: RLIMIT_NOFILE."""
        self._path = path
        self._limit = limit
        self._listing: Iterator[os.DirEntry[str]] | None = None
        self._listed = 0

    def share(self) -> float | None:
        """Return the used share, from 0 to 1; None while counting, so that the caller asks again soon."""
        limit = self._limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            count = os.stat(self._path).st_size or self._list_some()
        except FileNotFoundError:
            return 0.0
        except OSError:  # there is no descriptor left for the directory
            return 1.0
        return None if count is None else count / limit

    def _list_some(self) -> int | None:
        """Count some entries of the directory.

        Before Linux 6.2, it has no size, and listing 20,000 entries takes 20 ms.
        """
        if self._listing is None:
            self._listing, self._listed = os.scandir(self._path), 0
        some = sum(1 for _ in islice(self._listing, _ENTRIES_AT_A_TIME))
        self._listed += some
        if some == _ENTRIES_AT_A_TIME:
            return None
        self._listing = None
        return self._listed


class _Group(NamedTuple):
    """Files of a control group, and names in its `stat` of anonymous memory and idle page cache."""

    limit: Path
    usage: Path
    stat: Path
    anonymous: bytes
    cache: bytes


def _groups(root: Path) -> Iterator[_Group]:
    """Return the control groups that may limit the memory of this process, the innermost first.

    A container sees its own group as the root of the tree, whatever name /proc/self/cgroup has.
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
    # The kernel frees idle page cache before it kills a process; the kubelet counts in the same way.
    used -= stat.get(group.cache, 0)
    # Socket buffers and other kernel memory stay in, because they may belong to the gateway.
    others = max(0, stat.get(group.anonymous, 0) - ours)
    return max(0, used - others) / max(1, limit - others)


def _table(path: Path) -> dict[bytes, int]:
    """Return lines of a name, a number, and perhaps a unit."""
    return {words[0]: int(words[1]) for words in map(bytes.split, _read(path).splitlines()) if len(words) > 1}


def _read(path: Path) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:  # unbuffered, because the kernel returns all at once
            return file.read()
    except OSError:
        return b""
