"""Command lines of vllm-router, sglang-router and smg: what is accepted, and what is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from proxy.settings import CONNECTOR_TRAITS, Settings, SettingsError, cli, load_settings
from proxy.settings.connectors import read_connector_name
from proxy.settings.other_routers import ACCEPTED_FLAGS, ADVICE_BY_FLAG, WORKERS_FLAG, describe_unknown_flag
from proxy.settings.sources import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "get-started" / "migrate.md").read_text(encoding="utf-8")
OWN = {"--host", "--port", "--prefill", "--decode", "--policy", "--prefill-policy", "--decode-policy", "--log-level"}
"""Flags of these routers that pdproxy has, too."""

# `--help` of vllm-router 0.1.17 and sglang-router 0.3.2, and `add_cli_args` of smg.
FLAGS = """
--api-key --assignment-mode --backend --balance-abs-threshold --balance-rel-threshold
--bootstrap-port-annotation --bucket-adjust-interval-secs --ca-cert-paths --cache-threshold
--cb-failure-threshold --cb-success-threshold --cb-timeout-duration-secs --cb-window-duration-secs
--chat-template --client-cert-path --client-key-path --control-plane-api-keys --control-plane-audit-enabled
--cors-allowed-origins --decode --decode-policy --decode-selector --disable-circuit-breaker
--disable-health-check --disable-retries --dp-aware --enable-igw --enable-program-scheduling --enable-trace
--eviction-interval-secs --health-check-endpoint --health-check-interval-secs --health-check-timeout-secs
--health-failure-threshold --health-success-threshold --history-backend --host --intra-node-data-parallel-size
--jwt-audience --jwt-issuer --jwt-jwks-uri --jwt-role-mapping --kv-aware-session-affinity-ttl-secs
--kv-connector --kv-event-block-size --kv-event-model --kv-event-replay-source --kv-event-source
--kv-penalty-disk --kv-penalty-external --kv-penalty-host --load-monitor-interval --log-dir --log-json
--log-level --max-concurrent-requests --max-idle-secs --max-payload-size --max-tree-size --mcp-config-path
--mini-lb --model-path --oracle-connect-descriptor --oracle-external-auth --oracle-password --oracle-pool-max
--oracle-pool-min --oracle-pool-timeout-secs --oracle-tns-alias --oracle-username --oracle-wallet-path
--otlp-traces-endpoint --pd-disaggregation --pd-kv-events --policy --port --postgres-db-url
--postgres-pool-max --prefill --prefill-policy --prefill-selector --program-scheduling-config-json
--prometheus-duration-buckets --prometheus-host --prometheus-port --queue-size --queue-timeout-secs
--rate-limit-tokens-per-second --reasoning-parser --redis-pool-max --redis-retention-days --redis-url
--request-id-headers --request-timeout-secs --retry-backoff-multiplier --retry-initial-backoff-ms
--retry-jitter-factor --retry-max-backoff-ms --retry-max-retries --router-temperature --selector
--served-model-name --service-discovery --service-discovery-namespace --service-discovery-port
--shutdown-grace-period-secs --storage-hook-wasm-path --tls-cert-path --tls-key-path
--tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1 --tokenizer-cache-l0-max-entries
--tokenizer-cache-l1-max-memory --tokenizer-path --tool-call-parser --vllm-discovery-address
--vllm-pd-disaggregation --wasm-middleware --wasm-middleware-route --wasm-middleware-sha256
--worker-startup-check-interval --worker-startup-timeout-secs --worker-urls
""".split()


def settings(line: str) -> Settings:
    return load_settings(shlex.split(line), {}).settings


def test_every_flag_of_the_routers_is_accepted_or_explained() -> None:
    assert set(FLAGS) - {*OWN, *ACCEPTED_FLAGS, *ADVICE_BY_FLAG, WORKERS_FLAG} == set()


def test_accepted_and_explained_flags_are_disjoint() -> None:
    assert ACCEPTED_FLAGS.keys() & ADVICE_BY_FLAG.keys() == set()
    assert {option for flag in ACCEPTED_FLAGS.values() for option in flag.options} <= OPTIONS.keys()


@pytest.mark.parametrize("flag", ADVICE_BY_FLAG)
def test_explanation_names_options_that_exist(flag: str) -> None:
    sentence = describe_unknown_flag(flag, [])
    assert sentence.startswith(f"unknown flag {flag}: ")
    assert set(re.findall(r"\b[a-z_]+\.[a-z_]+\b", ADVICE_BY_FLAG[flag])) <= OPTIONS.keys()


def test_table_of_the_manual_has_every_accepted_flag_with_its_options() -> None:
    _, _, table = PAGE.partition("\n## Coming from other routers\n")
    rows = dict(re.findall(r"^\| (`--.*?) \| (.*?) \|", table, re.MULTILINE))
    documented = {
        flag: set(re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)?)(?:: \w+)?`", options))
        for flags, options in rows.items()
        for flag in re.findall(r"`(--[a-z-]+)`", flags)
    }
    assert documented == {flag: set(accepted.options) for flag, accepted in ACCEPTED_FLAGS.items()} | {
        WORKERS_FLAG: {"decode", "connector"}
    }


def test_command_line_of_vllm_router_is_accepted() -> None:
    found = settings(
        "--host 0.0.0.0 --port 30000 --policy round_robin --vllm-pd-disaggregation --prefill http://p1:8000"
        " --prefill http://p2:8000 none --decode http://d1:8000 --intra-node-data-parallel-size 4"
        " --retry-max-retries 5 --retry-initial-backoff-ms 50 --retry-max-backoff-ms 30000 --queue-size 100"
        " --health-check-interval-secs 10"
    )
    assert (found.connector, len(found.prefill), len(found.decode)) == ("vllm_pull", 2, 1)
    assert (found.balance.prefill_dp_ranks, found.balance.decode_dp_ranks) == (4, 4)
    assert (found.retry.max_attempts, found.retry.base_delay_seconds, found.retry.max_delay_seconds) == (5, 0.05, 30)
    assert (found.admission.max_waiting, found.health.interval_seconds) == (100, 10)


def test_kv_connector_of_vllm_router_selects_the_connector() -> None:
    line = "--kv-connector mooncake --vllm-pd-disaggregation --prefill http://p:1 8998 --decode http://d:1"
    assert settings(line).connector == "mooncake_bootstrap"
    assert settings(f"{line} --connector vllm_store").connector == "vllm_store"


def test_command_line_of_sglang_router_is_accepted() -> None:
    found = settings(
        "--pd-disaggregation --prefill http://p1:30000 8998 --prefill http://p2:30000 8998 --decode http://d1:30000"
        " --decode-policy power_of_two --cors-allowed-origins https://a.example https://b.example --disable-retries"
        " --shutdown-grace-period-secs 60 --log-json"
    )
    assert found.connector == "sglang_bootstrap"
    assert [endpoint.bootstrap_port for endpoint in found.prefill] == [8998, 8998]
    assert found.listen.cors_origins == ("https://a.example", "https://b.example")
    assert (found.retry.max_attempts, found.drain.streams_seconds, found.log.format) == (1, 60, "json")


@pytest.mark.parametrize("flags", [("--tls-cert-path", "--tls-key-path"), ("--ssl-certfile", "--ssl-keyfile")])
def test_certificate_of_the_server_is_accepted(flags: tuple[str, str]) -> None:
    certificate, key = flags
    line = cli.parse_command_line(shlex.split(f"{certificate} server.crt {key} server.key"))
    found = {option: (value.value, value.origin) for option, value in line.values.items()}
    assert found == {"listen.tls_certificate": ("server.crt", certificate), "listen.tls_key": ("server.key", key)}


def test_worker_urls_are_engines_that_do_both_stages() -> None:
    found = settings("--worker-urls http://a:8000 http://b:8000 --max-payload-size 1000")
    assert (found.connector, found.prefill, len(found.decode)) == ("plain", (), 2)
    assert found.listen.max_body_bytes == 1000


@pytest.mark.parametrize(
    ("name", "connector"),
    [
        ("NixlConnector", "vllm_pull"),
        ("nixl", "vllm_pull"),
        ("MooncakeConnectorV1", "vllm_pull"),
        ("MooncakeConnector", "mooncake_bootstrap"),
        ("LMCacheConnectorV1", "vllm_store"),
        ("lmcache", "vllm_store"),
        ("MooncakeLayerwiseConnector", "ascend_layerwise"),
        ("sglang", "sglang_bootstrap"),
        ("vllm-pull", "vllm_pull"),
        ("PLAIN", "plain"),
    ],
)
def test_connector_may_have_the_name_that_engines_have_for_it(name: str, connector: str) -> None:
    prefill = "" if connector == "plain" else "--prefill p:1"
    assert settings(f"{prefill} --decode d:1 --connector {name}").connector == connector


def test_every_kv_connector_is_a_synonym_of_one_connector() -> None:
    for connector, traits in CONNECTOR_TRAITS.items():
        for name in traits.kv_connectors:
            assert read_connector_name(name) == connector


def test_value_of_a_flag_of_another_router_is_not_printed() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(["--api-key", "hush", "--decode", "d:1"], {})
    assert "hush" not in str(error.value)
