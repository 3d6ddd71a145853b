"""Instances in files, in the format of Prometheus' file_sd_configs, so that one list serves both.

    - targets: [10.0.0.3:7100, 10.0.0.4:7100]
      labels: {role: decode}

(https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config). Unknown
labels are ignored.
"""

from __future__ import annotations

import asyncio
import glob
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.common.backend import Backend, Role
from proxy.settings import SettingsError, parse_endpoints, parse_model_names, read_yaml

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

_CHECK_SECONDS: Final = 0.5

FileStamps = dict[Path, tuple[int, int, int]]
"""Time of the last change, inode and size of each file. They differ after a file was written or replaced."""


@dataclass(frozen=True, slots=True)
class WatchedFiles:
    """One file, or all files that match a pattern, as one list. If one of them is broken, the source fails."""

    source_name: str
    """A path with the wildcards * and ?."""
    check_seconds: float = field(default=_CHECK_SECONDS, compare=False)

    async def watch_instances(self) -> AsyncGenerator[Sequence[Backend], None]:
        """Poll the files, which works on every file system.

        A change counts when two checks find the same, because a file may be half written at the first.
        """
        reported: FileStamps | None = None
        last: FileStamps | None = None
        while True:
            # In a thread: a disk may be slow, and so is reading YAML.
            stamps = await asyncio.to_thread(_file_stamps, self.source_name)
            if reported is None or (stamps != reported and stamps == last):
                backends = await asyncio.to_thread(_read_all, tuple(stamps))
                reported = stamps
                yield backends
            last = stamps
            await asyncio.sleep(self.check_seconds)


def parse_groups(target_groups: Any) -> list[Backend]:
    """Return the instances of a file, to which the gateway sends its engine key. Raises ValueError."""
    if not isinstance(target_groups, list):
        raise ValueError("there must be a list of groups such as {targets: [10.0.0.3:7100], labels: {role: decode}}")
    return [
        backend
        for number, group in enumerate(target_groups, 1)
        for backend in _backends_of_group(group, f"group {number}")
    ]


def _backends_of_group(target_group: Any, location: str) -> Iterator[Backend]:
    targets, labels = (
        (target_group.get("targets"), target_group.get("labels")) if isinstance(target_group, dict) else (None, None)
    )
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"{location} must have targets, a list of host:port")
    role, bootstrap_port = _parse_role(labels, location), _parse_bootstrap_port(labels, location)
    models, is_elastic = _parse_models(labels, location), _is_elastic(labels, location)
    if bootstrap_port is not None and role is not Role.PREFILL and not is_elastic:
        raise ValueError(f"{location} has a bootstrap_port, which only prefillers have")
    for target in targets:
        try:
            endpoints = parse_endpoints(target)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
        for endpoint in endpoints:
            port, served = endpoint.bootstrap_port or bootstrap_port, endpoint.models or models
            yield Backend(
                role,
                endpoint.host,
                endpoint.port,
                is_trusted=True,
                bootstrap_port=port,
                models=served,
                tls=endpoint.tls,
                is_elastic=is_elastic,
            )


def _parse_role(labels: Any, location: str) -> Role:
    try:
        return Role(labels["role"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{location} must have the label role: prefill, decode or encode") from None


def _parse_bootstrap_port(labels: Any, location: str) -> int | None:
    """Return the port, or None without the label. Prometheus requires texts, but people write numbers."""
    word = str(labels.get("bootstrap_port", ""))
    if not word:
        return None
    if not (word.isdecimal() and 1 <= int(word) <= 65535):
        raise ValueError(f"{location}: bootstrap_port must be a number from 1 to 65535")
    return int(word)


def _is_elastic(labels: Any, location: str) -> bool:
    """Return whether the instances may exchange their role."""
    word = str(labels.get("elastic", "false")).lower()
    if word not in ("true", "false"):
        raise ValueError(f"{location}: elastic must be true or false")
    return word == "true"


def _parse_models(labels: Any, location: str) -> tuple[str, ...]:
    """Return the models in the label `model`, separated by commas; empty without it: then engines are asked."""
    try:
        return parse_model_names(str(labels.get("model", "")))
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None


def _file_stamps(path_pattern: str) -> FileStamps:
    """Return the stamps of all matching files. Raises OSError if there is none."""
    paths = sorted(glob.glob(path_pattern)) if glob.has_magic(path_pattern) else [path_pattern]
    if not paths:
        raise FileNotFoundError(f"no file matches {path_pattern}")
    found: FileStamps = {}
    for path in map(Path, paths):
        try:
            stat = path.stat()
        except OSError as error:
            raise _make_unreadable_error(path, error) from None
        found[path] = stat.st_mtime_ns, stat.st_ino, stat.st_size
    return found


def _read_all(paths: Sequence[Path]) -> list[Backend]:
    return [backend for path in paths for backend in _read_file(path)]


def _read_file(path: Path) -> list[Backend]:
    """Return the instances of a file. Raises ValueError or OSError with the name of the file."""
    try:
        return parse_groups(orjson.loads(path.read_bytes()) if path.suffix == ".json" else read_yaml(path))
    except OSError as error:
        raise _make_unreadable_error(path, error) from None
    except SettingsError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _make_unreadable_error(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}")
