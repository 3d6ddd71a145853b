"""What an engine is asked when it comes up, and the facts that its answers make.

For those who ask: the prober, and the doctor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from proxy import SERVER
from proxy.balancer.engine_facts import (
    UNKNOWN_VERSION,
    EngineFacts,
    Identity,
    parse_engine_version,
    parse_kind,
    parse_max_model_len,
    parse_max_num_seqs,
    parse_models,
    parse_setup,
    parse_sglang_version,
)

if TYPE_CHECKING:
    from proxy.upstream.engine_json import Answer

VERSION_PATH: Final = "/version"
MODELS_PATH: Final = "/v1/models"

# Of SGLang and, with VLLM_SERVER_DEV_MODE=1, of vLLM, which otherwise puts its configuration into one text. vLLM looks
# for compilers, drivers and packages when it is asked for the first time, which takes seconds.
SERVER_INFO_PATH: Final = "/server_info?config_format=json"
SERVER_INFO_TIMEOUT_SECONDS: Final = 30.0


def facts_of(version: Answer | None, models: Answer | None) -> EngineFacts:
    """What vLLM tells at `/version`, `{"version": "0.23.0"}`, and of its models (ModelCard.max_model_len). None: there
    was no answer.
    """
    listed = models and models.json_or_none
    identity = Identity(
        kind=parse_kind(listed),
        models=parse_models(listed),
        is_gateway=version is not None and version.headers.get("Server") == SERVER,
        refused_key=models is not None and models.status in (401, 403),
    )
    engine_version = UNKNOWN_VERSION if identity.is_gateway else parse_engine_version(version and version.json_or_none)
    return EngineFacts(engine_version, parse_max_model_len(listed), identity=identity)


def with_setup(facts: EngineFacts, info: Answer | None) -> EngineFacts:
    """The same, and how the engine was started and how many requests it works on at a time, as far as it tells."""
    told = info and info.json_or_none
    identity = replace(facts.identity, setup=parse_setup(told))
    version = facts.version if facts.version != UNKNOWN_VERSION else parse_sglang_version(told)
    return replace(facts, version=version, max_num_seqs=parse_max_num_seqs(told), identity=identity)
