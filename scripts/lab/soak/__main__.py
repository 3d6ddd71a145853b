"""Run clients during faults, and judge the result.

Exit code 1 if a client saw a failure or an invariant is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import uvloop

from lab.common.processes import called_from, clean_environment
from lab.soak.cluster import LIMITS, Cluster, started
from lab.soak.evidence import Answer, Evidence, Fault, Leg, Outcome, Sample, absences, log_lines
from lab.soak.faults import EVACUATE_AFTER_SECONDS, FaultInjector
from lab.soak.invariants import INVARIANTS, details, judged, table
from lab.soak.recorder import Recorder
from lab.soak.workload import request_number, workload

_WARM_UP_SECONDS = 5.0
_QUIET_SECONDS = 5.0
_SAMPLE_SECONDS = 1.0
_LAG_EVERY_SECONDS = 0.05
# Extra time of the clients, for the last fault and the answers after it.
_TAIL_SECONDS = 10.0


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        directory = called_from() / options.keep if options.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        evidence = uvloop.run(_soak(options, directory))
        _write_records(evidence, directory)
        verdicts = judged(evidence)
        tracebacks = [line for line in evidence.lines if line.get("traceback") or not line.get("logger")]
        if explained := details(evidence, verdicts):
            print(f"\n{explained}")
        for line in tracebacks[:3]:
            print(f"\nunexpected in the log: {line}")
        print(f"\n{table(evidence, verdicts)}")
        if options.explain:
            print("\n" + "\n".join(f"{invariant.name}: {invariant.how}" for invariant in INVARIANTS))
        if evidence.failures or any(verdicts.values()) or tracebacks:
            sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=60.0, help="duration of the faults (default: 60)")
    length.add_argument("--minutes", type=float, help="duration in minutes, for long runs")
    parser.add_argument(
        "--workers", type=int, default=1, help="workers of each gateway; several workers are killed, too (default: 1)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="gateways that share state by a store, which fails at times (default: 1)",
    )
    parser.add_argument(
        "--evacuation", action="store_true", help="evacuate engines during their answers, and roll them"
    )
    parser.add_argument("--elastic", action="store_true", help="move engines to the other role and back")
    parser.add_argument("--clients", type=int, default=48, help="concurrent requests (default: 48)")
    parser.add_argument("--engines", type=int, default=4, help="number of prefillers, and of decoders (default: 4)")
    parser.add_argument("--discovery", action="store_true", help="find engines by a file, which is invalid at times")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests and faults (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep logs and answers in this directory")
    parser.add_argument("--explain", action="store_true", help="print how each invariant is judged")
    options = parser.parse_args()
    if options.minutes is not None:
        options.seconds = 60 * options.minutes
    if not 5 <= options.seconds <= 24 * 3600 or not 1 <= options.workers <= 16 or not 1 <= options.clients <= 512:
        parser.error("--seconds must be 5 or more, --workers 1 to 16 and --clients 1 to 512")
    if not 1 <= options.replicas <= 8:
        parser.error("--replicas must be 1 to 8")
    if not 2 <= options.engines <= 16:
        parser.error("--engines must be 2 to 16: a single engine has no replacement")
    return options


async def _soak(options: argparse.Namespace, directory: Path) -> Evidence:
    # A signal is handled like an error, so that every process is stopped.
    soak = asyncio.current_task()
    assert soak is not None
    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, soak.cancel)
    requests = workload(options.seed)
    legs: list[Leg] = []
    samples: list[Sample] = []
    lag = _Lag()

    def sent_by_client(user: str) -> bytes | None:
        return requests[request_number(user)].body(user) if user.startswith("soak-") else None

    def watch(instance: str) -> Recorder:
        return Recorder(instance, legs.append, sent_by_client)

    answers = directory / "answers.jsonl"
    async with started(
        directory,
        options.workers,
        options.engines,
        watch,
        gateways=options.replicas,
        is_discovered=options.discovery,
        evacuate_after_seconds=EVACUATE_AFTER_SECONDS if options.evacuation or options.elastic else None,
        is_elastic=options.elastic,
    ) as cluster:
        injector = FaultInjector(
            cluster,
            options.seed,
            kills_workers=options.workers > 1,
            evacuates=options.evacuation,
            moves=options.elastic,
        )
        ports = ",".join(str(gateway.port) for gateway in cluster.gateways)
        async with _traffic(ports, str(options.seed), str(options.clients), str(answers)) as traffic:
            _print("a few seconds without faults")
            await traffic.ask(_WARM_UP_SECONDS)
            await asyncio.sleep(_QUIET_SECONDS)
            base = await cluster.sample()
            # The task group raises the first error instead of the cancellation of the clients.
            async with asyncio.TaskGroup() as group:
                looking = [group.create_task(lag.keep_looking()), group.create_task(_keep_sampling(cluster, samples))]
                asking = group.create_task(traffic.ask(options.seconds + _TAIL_SECONDS))
                await injector.run_for(options.seconds, _print_fault)
                await asking
                await asyncio.sleep(_QUIET_SECONDS)
                for task in looking:
                    task.cancel()
            rest = await cluster.sample()
            engines = {engine.name: await cluster.state(engine) for engine in cluster.engines}
    lines = [line for gateway in cluster.gateways for line in log_lines(gateway.text())]
    workers = options.workers * options.replicas
    down = absences(lines, rest.at) if workers == 1 else []
    return Evidence(
        limits=LIMITS.of_workers(workers),
        answers=[_answer(line) for line in answers.read_bytes().splitlines()],
        lines=lines,
        legs=legs,
        faults=injector.faults,
        absences=[*injector.changes.absences, *down],
        samples=samples,
        base=base,
        rest=rest,
        engines=engines,
        judges_lag_seconds=lag.worst_seconds,
    )


class _Lag:
    """Measures the delay of this process's event loop."""

    def __init__(self) -> None:
        self.worst_seconds = 0.0

    async def keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_SECONDS
            await asyncio.sleep(_LAG_EVERY_SECONDS)
            self.worst_seconds = max(self.worst_seconds, loop.time() - due)


class _Traffic:
    """The process of the clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, seconds: float) -> None:
        """Let the clients send requests for a time, and wait for the last answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        await self.expect("rest")

    async def expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if (await self._process.stdout.readline()).strip() != word.encode():
            sys.exit("the clients failed")


@asynccontextmanager
async def _traffic(*words: str) -> AsyncIterator[_Traffic]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lab.soak.traffic", *words),
        env=clean_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        traffic = _Traffic(process)
        await traffic.expect("ready")
        yield traffic
    finally:
        process.terminate()
        await process.wait()


async def _keep_sampling(cluster: Cluster, samples: list[Sample]) -> None:
    while True:
        samples.append(await cluster.sample())
        await asyncio.sleep(_SAMPLE_SECONDS)


def _write_records(evidence: Evidence, directory: Path) -> None:
    """Write the records that are not in the directory yet."""
    for name, values in (("legs", evidence.legs), ("faults", evidence.faults), ("absences", evidence.absences)):
        (directory / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(value) + b"\n" for value in values))
    sizes = "".join(f"{s.at:.1f} {s.rss_bytes} {s.fds}\n" for s in (evidence.base, *evidence.samples, evidence.rest))
    (directory / "sizes").write_text(sizes)


def _answer(line: bytes) -> Answer:
    values = orjson.loads(line)
    return Answer(**{**values, "outcome": Outcome(values["outcome"])})


def _print_fault(fault: Fault) -> None:
    seconds = fault.ended - fault.began
    _print(f"{fault.kind}: {fault.target}, {seconds:.1f} s{'' if fault.is_healed else ', NOT HEALED'}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
