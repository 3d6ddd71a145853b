"""Fleets of simulated engines for the doctor, most of them with one mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from proxy.settings import LoadedSettings, Settings
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.examination import Examination, ExaminationOptions
from proxy.tools.doctor.findings import Finding, Severity
from tests.deployment import engine_options

Options = dict[str, Any]
_QUICK = {"connect_seconds": 1.0, "prefill_seconds": 5.0, "handoff_seconds": 5.0, "first_token_seconds": 5.0}


@dataclass(frozen=True)
class Mistake:
    """A fleet with one mistake, and the finding that the doctor must report."""

    name: str
    check: str
    """Check of the finding."""
    subject: str
    """Subject of the finding: `P0`, `D1`, `P0 → D0` or `gateway`."""
    severity: Severity = Severity.FAILURE
    """Severity of the finding."""
    prefillers: Sequence[Options] = ({},)
    """Options of each prefiller, with its `faults`."""
    decoders: Sequence[Options] = ({},)
    engine: Options = field(default_factory=dict)
    connector: str = "vllm_pull"
    settings: Mapping[str, Any] = field(default_factory=dict)
    canary_seconds: float = 5.0
    canary_tokens: int = 256
    places: Callable[[list[SimulatedEngine], list[SimulatedEngine]], Mapping[str, Any]] | None = None
    """Returns settings that depend on the addresses of the engines."""


@dataclass
class Examined:
    """The findings of the doctor, and short names of the engines."""

    findings: list[Finding]
    names: Mapping[str, str]
    """Short names, such as `P0`, by the names of instances."""

    def subjects(self, least: Severity) -> set[tuple[str, str]]:
        """Return subject and check of each finding with at least this severity."""
        return {(self.short(f.subject), f.check) for f in self.findings if f.severity >= least}

    def short(self, subject: str) -> str:
        """Return a finding's subject with the short names of a Mistake."""
        words = subject.removeprefix("prefill ").removeprefix("decode ")
        return " → ".join(self.names.get(word, word) for word in words.split(" → "))


async def examined(mistake: Mistake, store: Callable[[], Path]) -> Examined:
    """Run a fleet with a mistake, and let the doctor examine it."""
    async with AsyncExitStack() as stack:
        options = {**engine_options(mistake.connector, store), **mistake.engine}
        both: dict[str, list[SimulatedEngine]] = {"prefill": [], "decode": []}
        for role, engines in (("prefill", mistake.prefillers), ("decode", mistake.decoders)):
            for own in engines:
                own = dict(own)
                faults = own.pop("faults", ())
                sim_role = "both" if mistake.connector == "plain" else role
                engine = SimulatedEngine(**{"role": sim_role, **options, **own})
                for fault in faults:
                    engine.faults.add(**fault)
                both[role].append(await stack.enter_async_context(engine))
        prefillers, decoders = both["prefill"], both["decode"]
        tree: dict[str, Any] = {
            "prefill": [_endpoint(engine) for engine in prefillers],
            "decode": [_endpoint(engine) for engine in decoders],
            "connector": mistake.connector,
            "timeouts": _QUICK,
            "layerwise": {"host": "127.0.0.1"},
            "listen": {"port": 0},
            **mistake.settings,
        }
        tree |= mistake.places(prefillers, decoders) if mistake.places is not None else {}
        names = {f"{e.host}:{e.port}": f"P{i}" for i, e in enumerate(prefillers)}
        names |= {f"{e.host}:{e.port}": f"D{i}" for i, e in enumerate(decoders)}
        names |= {f"127.0.0.2:{e.port}": f"P{i} by another address" for i, e in enumerate(prefillers)}
        found = await examine(
            Settings.model_validate(tree), canary_seconds=mistake.canary_seconds, canary_tokens=mistake.canary_tokens
        )
        return Examined(found, names)


async def examine(
    settings: Settings, *, progress: Callable[[str, int, int], None] = lambda *_: None, **options: Any
) -> list[Finding]:
    """Let the doctor examine instances that run already."""
    given = {"canary_seconds": 5.0, "canary_tokens": 256, "idle_seconds": 0.05, **options}
    return await Examination(LoadedSettings(settings, {}), ExaminationOptions(**given), progress=progress).run()


def _endpoint(engine: SimulatedEngine) -> str:
    return f"{engine.host}:{engine.port}" + (f" {engine.bootstrap_port}" if engine.bootstrap_port else "")


def web_server(**headers: str) -> web.Application:
    """Return a web server that gives the same answer for every path."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<h1>It works</h1>", content_type="text/html", headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app
