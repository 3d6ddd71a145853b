"""The files in which prometheus-client keeps the metrics of one worker, for the other workers to read.

Something else may delete them while the gateway runs, such as a cleaner of `/tmp`. The worker goes on counting in the
deleted files, which nobody can read any more, so it writes its counts to new files.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.common.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import CollectorRegistry, Metric

logger = logging.getLogger(__name__)

DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the name of the directory."""


class WorkerFiles:
    """The files of this process. Created after all metrics, as each kind of metric has one file."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._directory = Path(os.environ[DIRECTORY])
        self._files = {file._fname: file for file in _files_of(registry)}
        self.trouble: str | None = None
        """Why the files are not there and cannot be created; None if they are there."""

    def restore(self) -> None:
        """Write the files again that were deleted, and their directory. An error is logged once, and kept."""
        try:
            for name, file in self._files.items():
                if not os.path.exists(name):
                    make_directory(self._directory)
                    _write_again(file)
        except OSError as error:
            if self.trouble is None:
                logger.error("the metrics' directory %s was deleted and cannot be created: %s", self._directory, error)
            self.trouble = str(error)
        else:
            if self.trouble is not None:
                logger.info("the metrics' directory %s is back", self._directory)
            self.trouble = None

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all workers. Raises GatewayError."""
        for is_last in (False, True):
            try:
                return MultiProcessCollector(None, self._directory).collect()  # type: ignore[no-untyped-call,no-any-return]
            except (ValueError, FileNotFoundError) as error:  # the directory, or a file in it, was just deleted
                if is_last:
                    message = f"the metrics' directory {self._directory} cannot be read: {self.trouble or error}"
                    raise GatewayError(message, code="metrics_unavailable", status=503) from None
        raise AssertionError


def make_directory(directory: Path) -> None:
    """Create the directory for this user alone, unless it exists.

    Raises OSError, also if it belongs to another user, who could have created it in a public place.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.geteuid() or directory.is_symlink():
        raise PermissionError(f"{directory} belongs to another user")


def _write_again(file: MmapedDict) -> None:
    """Continue with a new file of the same name and contents. Readers never see a part of it."""
    name = file._fname
    with open(f"{name}.new", "wb") as copy:
        copy.write(file._m)
    os.replace(f"{name}.new", name)
    new = MmapedDict(name)  # type: ignore[no-untyped-call]
    file.close()  # type: ignore[no-untyped-call]
    vars(file).update(vars(new))  # each metric holds this object


def _files_of(registry: CollectorRegistry) -> Iterator[MmapedDict]:
    for metric in registry._collector_to_names:
        if isinstance(metric, MetricWrapperBase):
            for one in (metric, *getattr(metric, "_metrics", {}).values()):
                value = getattr(one, "_sum", None) or getattr(one, "_value", None)
                if value is not None:
                    yield value._file
