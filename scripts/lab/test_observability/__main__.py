"""Test dashboards and alerts in a real Prometheus, with simulated engines under load and faults."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import uvloop

from lab.common.output import aligned
from lab.common.processes import called_from, unwind_on_signals
from lab.test_observability.alerts import (
    RULES,
    AlertWatch,
    Prometheus,
    drive,
    empty_variables,
    look,
    missing_engine_metrics,
    outcome,
    prometheus,
)
from lab.test_observability.faults import IDLE, UNDER_LOAD, a_decoder_has_no_kv_connector, disturb
from lab.test_observability.picture import picture
from lab.test_observability.site import Site, site

_WARM_SECONDS = 10.0
_DISTURBED_SECONDS = 6.0
_PATIENCE_SECONDS = 60.0
_IS_INCOMPATIBLE = "pdproxy_instance_misfit == 1"
_SERVED = "sum(rate(pdproxy_time_to_first_token_seconds_count[5s])) > 2"


def promtool() -> bool:
    """Return whether the rules are valid, and pass their unit tests."""
    rules = [str(RULES / name) for name in ("recording.yaml", "alerts.yaml")]
    commands = (["check", "rules", *rules], ["check", "config", str(RULES / "prometheus.yaml")])
    tests = ["test", "rules", str(RULES / "alerts_test.yaml")]
    ended = [subprocess.run(["promtool", *command], check=False).returncode for command in (*commands, tests)]
    return ended == [0] * len(ended)


async def run(workers: int, times: int, directory: Path, picture_file: Path | None, only: str | None) -> list[str]:
    """Test with one gateway of `workers` workers. Return the problems."""
    problems: list[str] = []
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=None, connect=30.0)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        test_site = await stack.enter_async_context(site(directory, workers))
        prometheus_server = await stack.enter_async_context(prometheus(directory, test_site.jobs(), times, session))
        await stack.enter_async_context(test_site.clients.asking())
        if only != "alerts":
            began = time.time()
            await asyncio.sleep(_WARM_SECONDS)
            await disturb(test_site, _DISTURBED_SECONDS)
            async with a_decoder_has_no_kv_connector(test_site):  # a panel shows what is incompatible now
                await asyncio.sleep(2 * _DISTURBED_SECONDS)
                for expr in (_SERVED, _IS_INCOMPATIBLE):
                    await until_any(prometheus_server, expr)
                shown = await look(prometheus_server, began, time.time())
            problems += [f"{one.title}: {problem}" for one in shown for problem in one.problems]
            problems += [f"variable {name} has no values" for name in await empty_variables(prometheus_server)]
            problems += [f"no engine has the metric {name}" for name in await missing_engine_metrics(prometheus_server)]
            queries = sum(len(one.panel.queries) for one in shown)
            print(
                f"{workers} workers: {len(shown)} panels with {queries} queries, {len(problems)} problems", flush=True
            )
            if picture_file is not None and not problems:
                picture_file.write_text(picture(shown), encoding="utf-8")  # noqa: ASYNC240 a small file
                print(f"picture: {picture_file}")
        if only != "panels" and workers > 1:
            problems += await alerts(prometheus_server, test_site, times)
    return problems


async def until_any(prometheus_server: Prometheus, expr: str) -> None:
    """Wait until a query has a result, so that panels have current data. On a busy machine that takes longer."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and not await prometheus_server.now(expr):  # noqa: ASYNC110 Prometheus is another process
        await asyncio.sleep(1.0)


async def alerts(prometheus_server: Prometheus, site: Site, times: int) -> list[str]:
    """Cause all faults, and judge the alerts."""
    watch = AlertWatch(prometheus_server)
    began = time.time()
    problems = [*await asyncio.gather(drive(watch, site, UNDER_LOAD), drive(watch, site, IDLE))]
    await watch.until_quiet()
    table, wrong = await outcome(watch, began, (*UNDER_LOAD, *IDLE), times)
    print(aligned(table), flush=True)
    return [problem for some in problems for problem in some] + wrong


def main() -> None:
    """Run the test. Exits with 1 if there are problems."""
    unwind_on_signals()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # killed engines log errors
    parser = argparse.ArgumentParser(prog="scripts/test-observability", description=__doc__)
    add = parser.add_argument
    add(
        "--workers",
        default="1,3",
        help="workers of the gateway, one run for each number; alerts need several (default: %(default)s)",
    )
    add("--times", type=int, default=60, help="factor by which times in the rules are shortened (default: %(default)s)")
    add("--only", choices=("panels", "alerts"), help="run only one half")
    add("--picture", metavar="FILE", help="draw some panels of the last run into this SVG")
    add("--keep", metavar="DIRECTORY", help="keep configurations, logs and Prometheus' data in this directory")
    options = parser.parse_args()
    picture_file = called_from() / options.picture if options.picture else None
    problems = [] if promtool() else ["promtool found errors"]
    with tempfile.TemporaryDirectory() as temporary:
        for workers in map(int, options.workers.split(",")):
            directory = Path(called_from() / options.keep if options.keep else temporary) / f"{workers}-workers"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            problems += uvloop.run(run(workers, options.times, directory.resolve(), picture_file, options.only))
    for problem in problems:
        print(f"wrong: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
