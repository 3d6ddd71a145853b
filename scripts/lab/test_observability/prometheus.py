"""Prometheus, with the rules of configs/prometheus in which every time is shortened, and its HTTP API."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from lab.common.processes import HOST, Program, quiet_ports

RULES: Final = Path("configs/prometheus")
SCRAPE_SECONDS: Final = 1.0
_EVALUATE: Final = "500ms"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}
_TIME: Final = re.compile(
    r"(?<=\[)(\d+)([smh])(?=\])|(?<=for: )(\d+)([smh])$|(?<=interval: )(\d+)([smh])$", re.MULTILINE
)

Point = tuple[float, float]


def shortened(rules: str, times: int) -> str:
    """The same rules, with ranges, waits and intervals that are so many times shorter."""

    def shorter(found: re.Match[str]) -> str:
        number, unit = (group for group in found.groups() if group is not None)
        return f"{int(number) * _UNITS[unit] * 1000 // times}ms"

    return _TIME.sub(shorter, rules)


class Series(dict[str, str]):
    """The labels of a series, and what it was when."""

    def __init__(self, labels: Mapping[str, str], points: Sequence[Point]) -> None:
        super().__init__(labels)
        self.points = points


class Prometheus:
    """The running program."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{HOST}:{port}/api/v1"
        self._session = session

    async def now(self, expr: str) -> list[Series]:
        """What a query gives at this moment."""
        found = await self._get("query", query=expr)
        if found["resultType"] == "scalar":
            return [Series({}, [_point(found["result"])])]
        return [Series(one["metric"], [_point(one["value"])]) for one in found["result"]]

    async def over(self, expr: str, began: float, ended: float, step_seconds: float = 1.0) -> list[Series]:
        """What it gave from one time to another."""
        found = await self._get("query_range", query=expr, start=began, end=ended, step=step_seconds)
        return [Series(one["metric"], [_point(point) for point in one["values"]]) for one in found["result"]]

    async def names(self) -> set[str]:
        """Of all series there are."""
        return set(await self._get("label/__name__/values"))

    async def _get(self, path: str, **query: object) -> Any:
        """Raises ValueError with what Prometheus says of a query that it does not understand."""
        async with self._session.get(f"{self._url}/{path}", params={k: str(v) for k, v in query.items()}) as response:
            answer = await response.json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]


def _point(told: Sequence[Any]) -> Point:
    return float(told[0]), float(told[1])


@asynccontextmanager
async def prometheus(
    directory: Path, jobs: Mapping[str, Sequence[str]], times: int, session: aiohttp.ClientSession
) -> AsyncIterator[Prometheus]:
    """Scrapes these jobs' targets. Its data and its log are in the directory."""
    files = []
    for name in ("recording.yaml", "alerts.yaml"):
        files.append(directory / name)
        files[-1].write_text(shortened((RULES / name).read_text(encoding="utf-8"), times), encoding="utf-8")
    configuration = {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS:g}s",
            "scrape_timeout": f"{SCRAPE_SECONDS:g}s",
            "evaluation_interval": _EVALUATE,
        },
        "rule_files": [file.name for file in files],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }
    # JSON is YAML, too.
    (directory / "prometheus.yaml").write_text(json.dumps(configuration), encoding="utf-8")
    (port,) = quiet_ports(1)
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={HOST}:{port}",
        "--log.level=warn",
    ]
    program = Program(
        name="prometheus", command=command, port=port, output=directory / "prometheus.log", ready_path="/-/ready"
    )
    with program:
        yield Prometheus(port, session)
