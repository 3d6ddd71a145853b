"""Dashboards and alerts in front of a real Prometheus, the gateway, and simulated engines under load and faults."""

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
from lab.test_observability.alerts import Watch, drive, empty_variables, look, missing_engine_metrics, outcome
from lab.test_observability.faults import BY_ITSELF, UNDER_LOAD, disturb
from lab.test_observability.picture import picture
from lab.test_observability.prometheus import RULES, Prometheus, prometheus
from lab.test_observability.site import Site, site

_WARM_SECONDS = 10.0
_DISTURBED_SECONDS = 6.0
_PATIENCE_SECONDS = 60.0
_SERVED = "sum(rate(pdproxy_time_to_first_token_seconds_count[5s])) > 2"


def promtool() -> bool:
    """Syntax, and the unit tests of the alerts."""
    rules = [str(RULES / name) for name in ("recording.yaml", "alerts.yaml")]
    commands = (["check", "rules", *rules], ["check", "config", str(RULES / "prometheus.yaml")])
    tests = ["test", "rules", str(RULES / "alerts_test.yaml")]
    ended = [subprocess.run(["promtool", *command], check=False).returncode for command in (*commands, tests)]
    return ended == [0] * len(ended)


async def run(workers: int, times: int, directory: Path, drawn: Path | None, only: str | None) -> list[str]:
    """One gateway of so many workers. Returns what is wrong."""
    problems: list[str] = []
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=None, connect=30.0)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        made = await stack.enter_async_context(site(directory, workers))
        asked = await stack.enter_async_context(prometheus(directory, made.jobs(), times, session))
        await stack.enter_async_context(made.clients.asking())
        if only != "alerts":
            began = time.time()
            await asyncio.sleep(_WARM_SECONDS)
            await disturb(made, _DISTURBED_SECONDS)
            await until_served(asked)
            shown = await look(asked, began, time.time())
            problems += [f"{one.title}: {problem}" for one in shown for problem in one.problems]
            problems += [f"there is nothing to choose for {name}" for name in await empty_variables(asked)]
            problems += [f"no engine has {name}" for name in await missing_engine_metrics(asked)]
            queries = sum(len(one.panel.queries) for one in shown)
            print(
                f"{workers} workers: {len(shown)} panels with {queries} queries, {len(problems)} problems", flush=True
            )
            if drawn is not None and not problems:
                drawn.write_text(picture(shown), encoding="utf-8")  # noqa: ASYNC240 a small file
                print(f"drawn: {drawn}")
        if only != "panels" and workers > 1:
            problems += await alerts(asked, made, times)
    return problems


async def until_served(asked: Prometheus) -> None:
    """Until there are answers again, so that panels of this moment have something to show."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and not await asked.now(_SERVED):  # noqa: ASYNC110 it is another process
        await asyncio.sleep(1.0)


async def alerts(asked: Prometheus, site: Site, times: int) -> list[str]:
    """All faults, and what became of the alerts."""
    watch = Watch(asked)
    began = time.time()
    problems = [*await asyncio.gather(drive(watch, site, UNDER_LOAD), drive(watch, site, BY_ITSELF))]
    await watch.until_quiet()
    told, wrong = await outcome(watch, began, (*UNDER_LOAD, *BY_ITSELF), times)
    print(aligned(told), flush=True)
    return [problem for some in problems for problem in some] + wrong


def main() -> None:
    """Ends with 1 if anything is wrong."""
    unwind_on_signals()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # engines are killed under their requests
    parser = argparse.ArgumentParser(prog="scripts/test-observability", description=__doc__)
    add = parser.add_argument
    add("--workers", default="1,3", help="of the gateway, one run for each (default: %(default)s); alerts with several")
    add("--times", type=int, default=60, help="by how much the times in the rules are shortened (default: %(default)s)")
    add("--only", choices=("panels", "alerts"), help="one half of it")
    add("--picture", metavar="FILE", help="draw some panels of the last run into this SVG")
    add("--keep", metavar="DIRECTORY", help="leave configurations, logs and Prometheus' data there")
    options = parser.parse_args()
    drawn = called_from() / options.picture if options.picture else None
    problems = [] if promtool() else ["promtool is not content"]
    with tempfile.TemporaryDirectory() as temporary:
        for workers in map(int, options.workers.split(",")):
            directory = Path(called_from() / options.keep if options.keep else temporary) / f"{workers}-workers"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            problems += uvloop.run(run(workers, options.times, directory.resolve(), drawn, options.only))
    for problem in problems:
        print(f"wrong: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
