"""The options of discovery: where its files are, and that engines need not be named where they are found."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from proxy.settings import Settings, SettingsError, load_settings


def settings(line: str = "", **environ: str) -> Settings:
    return load_settings(shlex.split(line), environ).settings


def test_relative_paths_of_files_begin_where_the_file_is_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "etc" / "gateway.yaml"
    file.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    file.write_text("discovery: {files: [engines/*.yaml, /abs.json]}", encoding="utf-8")
    assert settings(f"--config {file}").discovery.files == (f"{file.parent}/engines/*.yaml", "/abs.json")
    file.write_text("discovery: {files: 'a.yaml, b.yaml'}", encoding="utf-8")
    assert settings(f"--config {file}").discovery.files == (f"{file.parent}/a.yaml", f"{file.parent}/b.yaml")
    assert settings(PROXY_DISCOVERY__FILES="a.yaml,b.yaml").discovery.files == (
        f"{tmp_path}/a.yaml",
        f"{tmp_path}/b.yaml",
    )


def test_engines_that_are_found_need_not_be_named() -> None:
    assert settings(PROXY_DISCOVERY__FILES="/a.yaml").fleet == "0 prefillers, 0 decoders, 1 discovery source"
    assert settings("--decode d:1", PROXY_DISCOVERY__FILES="/a.yaml").fleet.startswith("0 prefillers, 1 decoder,")


def test_dns_names_are_those_of_a_role_and_may_be_a_stage_of_encoders() -> None:
    found = settings(PROXY_DISCOVERY__PREFILL_DNS="p:1 8998,_http._tcp.q", PROXY_DISCOVERY__DECODE_DNS="d:1-2")
    assert found.discovery.prefill_dns == ("p:1 8998", "_http._tcp.q")
    assert not found.has_encoders
    assert settings("--prefill p:1 --decode d:1", PROXY_DISCOVERY__ENCODE_DNS="e:1").has_encoders


def test_without_the_extra_dns_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns", None)  # as if it could not be imported
    with pytest.raises(
        SettingsError, match=r"^discovery by DNS needs the extra dns: pip install '.\[dns\]' in the checkout$"
    ):
        settings("--prefill p:1", PROXY_DISCOVERY__DECODE_DNS="d:1")
    assert settings("--prefill p:1 --decode d:1").discovery.sources == ()


def test_kubernetes_names_the_roles_that_have_a_selector(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(
        "kubernetes: {prefill_selector: a=b, decode_selector: c=d, token_file: token, ca_file: /ca}", encoding="utf-8"
    )
    found = settings(f"--config {tmp_path}/gateway.yaml")
    assert found.kubernetes.selectors == {"prefill": "a=b", "decode": "c=d"}
    assert (found.kubernetes.token_file, found.kubernetes.ca_file) == (tmp_path / "token", Path("/ca"))
    assert found.fleet == "0 prefillers, 0 decoders, 2 discovery sources"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"API_SERVER": "https://10.0.0.1/api"},
            "PROXY_KUBERNETES__API_SERVER must be an address such as https://10.96.0.1:443, without a path, not 'https://10.0.0.1/api'",
        ),
        ({"API_SERVER": "https://10.0.0.1"}, "kubernetes: api_server needs a namespace"),
        ({"NAMESPACE": "a/b"}, "PROXY_KUBERNETES__NAMESPACE must be the name of a namespace, not 'a/b'"),
    ],
)
def test_invalid_options_of_kubernetes_are_refused(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings("--prefill p:1 --decode d:1", **{f"PROXY_KUBERNETES__{name}": value for name, value in given.items()})
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"DECODE_DNS": "d"}, "PROXY_DISCOVERY__DECODE_DNS: 'd' has no port: write it as host:port"),
        (
            {"DECODE_DNS": "10.0.0.1:1"},
            "PROXY_DISCOVERY__DECODE_DNS: '10.0.0.1:1' is an IP address, not a DNS name",
        ),
        (
            {"DECODE_DNS": "_http._tcp.d/"},
            "PROXY_DISCOVERY__DECODE_DNS: '_http._tcp.d/' is not a host name or an IP address",
        ),
        ({"DECODE_DNS": "d:1 8998"}, "discovery: d:1 8998 has a bootstrap port, which only prefillers have"),
        ({"DECODE_DNS": "d:1", "PREFILL_DNS": "d:1"}, "discovery: d:1 is given twice"),
        (
            {"DNS_SERVERS": "ns.test:53"},
            "PROXY_DISCOVERY__DNS_SERVERS: ns.test:53 must be an address and a port, such as 127.0.0.1:8600",
        ),
        ({"DNS_MAX_SECONDS": "1"}, "discovery: dns_max_seconds 1.0 is below dns_min_seconds 5.0"),
        (
            {"PREFILL_DNS": "p:1", "CONNECTOR": "plain"},
            "connector plain has no prefillers: give every engine as a decoder",
        ),
        ({"PREFILL_DNS": "p:1"}, "no decoder given: use --decode, PROXY_DECODE or a --config file"),
        ({"DECODE_DNS": "d:1"}, "no prefiller given: use --prefill, PROXY_PREFILL or a --config file"),
    ],
)
def test_dns_names_that_cannot_be_are_refused(given: dict[str, str], sentence: str) -> None:
    environ = {f"PROXY_{'' if name == 'CONNECTOR' else 'DISCOVERY__'}{name}": value for name, value in given.items()}
    with pytest.raises(SettingsError) as refused:
        settings(**environ)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("line", "files", "sentence"),
    [
        (
            "--connector auto",
            "/a.yaml",
            "connector auto asks the configured instances: name the connector if all are discovered",
        ),
        (
            "--connector auto --decode d:1",
            "/a.yaml",
            "connector auto asks the configured instances: name the connector if all are discovered",
        ),
        ("", "/a.yaml,/b.yaml,/a.yaml", "PROXY_DISCOVERY__FILES: /a.yaml is given twice"),
    ],
)
def test_invalid_sources_of_discovery_are_refused(line: str, files: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(line, PROXY_DISCOVERY__FILES=files)
    assert str(refused.value) == sentence
