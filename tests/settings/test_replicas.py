"""Addresses of the store where gateways share their loads, and invalid ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proxy.process.configuration import secrets_of
from proxy.settings import SettingsError
from proxy.settings.load import load_settings

_ENGINES = ["--prefill", "a:1", "--decode", "b:1"]


@pytest.mark.parametrize(
    "url",
    ["redis://10.0.0.9", "redis://me@store:6379/3", "rediss://[::1]:6380", "unix:///run/valkey.sock"],
)
def test_store_is_a_url(url: str) -> None:
    assert load_settings(_ENGINES, {"PROXY_REPLICAS__URL": url}).settings.replicas.url == url


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"URL": "10.0.0.9:6379"}, "must be a URL like redis://10.0.0.9:6379/0, rediss://… for TLS, or unix:///path"),
        ({"URL": "redis://a:x"}, "must be a URL like"),
        ({"URL": "redis://:topsecret@a:1"}, "must not contain a password"),
        ({"URL": "redis://me:topsecret@a"}, "must not contain a password"),
        ({"GROUP": "a b"}, "must be 1 to 64 letters"),
        ({"TTL_SECONDS": "0.15"}, "ttl_seconds 0.15 is less than twice interval_seconds"),
        ({"PASSWORD": "topsecret", "PASSWORD_FILE": "/nowhere"}, "are both given"),
    ],
)
def test_invalid_replicas_settings_are_rejected_without_showing_passwords(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(_ENGINES, {f"PROXY_REPLICAS__{name}": value for name, value in given.items()})
    assert sentence in str(refused.value)
    assert "topsecret" not in str(refused.value)


def test_password_may_be_in_a_file_and_is_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("topsecret\n")
    settings = load_settings(_ENGINES, {"PROXY_REPLICAS__PASSWORD_FILE": str(file)}).settings
    assert secrets_of(settings) == ["topsecret"]
    assert "topsecret" not in str(settings.model_dump(mode="json"))


def test_without_the_extra_redis_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)  # as if it could not be imported
    assert load_settings(_ENGINES, {}).settings.replicas.guest_rows == 0
    with pytest.raises(SettingsError, match=r"pip install '.\[redis\]'"):
        load_settings(_ENGINES, {"PROXY_REPLICAS__URL": "redis://a"})
