"""Fleets of simulated engines that the doctor is sent to, most with one mistake in them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from proxy.settings import Loaded, Settings
from proxy.sim.engine import SimulatedEngine
from proxy.tools.doctor.examination import Examination, ExaminationOptions
from proxy.tools.doctor.findings import Severity
from tests.deployment import engine_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from proxy.tools.doctor.findings import Finding

Options = dict[str, Any]
_QUICK = {"connect_seconds": 1.0, "prefill_seconds": 5.0, "handoff_seconds": 5.0, "first_token_seconds": 5.0}


@dataclass(frozen=True)
class Mistake:
    """`prefillers` and `decoders`: options of each engine, and `faults` of it. `check`, `severity` and `subject`, which
    is `P0`, `D1`, `P0 → D0` or `gateway`, are those of the finding that names it.
    """

    name: str
    check: str
    subject: str
    severity: Severity = Severity.FAILURE
    prefillers: Sequence[Options] = ({},)
    decoders: Sequence[Options] = ({},)
    engine: Options = field(default_factory=dict)
    connector: str = "vllm_pull"
    settings: Mapping[str, Any] = field(default_factory=dict)
    canary_seconds: float = 5.0
    places: Callable[[list[SimulatedEngine], list[SimulatedEngine]], Mapping[str, Any]] | None = None
    """Settings that depend on where the engines are."""


@dataclass
class Examined:
    """What the doctor has found, and what the engines are called in it."""

    findings: list[Finding]
    names: Mapping[str, str]
    """`P0` and so on, by the names of instances."""

    def subjects(self, least: Severity) -> set[tuple[str, str]]:
        """What was found of whom, if it is as bad as that."""
        return {(self.short(f.subject), f.check) for f in self.findings if f.severity >= least}

    def short(self, subject: str) -> str:
        """A finding's subject, in the words of a Mistake."""
        words = subject.removeprefix("prefill ").removeprefix("decode ")
        return " → ".join(self.names.get(word, word) for word in words.split(" → "))


async def examined(mistake: Mistake, store: Callable[[], Path]) -> Examined:
    """What the doctor finds."""
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
        found = await examine(Settings.model_validate(tree), canary_seconds=mistake.canary_seconds)
        return Examined(found, names)


async def examine(
    settings: Settings, *, progress: Callable[[str, int, int], None] = lambda *_: None, **options: Any
) -> list[Finding]:
    """What the doctor finds of instances that are there already."""
    given = {"canary_seconds": 5.0, "canary_tokens": 256, "idle_seconds": 0.05, **options}
    return await Examination(Loaded(settings, {}), ExaminationOptions(**given), progress=progress).run()


def _endpoint(engine: SimulatedEngine) -> str:
    return f"{engine.host}:{engine.port}" + (f" {engine.bootstrap_port}" if engine.bootstrap_port else "")


def web_server(**headers: str) -> web.Application:
    """Some server that answers every path alike."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<h1>It works</h1>", content_type="text/html", headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app
