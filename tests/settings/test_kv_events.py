"""Endpoints where engines publish KV events, and invalid ones."""

from __future__ import annotations

import sys

import pytest
from pydantic import ValidationError

from proxy.settings import SettingsError
from proxy.settings.fleet import ASK_ENGINES, KvEvents, replace_port
from proxy.settings.load import load_settings

_ENGINES = ["--prefill", "a:7100", "--decode", "b:1"]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("tcp://*:5557", 5557), ("tcp://0.0.0.0:5557", 5557), ("tcp://[::]:1", 1), ("tcp://*:+1000", 8100)],
)
def test_endpoint_has_the_syntax_of_the_engines(endpoint: str, port: int) -> None:
    settings = load_settings([*_ENGINES, "--kv-events", endpoint], {}).settings.kv_events
    assert settings.endpoint == endpoint
    assert replace_port(endpoint, 7100) == port


@pytest.mark.parametrize(
    "endpoint", ["5557", "tcp://10.0.0.1:5557", "tcp://*:0", "tcp://*:65536", "ipc:///tmp/a", "on"]
)
def test_invalid_endpoints_of_kv_events_are_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"--kv-events must be like tcp://\*:5557"):
        load_settings([*_ENGINES, "--kv-events", endpoint], {})


def test_invalid_replay_endpoint_is_refused_without_offering_auto() -> None:
    with pytest.raises(ValidationError, match=r"must be like tcp://\*:5557") as refused:
        KvEvents(replay_endpoint=ASK_ENGINES)
    assert "or auto" not in str(refused.value)


def test_without_the_extra_events_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)  # as if it could not be imported
    assert load_settings(_ENGINES, {}).settings.kv_events.journal_rings == 0
    with pytest.raises(SettingsError, match=r"pip install '.\[events\]'"):
        load_settings([*_ENGINES, "--kv-events", "auto"], {})
