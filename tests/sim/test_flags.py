"""The flags of `mock-engine`: every field of the options has one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from proxy.settings import SettingsError
from proxy.sim.engine.cli import build_parser, parse_arguments
from proxy.sim.options import Options


def test_without_flags_an_engine_is_as_by_default() -> None:
    assert parse_arguments([]) == ("127.0.0.1", 0, Options())


def test_every_option_has_a_flag() -> None:
    values = set(vars(build_parser().parse_args([])))
    assert values == {field.name for field in dataclasses.fields(Options)} | {"host", "port"}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (
            "--protocol layerwise --metaserver-delay-seconds 0.5",
            {"protocol": "layerwise", "metaserver_delay_seconds": 0.5},
        ),
        ("--protocol transfer --bootstrap-port 8998", {"protocol": "transfer", "bootstrap_port": 8998}),
        ("--protocol store --store /kv", {"protocol": "store", "store": "/kv"}),
        ("--profile sglang --dp-size 4", {"profile_name": "sglang", "dp_size": 4}),
        ("--profile sglang --waiting-seconds 2", {"profile_name": "sglang", "waiting_seconds": 2.0}),
        ("--profile sglang --handshake-seconds 2", {"profile_name": "sglang", "handshake_seconds": 2.0}),
    ],
)
def test_protocols_have_flags(words: str, fields: dict[str, Any]) -> None:
    assert parse_arguments(words.split())[2] == Options(**fields)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--foo", "unrecognized arguments: --foo"),
        ("--port 65536", "--port: must be between 0 and 65535"),
        ("--max-num-seqs 0", "--max-num-seqs: must be a whole number, 1 or more"),
        ("--port x", "--port: must be between 0 and 65535"),
    ],
)
def test_mistake_is_one_sentence(words: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_arguments(words.split())
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "protocol"),
    [(Options(), "pull"), (Options(profile_name="sglang"), "bootstrap"), (Options(protocol="store"), "store")],
)
def test_profile_chooses_a_protocol_unless_told(options: Options, protocol: str) -> None:
    assert options.kv_protocol == protocol
