"""Flags of vllm-router, sglang-router and smg, and first guesses at the command line.

A flag with the same meaning here is accepted. Any other flag that is known gets an error that names what to use.

Sources: `router_args.py` of vllm-router 0.1.17, of sglang-router 0.3.2, and of smg (bindings/python/src/smg).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.settings.mistakes import SettingsError, join_alternatives, printable_word, suggest_known_word
from proxy.settings.sources import OPTIONS, variable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class AcceptedFlag:
    """A flag of another router with the same meaning as some of pdproxy's options."""

    options: tuple[str, ...]
    """Names of the options that the flag sets."""
    convert: Callable[[str], object] = str
    """Returns the value of the options for a value of the flag. Raises ValueError."""
    nargs: str | None = None
    """Number of values, as in argparse. None: one value."""
    constant_value: object = None
    """Value of the options for a flag without a value; None: the flag takes values."""

    def convert_value(self, flag: str, given: str | list[str] | bool) -> object:
        """Return the options' value for the flag's value. Raises SettingsError, which names the flag.

        Args:
            flag: Name of the flag.
            given: Result of argparse: a value, several values, or True for a flag without a value.
        """
        if isinstance(given, bool):
            return self.constant_value
        try:
            return self.convert(given) if isinstance(given, str) else [self.convert(word) for word in given]
        except ValueError as error:
            raise SettingsError(f"{flag} {error}") from None


def _milliseconds_to_seconds(milliseconds: str) -> float:
    try:
        return float(milliseconds) / 1000
    except ValueError:
        raise ValueError(f"must be a number of milliseconds, not {printable_word(milliseconds)}") from None


def _translate_kv_connector(kv_connector: str) -> str:
    try:
        return {"nixl": "vllm_pull", "mooncake": "mooncake_bootstrap"}[kv_connector]
    except KeyError:
        raise ValueError(f"must be nixl or mooncake, not {printable_word(kv_connector)}") from None


WORKERS_FLAG: Final = "--worker-urls"
"""The flag for engines that both prefill and decode."""

# A later flag overrides an earlier one: the connector of --kv-connector is more precise than that of the switch.
ACCEPTED_FLAGS: Final[Mapping[str, AcceptedFlag]] = {
    "--pd-disaggregation": AcceptedFlag(("connector",), constant_value="sglang_bootstrap"),
    "--vllm-pd-disaggregation": AcceptedFlag(("connector",), constant_value="vllm_pull"),
    "--kv-connector": AcceptedFlag(("connector",), _translate_kv_connector),
    "--intra-node-data-parallel-size": AcceptedFlag(("balance.prefill_dp_ranks", "balance.decode_dp_ranks")),
    "--queue-size": AcceptedFlag(("admission.max_waiting",)),
    "--queue-timeout-secs": AcceptedFlag(("admission.wait_seconds",)),
    "--max-payload-size": AcceptedFlag(("listen.max_body_bytes",)),
    "--cors-allowed-origins": AcceptedFlag(("listen.cors_origins",), nargs="*"),
    "--health-check-endpoint": AcceptedFlag(("health.path",)),
    "--health-check-interval-secs": AcceptedFlag(("health.interval_seconds",)),
    "--health-check-timeout-secs": AcceptedFlag(("health.timeout_seconds",)),
    "--health-failure-threshold": AcceptedFlag(("health.fall",)),
    "--health-success-threshold": AcceptedFlag(("health.rise",)),
    "--cb-failure-threshold": AcceptedFlag(("health.eject_after",)),
    "--cb-timeout-duration-secs": AcceptedFlag(("health.eject_seconds",)),
    "--retry-max-retries": AcceptedFlag(("retry.max_attempts",)),
    "--retry-initial-backoff-ms": AcceptedFlag(("retry.base_delay_seconds",), _milliseconds_to_seconds),
    "--retry-max-backoff-ms": AcceptedFlag(("retry.max_delay_seconds",), _milliseconds_to_seconds),
    "--disable-retries": AcceptedFlag(("retry.max_attempts",), constant_value=1),
    "--shutdown-grace-period-secs": AcceptedFlag(("drain.streams_seconds",)),
    "--log-json": AcceptedFlag(("log.format",), constant_value="json"),
    # smg, sglang-router, and vLLM itself
    **dict.fromkeys(
        ("--server-cert-path", "--tls-cert-path", "--ssl-certfile"), AcceptedFlag(("listen.tls_certificate",))
    ),
    **dict.fromkeys(("--server-key-path", "--tls-key-path", "--ssl-keyfile"), AcceptedFlag(("listen.tls_key",))),
    "--ssl-ca-certs": AcceptedFlag(("listen.tls_client_ca",)),
    "--client-cert-path": AcceptedFlag(("engines.client_certificate",)),
    "--client-key-path": AcceptedFlag(("engines.client_key",)),
}
"""Flags of other routers, and of vLLM's server, that pdproxy accepts."""


def _same_advice_for_all(flags: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(flags.split(), advice)


_ENGINE_FLAGS_ADVICE: Final = "it is a flag of engines: leave it out"
_NO_COUNTERPART_ADVICE: Final = "it has no counterpart: leave it out"

ADVICE_BY_FLAG: Final[Mapping[str, str]] = {
    "--ca-cert-paths": "set engines.ca_file to one file with all certificates",
    "--api-key": "set the keys of clients in auth.client_keys_file, and the key of engines in OPENAI_API_KEY",
    **_same_advice_for_all(
        "--cache-threshold --balance-abs-threshold --balance-rel-threshold --max-tree-size --eviction-interval-secs"
        " --max-idle-secs --assignment-mode --bucket-adjust-interval-secs --router-temperature --kv-penalty-host"
        " --kv-penalty-disk --kv-penalty-external --kv-aware-session-affinity-ttl-secs --load-monitor-interval"
        " --enable-program-scheduling --program-scheduling-config-json",
        "it is not needed: policy least_load weighs load against cached prefixes without thresholds",
    ),
    **_same_advice_for_all(
        "--kv-event-source --kv-event-replay-source --kv-event-block-size --kv-event-model --pd-kv-events",
        "set kv_events.endpoint to auto",
    ),
    **_same_advice_for_all(
        "--cb-success-threshold --cb-window-duration-secs --disable-circuit-breaker --disable-health-check",
        "it has no counterpart: see the options of section health",
    ),
    **_same_advice_for_all(
        "--retry-backoff-multiplier --retry-jitter-factor",
        "it has no counterpart: the delay doubles, with full jitter",
    ),
    **_same_advice_for_all(
        "--max-concurrent-requests", "set admission.max_running_prefill and admission.max_running_decode"
    ),
    **_same_advice_for_all(
        "--rate-limit-tokens-per-second", "set requests_per_minute of a key in auth.client_keys_file"
    ),
    **_same_advice_for_all("--request-timeout-secs", "set timeouts.answer_seconds and timeouts.idle_seconds"),
    **_same_advice_for_all("--request-id-headers", "it is not needed: pdproxy reads and returns X-Request-Id"),
    **_same_advice_for_all("--log-dir", "it is not needed: pdproxy writes its log to standard output"),
    **_same_advice_for_all(
        "--prometheus-host --prometheus-port --prometheus-duration-buckets",
        "it is not needed: GET /metrics is on the client port, or on admin.port",
    ),
    **_same_advice_for_all(
        "--enable-trace --otlp-traces-endpoint", "set tracing.endpoint to the OTLP/HTTP URL of the collector"
    ),
    **_same_advice_for_all(
        "--service-discovery --selector --service-discovery-port --service-discovery-namespace --prefill-selector"
        " --decode-selector --bootstrap-port-annotation",
        "set kubernetes.prefill_selector and kubernetes.decode_selector, which select EndpointSlices",
    ),
    **_same_advice_for_all(
        "--vllm-discovery-address", "set discovery.files, discovery.prefill_dns or kubernetes.prefill_selector"
    ),
    **_same_advice_for_all(
        "--worker-startup-timeout-secs --worker-startup-check-interval",
        "it is not needed: an instance receives requests as soon as it is healthy",
    ),
    **_same_advice_for_all("--dp-aware", "set balance.prefill_dp_ranks and balance.decode_dp_ranks, or sglang.dp_size"),
    **_same_advice_for_all("--enable-igw --model", "it is not needed: pdproxy asks the engines for their models"),
    **_same_advice_for_all("--served-model-name", "set models.aliases"),
    **_same_advice_for_all("--mini-lb --backend", "it is not needed: leave it out"),
    **_same_advice_for_all("--root-path", "it is not needed: let the reverse proxy remove the prefix"),
    **_same_advice_for_all(
        "--model-path --tokenizer-path --chat-template --reasoning-parser --tool-call-parser --kv-transfer-config"
        " --tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1 --tokenizer-cache-l0-max-entries"
        " --tokenizer-cache-l1-max-memory --tensor-parallel-size --data-parallel-size --max-model-len",
        _ENGINE_FLAGS_ADVICE,
    ),
    **_same_advice_for_all(
        "--mcp-config-path --history-backend --oracle-wallet-path --oracle-tns-alias --oracle-connect-descriptor"
        " --oracle-username --oracle-password --oracle-external-auth --oracle-pool-min --oracle-pool-max"
        " --oracle-pool-timeout-secs --postgres-db-url --postgres-pool-max --redis-pool-max --redis-retention-days"
        " --storage-hook-wasm-path --wasm-middleware --wasm-middleware-route --wasm-middleware-sha256 --jwt-issuer"
        " --jwt-audience --jwt-jwks-uri --jwt-role-mapping",
        _NO_COUNTERPART_ADVICE,
    ),
    **_same_advice_for_all(
        "--redis-url", "set replicas.url to share loads between gateways; pdproxy stores no conversations"
    ),
    **_same_advice_for_all(
        "--control-plane-api-keys --control-plane-audit-enabled",
        "set auth.admin_key_file; pdproxy logs every administrative request",
    ),
}
"""Known flags of other routers without a counterpart, each with advice."""

_COMMAND_GUESSES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("start", "run", "up", "router", "gateway", "server", "launch_router"), "serve"),
    **dict.fromkeys(("validate", "check", "test", "lint"), "check-config"),
    **dict.fromkeys(("config", "show-config", "dump-config", "show"), "print-config"),
    **dict.fromkeys(("status", "stats", "ps"), "top"),
    **dict.fromkeys(("ping", "healthcheck", "livez"), "health"),
    **dict.fromkeys(("restart", "rollout", "rolling-restart"), "roll"),
    **dict.fromkeys(("diagnose", "debug", "verify"), "doctor"),
    **dict.fromkeys(("mock", "simulate", "sim"), "mock-engine"),
    "completions": "completion",
}


def describe_unknown_command(word: str, commands: Iterable[str]) -> str:
    """Return a sentence about a word that is no command."""
    known = list(commands)
    suggestion = suggest_known_word(word, known)
    if guess := _COMMAND_GUESSES.get(word.lower()):
        suggestion = f" (did you mean {guess}?)"
    if suggestion:
        return f"unknown command {printable_word(word)}{suggestion}"
    return f"unknown command {printable_word(word)}: use {join_alternatives(known)}"


def describe_unknown_flag(flag: str, known_flags: Iterable[str]) -> str:
    """Return a sentence about an unknown flag, with the option to use if there is one."""
    start = f"unknown flag {printable_word(flag)}"
    if advice := ADVICE_BY_FLAG.get(flag):
        return f"{start}: {advice}"
    if close := suggest_known_word(flag, known_flags):
        return f"{start}{close}"
    name = flag.lstrip("-").replace("-", "_").lower()
    options = [option for option in OPTIONS if name in (option, option.replace(".", "_"), option.rpartition(".")[2])]
    if len(options) == 1:
        return f"{start}: set {options[0]} in the --config file, or {variable_name(options[0])}"
    if options:
        return f"{start}: set {join_alternatives(options)} in the --config file"
    return start
