"""Checks that compare engines with each other. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from proxy.balancer.models import minority_instances
from proxy.common.backend import Role
from proxy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from proxy.tools.doctor.examined import Examined, Fleet


def check_fleet(fleet: Fleet) -> list[Finding]:
    """Return the findings of all checks in this group."""
    return [finding for check in FLEET_CHECKS for finding in check(fleet)]


def check_same_models(fleet: Fleet) -> Iterator[Finding]:
    """Check that every engine serves a model that all roles serve."""
    told = {engine.backend: engine.serves for engine in fleet.engines if engine.backend.role is not Role.ENCODE}
    for backend, words in minority_instances(told).items():
        yield Finding.of_text(Severity.FAILURE, "model", f"{backend.role} {backend.name}", words)


def check_same_length(fleet: Fleet) -> Iterator[Finding]:
    """Check that the maximum sequence length is equal."""
    for engines in group_by_models(fleet.told):
        lengths = {engine: engine.facts.max_model_len for engine in engines if engine.facts.max_model_len}
        for engine, length, common in _find_deviating_engines(lengths):
            words = f"accepts {length} tokens (--max-model-len), but others accept {common}"
            hint = "a request that fits one engine is rejected by another: use the same limit everywhere"
            yield Finding(Severity.WARNING, "length", engine.subject, words, hint)


def check_same_version(fleet: Fleet) -> Iterator[Finding]:
    """Check that all versions are equal: KV cache may be incompatible between versions."""
    for engines in group_by_models(fleet.told):
        for engine, version, common in _odd_versions(engines):
            words = f"runs version {version}, but others run {common}"
            hint = "acceptable during an upgrade; KV cache and some features may be incompatible between versions"
            yield Finding(Severity.WARNING, "version", engine.subject, words, hint)


def check_same_connector(fleet: Fleet) -> Iterator[Finding]:
    """Check that all engines that report it use the same KV connector."""
    parts = {
        engine: " and ".join(setup.kv_connectors)
        for engine in fleet.told
        if (setup := engine.facts.identity.engine_setup) is not None and setup.kv_connectors
    }
    for engine, its, common in _find_deviating_engines(parts):
        words = f"runs {its}, but others run {common}"
        hint = "KV handoff between them is impossible: start all engines with the same --kv-transfer-config"
        yield Finding(Severity.FAILURE, "connector", engine.subject, words, hint)


def check_different_places(fleet: Fleet) -> Iterator[Finding]:
    """Check that no two instances are the same engine."""
    places: dict[object, Examined] = {}
    for engine in fleet.engines:
        setup = engine.facts.identity.engine_setup
        names: list[object] = [(address, engine.backend.port) for address in engine.addresses]
        if setup is not None and setup.engine_id is not None and setup.dp_size == 1:
            names.append(setup.engine_id)
        first = next((places[name] for name in names if name in places), None)
        for name in names:
            places.setdefault(name, engine)
        if first is not None:
            words = f"is the same engine as {first.subject}, by its address or its engine_id"
            hint = "configure each engine once, with a unique engine_id: decode instances locate KV cache by it"
            yield Finding(Severity.FAILURE, "duplicate", engine.subject, words, hint)


def check_same_process(fleet: Fleet) -> Iterator[Finding]:
    """Check by start and counters that no two instances at the same port are the same engine."""
    seen: dict[tuple[int, float, float | None], Examined] = {}
    for engine in fleet.told:
        setup = engine.facts.identity.engine_setup
        if engine.started_at is None or (setup is not None and setup.engine_id is not None):
            continue  # an engine_id is compared instead
        first = seen.setdefault((engine.backend.port, engine.started_at, engine.served_tokens), engine)
        if first is engine or set(engine.addresses) & set(first.addresses):
            continue
        words = f"seems to be the same engine as {first.subject}: same port, time of start, and number of tokens"
        hint = "configure each engine once: otherwise pdproxy believes that it has twice the room"
        # Engines that a script starts together may have equal times before their first request.
        severity = Severity.WARNING if engine.served_tokens else Severity.NOTE
        yield Finding(severity, "duplicate", engine.subject, words, hint)


def check_same_options(fleet: Fleet) -> Iterator[Finding]:
    """Check that engines of one role and model have the same options, as far as they report them."""
    for role in (Role.PREFILL, Role.DECODE):
        for engines in group_by_models([engine for engine in fleet.told if engine.backend.role is role]):
            flags = {flag: None for engine in engines for flag in engine.options}
            for flag in flags:
                values = {engine: engine.options[flag] for engine in engines if flag in engine.options}
                for engine, value, common in _find_deviating_engines(values):
                    words = (
                        f"has {flag} {_shorten_value(value)}, but other {role} instances have {_shorten_value(common)}"
                    )
                    hint = "start all instances of one role with the same options"
                    yield Finding(Severity.WARNING, "options", engine.subject, words, hint)


def _shorten_value(value: object) -> str:
    return "unset" if value in (None, "") else str(value)


def check_roles_are_filled(fleet: Fleet) -> Iterator[Finding]:
    """Check that each role has a healthy engine."""
    for role in (Role.PREFILL, Role.DECODE):
        engines = fleet.of(role)
        if engines and not any(engine.is_healthy for engine in engines):
            words = f"none of the {len(engines)} {role} instances is healthy"
            hint = "requests are rejected with 503 until one is healthy"
            yield Finding(Severity.FAILURE, "role", "gateway", words, hint)


def check_aliases(fleet: Fleet) -> Iterator[Finding]:
    """Check that every alias refers to a model that an engine serves."""
    served = {name for engine in fleet.told for name in engine.serves}
    if not served:
        return
    for alias in fleet.settings.models.aliases:
        said, _, meant = alias.rpartition("=")
        if meant not in served:
            words = f"models.aliases maps {said!r} to {meant!r}, which no engine serves"
            hint = f"engines serve {', '.join(map(repr, sorted(served)[:3]))}"
            yield Finding(Severity.FAILURE, "alias", "gateway", words, hint)


def group_by_models(engines: Iterable[Examined]) -> list[list[Examined]]:
    """Group engines by the models that they serve."""
    groups: dict[frozenset[str], list[Examined]] = {}
    for engine in engines:
        groups.setdefault(engine.serves, []).append(engine)
    return list(groups.values())


def _odd_versions(engines: Sequence[Examined]) -> Iterator[tuple[Examined, object, object]]:
    """Yield engines whose version differs from the most common one of their software, and both versions."""
    for kind in {engine.facts.identity.engine_kind for engine in engines}:
        of_kind = [engine for engine in engines if engine.facts.identity.engine_kind == kind]
        versions = {engine: engine.version for engine in of_kind if engine.version}
        yield from _find_deviating_engines(versions)


def _find_deviating_engines(values: Mapping[Examined, object]) -> Iterator[tuple[Examined, object, object]]:
    """Yield engines whose value differs from the most common one, and both values."""
    if len(set(values.values())) < 2:
        return
    common = Counter(values.values()).most_common(1)[0][0]
    yield from ((engine, value, common) for engine, value in values.items() if value != common)


FLEET_CHECKS: Final[tuple[Callable[[Fleet], Iterable[Finding]], ...]] = (
    check_same_models,
    check_same_length,
    check_same_version,
    check_same_connector,
    check_different_places,
    check_same_process,
    check_same_options,
    check_roles_are_filled,
    check_aliases,
)
