"""Compares a running fleet with its topology: the doctor asks the engines, and these checks extend the doctor's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proxy.settings import LoadedSettings, canonical_host, load_settings
from proxy.tools.doctor.examination import Examination, ExaminationOptions
from proxy.tools.doctor.examined import IDLE_SECONDS, Examined, Fleet
from proxy.tools.doctor.findings import Finding, Severity
from proxy.tools.launch.gateway import NAME, gateway_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from proxy.tools.launch.plan import Launch, Plan

_LENGTHS: Final = ("max-model-len", "context-length")


async def compare_with_engines(
    plan: Plan,
    loaded: LoadedSettings,
    *,
    idle_seconds: float = IDLE_SECONDS,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[Finding]:
    """Return the differences between engines and topology, and the doctor's findings, without generating any text.

    `idle_seconds` and `progress` are those of an Examination.
    """
    options = ExaminationOptions(canary_seconds=0.0, canary_tokens=0, canaries_per_pair=0, idle_seconds=idle_seconds)
    examination = Examination(loaded, options, more=lambda fleet: find_differences(plan, fleet), progress=progress)
    return await examination.run()


def load_gateway(plan: Plan, environ: Mapping[str, str], directory: Path) -> LoadedSettings:
    """Return the settings of the rendered gateway, with the environment's values such as the key of engines.

    Raises SettingsError. `directory`: start of relative paths, such as those of keys.
    """
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / NAME
        file.write_text(gateway_file(plan), encoding="utf-8")
        return load_settings(["--config", str(file)], environ, paths_begin=directory)


def find_differences(plan: Plan, fleet: Fleet) -> Iterator[Finding]:
    """Yield the differences between the engines' reports and the topology."""
    launches = {
        (canonical_host(launch.node.address), port): launch for launch in plan.launches for port in launch.endpoints
    }
    for engine in fleet.told:
        launch = launches.get((canonical_host(engine.backend.host), engine.backend.port))
        if launch is not None:
            yield from (finding for check in CHECKS for finding in check(engine, launch, plan))
    silent = [engine for engine in fleet.told if not _reports_role(engine)]
    if silent and "both" not in plan.topology.roles:
        words = f"{len(silent)} of {len(fleet.engines)} engines do not tell role and connector"
        yield Finding(Severity.NOTE, "role", "fleet", words, "vLLM reports them with VLLM_SERVER_DEV_MODE=1")


def check_model(engine: Examined, launch: Launch, plan: Plan) -> Iterator[Finding]:
    """Check that the engine serves the topology's model."""
    models, name = engine.facts.identity.models, plan.topology.name
    if models and name not in models:
        words = f"serves {', '.join(map(repr, sorted(models)[:3]))}, and the topology says {name!r}"
        yield Finding(Severity.FAILURE, "model", engine.subject, words, "start it by its node's script")


def check_length(engine: Examined, launch: Launch, plan: Plan) -> Iterator[Finding]:
    """Check the engine's maximum length of sequences."""
    options = plan.topology.options_of(launch.role)
    wanted, its = next((options[flag] for flag in _LENGTHS if flag in options), None), engine.facts.max_model_len
    if isinstance(wanted, int) and its is not None and its != wanted:
        words = f"takes {its} tokens, and the topology says {wanted}"
        yield Finding(Severity.WARNING, "length", engine.subject, words, "start it by its node's script")


def check_version(engine: Examined, launch: Launch, plan: Plan) -> Iterator[Finding]:
    """Check that the engine has the version of the topology."""
    wanted = plan.topology.version
    if wanted is not None and engine.version is not None and not _is_of_version(engine.version, wanted):
        words = f"is version {engine.version}, and the topology says {wanted}"
        yield Finding(Severity.WARNING, "version", engine.subject, words, "change one of them")


def check_connector(engine: Examined, launch: Launch, plan: Plan) -> Iterator[Finding]:
    """Check that the engine has the fleet's connector for KV cache."""
    setup, wanted = engine.facts.identity.engine_setup, plan.topology.connector
    if setup is not None and setup.kv_connectors and wanted is not None and wanted not in setup.kv_connectors:
        words = f"runs {' and '.join(setup.kv_connectors)}, and the topology says {wanted}"
        yield Finding(Severity.FAILURE, "connector", engine.subject, words, "start it by its node's script")


def check_ranks(engine: Examined, launch: Launch, plan: Plan) -> Iterator[Finding]:
    """Check the engine's number of data-parallel ranks."""
    setup, dp = engine.facts.identity.engine_setup, launch.part.dp
    # an engine that reports nothing has 1
    if setup is not None and setup.dp_size not in (1, dp):
        words = f"is one of {setup.dp_size} data-parallel ranks, and the topology says {dp}"
        yield Finding(Severity.FAILURE, "ranks", engine.subject, words, "start its whole group again")


CHECKS: Final[tuple[Callable[[Examined, Launch, Plan], Iterable[Finding]], ...]] = (
    check_model,
    check_length,
    check_version,
    check_connector,
    check_ranks,
)


def _reports_role(engine: Examined) -> bool:
    setup = engine.facts.identity.engine_setup
    return setup is not None and (setup.kv_role is not None or setup.disaggregation_mode is not None)


def _is_of_version(version: str, wanted: str) -> bool:
    """Return whether a version begins with the given one: 0.20 matches 0.20.1 and 0.20rc1, but not 0.201."""
    rest = version.removeprefix("v").removeprefix(wanted.removeprefix("v"))
    return rest != version.removeprefix("v") and not rest[:1].isdigit()
