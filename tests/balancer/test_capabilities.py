"""The table of capabilities: which engine has what, by its kind, its version and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.balancer.engines import (
    CHAT_STREAM_TOKEN_IDS,
    CHAT_TOKEN_IDS,
    SEEDS_REPEAT,
    TOKEN_IDS,
    Capability,
    EngineFacts,
    EngineVersion,
    Identity,
    Setup,
)

UNKNOWN = EngineFacts()


def facts(version: EngineVersion, setup: Setup | None = None) -> EngineFacts:
    return EngineFacts(version, identity=Identity(setup=setup))


@pytest.mark.parametrize(
    ("capability", "kind", "told", "has"),
    [
        (TOKEN_IDS, "vLLM", None, True),
        (TOKEN_IDS, "vLLM", UNKNOWN, True),
        (TOKEN_IDS, "vLLM", facts((0, 18)), True),
        (TOKEN_IDS, "SGLang", None, False),
        (TOKEN_IDS, "SGLang", UNKNOWN, False),
        (TOKEN_IDS, "SGLang", facts((0, 5, 16)), False),
        (TOKEN_IDS, "SGLang", facts((0, 5, 17)), True),
        (TOKEN_IDS, "SGLang", facts((0, 6, 0)), True),
        (CHAT_TOKEN_IDS, "vLLM", UNKNOWN, False),
        (CHAT_TOKEN_IDS, "vLLM", facts((0, 26)), False),
        (CHAT_TOKEN_IDS, "vLLM", facts((0, 27)), True),
        (CHAT_TOKEN_IDS, "SGLang", facts((0, 5, 13)), True),
        (CHAT_STREAM_TOKEN_IDS, "vLLM", UNKNOWN, True),
        (CHAT_STREAM_TOKEN_IDS, "SGLang", facts((0, 5, 23)), False),
        (CHAT_STREAM_TOKEN_IDS, "SGLang", facts((0, 5, 23), Setup()), False),
        (CHAT_STREAM_TOKEN_IDS, "SGLang", facts((0, 5, 23), Setup(has_chat_token_ids=True)), True),
        (SEEDS_REPEAT, "SGLang", facts((0, 5, 23), Setup()), False),
        (SEEDS_REPEAT, "SGLang", facts((0, 5, 23), Setup(is_deterministic=True)), True),
    ],
)
def test_engines_have_capabilities_by_kind_version_and_setup(
    capability: Capability, kind: str, told: EngineFacts | None, has: bool
) -> None:
    assert capability.is_in_engine(told, kind) is has


def test_sglang_lacks_a_capability_that_names_no_sglang_version() -> None:
    capability = Capability((0, 1), if_unknown=True)
    assert not capability.is_in_engine(replace(UNKNOWN, version=(9, 9, 9)), "SGLang")
