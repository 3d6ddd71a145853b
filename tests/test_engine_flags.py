"""The commands of docs/engines/ for engines, and the compatibility page, compared with engines and with pdproxy."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from proxy.settings import CONNECTOR_TRAITS, load
from tests import compatibility_page
from tests.real.stacks import STACKS, Place

ROOT: Final = Path(__file__).parent.parent
SECTIONS: Final = ("vLLM with NixlConnector", "vLLM with MooncakeConnector", "vLLM-Ascend", "SGLang")
TRIED: Final = {"vLLM with NixlConnector": "nixl", "vLLM with MooncakeConnector": "mooncake", "SGLang": "sglang"}
"""The stack of `scripts/test-real` that starts such engines."""
KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Where an engine listens, what it serves, and what it reports of its cache.
_OF_ALL: Final = {"--host", "--port", "--model-path", "--enable-prompt-tokens-details", "--enable-cache-report"}


@dataclass
class Line:
    """A command that starts an engine."""

    role: str
    environment: dict[str, str]
    words: list[str]

    @property
    def flags(self) -> dict[str, str]:
        """Values by name."""
        return {
            word: next(iter(self.words[place + 1 :]), "")
            for place, word in enumerate(self.words)
            if word.startswith("--")
        }

    @property
    def transfer(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.flags["--kv-transfer-config"])
        return config


def block(section: str) -> str:
    """Return the commands of a section, without indentation."""
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "engines").glob("*.md")))
    _, _, rest = re.sub(r"^#+ ", "# ", pages, flags=re.MULTILINE).partition(f"# {section}\n")
    found = re.search(r"^((?:    .*\n)+)", rest, re.MULTILINE)
    assert found, section
    return re.sub(r"^    ", "", found[1], flags=re.MULTILINE)


def lines(section: str) -> list[Line]:
    """Return the engines' commands, in order."""
    made = []
    for role, text in re.findall(
        r"^# (prefill|decode) node[^\n]*\n(.*?)(?=^# )", block(section), re.MULTILINE | re.DOTALL
    ):
        words = shlex.split(text)
        environment = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        made.append(Line(role, environment, words))
    assert [line.role for line in made] == ["prefill", "decode"], section
    return made


def gateway(section: str) -> Any:
    """Return the settings of the gateway's command."""
    (command,) = re.findall(r"^pdproxy (.*)$", block(section), re.MULTILINE)
    return load(shlex.split(command), {}).settings


@pytest.mark.parametrize("section", SECTIONS)
def test_engines_listen_at_the_gateways_addresses(section: str) -> None:
    settings = gateway(section)
    for line, (endpoint,) in zip(lines(section), (settings.prefill, settings.decode), strict=True):
        assert line.flags["--port"] == str(endpoint.port)
        assert line.flags["--host"] == "0.0.0.0"


@pytest.mark.parametrize("section", SECTIONS[:3])
def test_transfer_config_is_of_the_gateways_connector(section: str) -> None:
    kv_connectors = CONNECTOR_TRAITS[gateway(section).connector].kv_connectors
    for line in lines(section):
        assert line.transfer["kv_connector"] in kv_connectors
        assert line.transfer["kv_role"] == KV_ROLES[line.role]


@pytest.mark.parametrize("section", TRIED)
def test_lines_have_what_real_engines_are_started_with(section: str, tmp_path: Path) -> None:
    (stack,) = (stack for stack in STACKS if stack.name == TRIED[section])
    assert gateway(section).connector == stack.connector
    for line in lines(section):
        options = stack.options(Place("prefill" if line.role == "prefill" else "decode", 1, 2, tmp_path))
        assert set(line.flags) - _OF_ALL <= {*options.flags, *stack.family.options.flags}
        assert set(line.environment) <= set(options.environment)
        if "--kv-transfer-config" in options.flags:
            tried = json.loads(options.flags["--kv-transfer-config"])
            assert line.transfer.items() <= tried.items()


@pytest.mark.parametrize("section", ["vLLM with MooncakeConnector", "SGLang"])
def test_bootstrap_port_is_the_one_that_the_gateway_names(section: str) -> None:
    prefill = lines(section)[0]
    bootstrap_flag = (
        prefill.environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") or prefill.flags["--disaggregation-bootstrap-port"]
    )
    (endpoint,) = gateway(section).prefill
    assert bootstrap_flag == str(endpoint.bootstrap_port)


def test_ascend_engines_have_ids_ports_and_sizes_as_launch_renders_them() -> None:
    transfers = [line.transfer for line in lines("vLLM-Ascend")]
    rendered = (ROOT / "tests/tools/launch/golden/kimi-k2.6-2p2d.txt").read_text(encoding="utf-8")
    found = re.search(r"--kv-transfer-config '([^']*)'", rendered)
    assert found
    (golden,) = [json.loads(found[1])]
    for transfer in transfers:
        assert transfer.keys() == golden.keys()
        assert {role: sizes.keys() for role, sizes in transfer["kv_connector_extra_config"].items()} == {
            role: sizes.keys() for role, sizes in golden["kv_connector_extra_config"].items()
        }
    first, second = transfers
    assert first["engine_id"] != second["engine_id"]
    assert first["kv_port"] != second["kv_port"]
    assert first["kv_connector_extra_config"] == second["kv_connector_extra_config"]


def test_compatibility_page_is_up_to_date() -> None:
    stale = f"docs/compatibility.md is stale; renew it: {compatibility_page.COMMAND}"
    assert compatibility_page.PAGE.read_text(encoding="utf-8") == compatibility_page.page(), stale


def test_compatibility_page_describes_every_capability_of_engines() -> None:
    described = compatibility_page.ABILITIES.keys() | compatibility_page.WITHOUT_ROW
    assert described == compatibility_page.capabilities().keys(), "add a row to tests/compatibility_page.py"
