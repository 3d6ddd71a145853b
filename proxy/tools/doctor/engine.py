"""Checks of single engines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proxy.balancer.incompatibilities import IncompatibilityKind
from proxy.balancer.recognition import EngineReport, find_connector_mismatch
from proxy.common.backend import Role
from proxy.common.terms import format_count
from proxy.connectors.releaser import KvTransfer, kv_pin_seconds
from proxy.tools.doctor.examined import IDLE_SECONDS, Examined, Fleet
from proxy.tools.doctor.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_SKEW_SECONDS: Final = 5.0

_HINTS: Final = {
    IncompatibilityKind.CONNECTOR: "start it with the same --kv-transfer-config as the other engines",
    IncompatibilityKind.ROLE: "configure it in the role that it was started for, or restart it in the configured role",
}
"""Hints for findings whose text contains none."""


def check_engines(fleet: Fleet) -> list[Finding]:
    """Return the findings of all checks in this group."""
    return [finding for engine in fleet.engines for check in ENGINE_CHECKS for finding in check(engine, fleet)]


def good_finding(engine: Examined) -> Finding:
    """Return the summary of an engine without findings."""
    identity, seconds = engine.facts.identity, min(s for s in engine.connects.values() if isinstance(s, float))
    told = [
        f"{identity.engine_kind or 'an engine'} {engine.version or ''}".strip(),
        ", ".join(sorted(identity.models)[:3]),
        f"{engine.facts.max_model_len} tokens" if engine.facts.max_model_len else "",
        " and ".join(identity.engine_setup.kv_connectors) if identity.engine_setup else "",
        f"connects in {1000 * seconds:.1f} ms",
    ]
    return Finding(Severity.OK, "engine", engine.subject, ", ".join(filter(None, told)))


def check_name(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the host name of the engine has addresses."""
    if engine.name_problem:
        yield Finding(
            Severity.FAILURE,
            "name",
            engine.subject,
            f"the host name does not resolve: {engine.name_problem}",
            "correct the host name or the DNS of this host; admin.networks lists the allowed networks",
        )


def check_connect(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that every address of the engine accepts connections."""
    dead = {address: told for address, told in engine.connects.items() if isinstance(told, str)}
    if not dead:
        return
    if not engine.is_reached:
        words = f"cannot connect ({next(iter(dead.values()))})"
        hint = "check that the engine runs at this host and port; a firewall that drops packets causes a time-out"
        yield Finding(Severity.FAILURE, "connect", engine.subject, words, hint)
        return
    for address, problem in dead.items():
        words = f"of its {len(engine.connects)} addresses {address} is dead ({problem})"
        hint = "remove the address from DNS: connection attempts to it waste time"
        yield Finding(Severity.WARNING, "address", engine.subject, words, hint)


def check_health(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the engine passes its health check."""
    path = fleet.settings.health.path
    if isinstance(engine.health, str) and engine.health:
        hint = "it accepts connections and does not respond: it may be loading or hung, or it is not an engine"
        yield Finding(Severity.FAILURE, "health", engine.subject, engine.health, hint)
    elif isinstance(engine.health, int) and engine.health != 200:
        words = f"{path} answered with status {engine.health}"
        hint = "the engine reports that it is unhealthy: see its log"
        if engine.health == 404:
            hint = "check health.path, and that an engine listens on that port"
        yield Finding(Severity.FAILURE, "health", engine.subject, words, hint)


def check_key(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the engine accepts its API key."""
    if engine.facts.identity.has_refused_key:
        severity = Severity.WARNING if fleet.keys.forwards_client_key else Severity.FAILURE
        yield Finding.of_text(severity, "key", engine.subject, fleet.keys.advice_after_401(engine.backend))


def check_models(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the engine's /v1/models lists a model."""
    if engine.models in ("", 401, 403) or engine.facts.identity.is_gateway:
        return
    hint = "check that this is the port of the engine's API server"
    if engine.models != 200:
        told = engine.models if isinstance(engine.models, str) else f"/v1/models answered with status {engine.models}"
        yield Finding(Severity.FAILURE, "models", engine.subject, told, hint)
    elif not engine.facts.identity.models:
        yield Finding(Severity.FAILURE, "models", engine.subject, "/v1/models lists no model", hint)
    elif engine.facts.identity.engine_kind is None:
        words = "/v1/models identifies neither vLLM nor SGLang"
        yield Finding(
            Severity.WARNING,
            "kind",
            engine.subject,
            words,
            "do not put a proxy in front of an engine: it hides health and load",
        )


def check_version(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the engine reports its version, from which pdproxy derives its features."""
    if engine.models == 200 and engine.version is None and engine.facts.identity.engine_kind == "vLLM":
        words = "does not report its version at /version"
        hint = "pdproxy does not use features of newer engines, such as releasing KV cache that no decoder fetches"
        yield Finding(Severity.WARNING, "version", engine.subject, words, hint)


def check_suits(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check connector, role and bootstrap port as far as the engine reports them, and that it is no gateway."""
    backend = engine.backend
    report = EngineReport(backend.role, backend.name, engine.facts.identity, backend.is_elastic)
    found = find_connector_mismatch(report, fleet.settings.connector, backend.bootstrap_port)
    if found is not None:
        kind, words = found
        yield Finding.of_text(Severity.FAILURE, kind.value, engine.subject, words, _HINTS.get(kind, ""))


def check_bootstrap(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that decoders can reach the bootstrap server of a prefiller."""
    if engine.bootstrap and not any(check_suits(engine, fleet)):
        hint = "decode instances connect to it there: pass the bootstrap port as `--prefill URL PORT`"
        yield Finding(Severity.FAILURE, "bootstrap", engine.subject, engine.bootstrap, hint)


def check_clock(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the engine's clock shows the time of this host."""
    ahead = engine.ahead_seconds
    if ahead is not None and abs(ahead) > _SKEW_SECONDS:
        words = f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's"
        hint = "run NTP on both hosts; otherwise log lines and traces of a request cannot be matched"
        yield Finding(Severity.WARNING, "clock", engine.subject, words, hint)


def check_keep_alive(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that connections to the engine can be used again."""
    if engine.keeps_alive is False:
        words = f"closes connections after each response, or after less than {IDLE_SECONDS:.1f} s without requests"
        hint = (
            "every request opens a new connection: check for a proxy in between, and the engine's keep-alive time-out"
        )
        yield Finding(Severity.WARNING, "keep-alive", engine.subject, words, hint)


def check_metrics(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that a decoder's /metrics count the origin of KV cache."""
    if (
        engine.models != 200
        or engine.backend.role is not Role.DECODE
        or not fleet.settings.connector_traits.takes_prefillers
    ):
        return
    if not engine.counts_prompts:
        words = (
            "/metrics is not available" if not engine.has_metrics else "/metrics does not count the origin of KV cache"
        )
        hint = "without it pdproxy cannot detect recomputed prompts: enable the engine's metrics"
        yield Finding(Severity.WARNING, "metrics", engine.subject, words, f"{hint} (SGLang: --enable-metrics)")


def check_limits(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the gateway sends at most as many requests as the engine runs."""
    admission, its = fleet.settings.admission, engine.facts.max_num_seqs
    for role, option, limit in (
        (Role.PREFILL, "admission.max_running_prefill", admission.max_running_prefill),
        (Role.DECODE, "admission.max_running_decode", admission.max_running_decode),
    ):
        if engine.backend.role is role and limit is not None and its is not None and limit > its:
            words = f"runs at most {its} requests at a time, but {option} allows {limit}"
            yield Finding(
                Severity.WARNING,
                "limit",
                engine.subject,
                words,
                f"remove {option}: pdproxy then uses the limit that the engine reports",
            )


def check_ranks(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the gateway addresses all data-parallel ranks of an engine."""
    balance, its = fleet.settings.balance, engine.facts.data_parallel_ranks
    for role, option, ranks in (
        (Role.PREFILL, "balance.prefill_dp_ranks", balance.prefill_dp_ranks),
        (Role.DECODE, "balance.decode_dp_ranks", balance.decode_dp_ranks),
    ):
        # With 1 the gateway names no rank, and the engine distributes the requests.
        if engine.backend.role is role and ranks > 1 and its is not None and its != ranks:
            result = "some ranks get no requests" if its > ranks else "the engine rejects requests to other ranks"
            words = f"has {format_count(its, 'data-parallel rank')}, but {option} is {ranks}: {result}"
            severity = Severity.WARNING if its > ranks else Severity.FAILURE
            yield Finding(severity, "ranks", engine.subject, words, f"set {option} to {its}")


def check_body_limit(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the longest prompt of an engine fits into a request body."""
    length, listen = engine.facts.max_model_len, fleet.settings.listen
    if length is None:
        return
    size = length * fleet.settings.cost.bytes_per_token
    if size > listen.max_body_bytes:
        words = f"accepts {length} tokens, about {size} bytes, but listen.max_body_bytes is {listen.max_body_bytes}"
        hint = "raise listen.max_body_bytes: longer bodies are rejected with 413"
        yield Finding(Severity.WARNING, "body", engine.subject, words, hint)


def check_lease(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that the engine keeps KV cache as long as the gateway assumes."""
    setup, believed = engine.facts.identity.engine_setup, fleet.settings.kv.pin_seconds
    its = None if setup is None else setup.lease_seconds
    if engine.backend.role is not Role.PREFILL or its is None:
        return
    if believed is not None and believed > its:
        words = f"keeps KV cache for {its:g} s until it is fetched, but kv.pin_seconds is {believed:g}"
        hint = "remove kv.pin_seconds or lower it: a late decode instance could fetch the KV cache of another request"
        yield Finding(Severity.FAILURE, "lease", engine.subject, words, hint)
    elif believed is None and its < (assumed := kv_pin_seconds(KvTransfer.NIXL, engine.facts.version)):
        words = f"keeps KV cache for {its:g} s until it is fetched, but pdproxy assumes {assumed:g} s"
        yield Finding(Severity.WARNING, "lease", engine.subject, words, f"set kv.pin_seconds to {its:g}")


def check_read_back(engine: Examined, fleet: Fleet) -> Iterator[Finding]:
    """Check that a decoder does not keep the KV cache of answers that no prefiller reads.

    vLLM `nixl/pull_scheduler.py` (0.32): with `bidirectional_kv_xfer`, `request_finished` of a decoder keeps the blocks
    for `decoder_kv_blocks_ttl` seconds, 480 by default. A prefiller without the option cannot read them.
    """
    if engine.backend.role is not Role.DECODE or not _is_bidirectional(engine):
        return
    settings = fleet.settings
    if settings.kv.read_back == "off" or not settings.connector_traits.reads_back:
        why = "pdproxy does not read it (kv.read_back, connector)"
    elif any(map(_is_bidirectional, fleet.of(Role.PREFILL))):
        return
    else:
        why = "no prefill instance has this option"
    yield Finding(
        Severity.WARNING,
        "read-back",
        engine.subject,
        f"keeps the KV cache of each answer for prefillers (bidirectional_kv_xfer), but {why}",
        "remove bidirectional_kv_xfer from its --kv-transfer-config, because the kept blocks are missing for requests, "
        "or set it for prefill instances, too",
    )


def _is_bidirectional(engine: Examined) -> bool:
    setup = engine.facts.identity.engine_setup
    return setup is not None and setup.has_bidirectional_kv


ENGINE_CHECKS: Final[tuple[Callable[[Examined, Fleet], Iterable[Finding]], ...]] = (
    check_name,
    check_connect,
    check_health,
    check_key,
    check_models,
    check_version,
    check_suits,
    check_bootstrap,
    check_clock,
    check_keep_alive,
    check_metrics,
    check_limits,
    check_ranks,
    check_body_limit,
    check_lease,
    check_read_back,
)
