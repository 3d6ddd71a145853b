"""The pages of docs/engines/ and the compatibility page, compared with launch, with real engines and with pdproxy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from lab.test_docs import Kind, blocks
from proxy.settings import CONNECTOR_TRAITS, Settings
from proxy.tools.launch.command import files_as_text
from proxy.tools.launch.topology import RoleName
from tests.real.stacks import STACKS, Place
from tests.reference_pages import compatibility
from tests.tools.launch.reading import Command, commands, files_of, gateway_of

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/engines").glob("*.md"))}
TRIED: Final = {
    "vllm-nixl-1p1d": "nixl",
    "vllm-nixl-push-1p1d": "push",
    "vllm-mooncake-1p1d": "mooncake",
    "vllm-store-1p1d": "mooncake-store",
    "sglang-1p1d": "sglang",
}
"""The stack of `scripts/test-real` that starts such engines, by topology."""
# Where an engine listens, what it serves, and its size.
_OF_ALL: Final = {"--host", "--port", "--model-path", "--max-model-len", "--context-length", "--enable-cache-report"}
_SIZES: Final = {"--tensor-parallel-size", "--tp-size", "--max-num-seqs"}
_DEVICES: Final = {"CUDA_VISIBLE_DEVICES"}


def topologies(page: str) -> dict[str, str]:
    """Return the rendered text in a page by the name of its topology."""
    command = re.compile(r"pdproxy launch render configs/topologies/(.*)\.yaml")
    return {
        match[1]: block.text
        for block in blocks(page, PAGES[page])
        if block.kind is Kind.OUTPUT and (match := command.fullmatch(block.note_text))
    }


def engines(topology: str) -> dict[RoleName, Command]:
    """Return the command of each role."""
    found: dict[RoleName, Command] = {}
    for path, text in files_of(topology).items():
        if path != "gateway.yaml":
            (command,) = commands(text)
            found["prefill" if "/prefill-" in path else "decode"] = command
    return found


@pytest.mark.parametrize("page", PAGES)
def test_page_of_an_engine_shows_what_launch_renders(page: str) -> None:
    shown = topologies(page)
    assert shown
    for name, text in shown.items():
        stale = f"copy the output of `pdproxy launch render configs/topologies/{name}.yaml` into {page}"
        assert text.splitlines() == files_as_text(files_of(name)).splitlines(), stale


def test_pages_show_a_topology_for_every_real_stack_with_two_roles() -> None:
    shown = {name for page in PAGES for name in topologies(page)}
    assert TRIED.keys() | {"vllm-ascend-1p1d"} == shown
    # ExampleConnector is an example of vLLM, thinking has the engines of nixl, read-back has them with
    # bidirectional_kv_xfer, offload with a second connector, and elastic with kv_both.
    disaggregated = {stack.name for stack in STACKS if CONNECTOR_TRAITS[stack.connector].takes_prefillers}
    assert disaggregated - {"thinking", "store", "read-back", "offload", "elastic"} == {*TRIED.values()}


@pytest.mark.parametrize("topology", TRIED)
def test_topology_has_what_real_engines_are_started_with(topology: str, tmp_path: Path) -> None:
    (stack,) = (stack for stack in STACKS if stack.name == TRIED[topology])
    assert gateway_of(files_of(topology))["connector"] == stack.connector
    for role, command in engines(topology).items():
        options = stack.options(Place("prefill" if role == "prefill" else "decode", 1, 2, tmp_path))
        flags = command.flags
        assert set(flags) - _OF_ALL - _SIZES <= {*options.flags, *stack.family.options.flags}
        assert set(command.environment) - _DEVICES <= set(options.environment)
        if "--kv-transfer-config" in options.flags:
            tried = compatibility.kv_transfer(options.flags)
            transfer = flags["--kv-transfer-config"]
            if "lookup_rpc_port" in transfer.get("kv_connector_extra_config", {}):  # the number is that of the engine
                transfer["kv_connector_extra_config"]["lookup_rpc_port"] = 2
            assert transfer.items() <= tried.items()


@pytest.mark.parametrize("topology", ["vllm-mooncake-1p1d", "sglang-1p1d"])
def test_bootstrap_port_is_the_one_that_the_gateway_names(topology: str) -> None:
    prefill = engines(topology)["prefill"]
    port = prefill.environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") or prefill.flags["--disaggregation-bootstrap-port"]
    (endpoint,) = Settings.model_validate(gateway_of(files_of(topology))).prefill
    assert port == str(endpoint.bootstrap_port)


def test_pages_name_every_connector_of_engines() -> None:
    pages = "".join(PAGES.values())
    unnamed = {
        name
        for traits in CONNECTOR_TRAITS.values()
        for name in traits.kv_connectors
        if not re.search(rf"\b{name}\b", pages)
    }
    # Other names of connectors on the pages, and an example.
    assert unnamed == {"ExampleConnector", "NixlPullConnector"}


def test_compatibility_page_describes_every_capability_of_engines() -> None:
    described = compatibility.ABILITIES.keys() | compatibility.WITHOUT_ROW
    assert described == compatibility.capabilities().keys(), "add a row to tests/reference_pages/compatibility.py"
