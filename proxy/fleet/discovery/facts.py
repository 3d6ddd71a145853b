"""What an engine is asked when it comes up, and the facts that its answers make.

For those who ask: the prober, and the doctor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import orjson

from proxy import SERVER
from proxy.balancer.engines import (
    TOKEN_IDS,
    UNKNOWN_VERSION,
    EngineFacts,
    Identity,
    Setup,
    parse_adapters,
    parse_engine_version,
    parse_kind,
    parse_kv_tokens,
    parse_max_model_len,
    parse_max_num_seqs,
    parse_models,
    parse_ranks,
    parse_setup,
    parse_sglang_version,
)
from proxy.common.backend import Role
from proxy.wire import exposition

if TYPE_CHECKING:
    from proxy.upstream import BufferedResponse

VERSION_PATH: Final = "/version"
MODELS_PATH: Final = "/v1/models"

# Of SGLang and, with VLLM_SERVER_DEV_MODE=1, of vLLM, which otherwise puts its configuration into one text. vLLM looks
# for compilers, drivers and packages when it is asked for the first time, which takes seconds.
SERVER_INFO_PATH: Final = "/server_info?config_format=json"
SERVER_INFO_TIMEOUT_SECONDS: Final = 30.0

METRICS_PATH: Final = "/metrics"

CHAT_IDS_PATH: Final = "/v1/chat/completions"
CHAT_IDS_QUESTION: Final = orjson.dumps(
    {
        "messages": [{"role": "user", "content": "."}],
        "stream": True,
        "return_token_ids": True,
        "temperature": -1,
        "max_tokens": 1,
    }
)
"""Whether SGLang tells token ids in the stream of a chat. It refuses this in any case, before there is work to do: for
the ids (`_convert_to_internal_request` in serving_chat.py), or else for the temperature (`SamplingParams.verify`).
"""


def facts_of(version: BufferedResponse | None, models: BufferedResponse | None) -> EngineFacts:
    """What vLLM tells at `/version`, `{"version": "0.23.0"}`, and of its models (ModelCard.max_model_len). None: there
    was no answer.
    """
    listed = models and models.json_or_none
    identity = Identity(
        kind=parse_kind(listed),
        models=parse_models(listed),
        adapters=parse_adapters(listed),
        is_gateway=version is not None and version.headers.get("Server") == SERVER,
        refused_key=models is not None and models.status in (401, 403),
    )
    engine_version = UNKNOWN_VERSION if identity.is_gateway else parse_engine_version(version and version.json_or_none)
    return EngineFacts(engine_version, parse_max_model_len(listed), identity=identity)


def with_models(facts: EngineFacts, models: BufferedResponse | None) -> EngineFacts:
    """The same with what an engine now lists; the very same if it lists nothing. None: there was no answer."""
    listed = models and models.json_or_none
    if not (names := parse_models(listed)):
        return facts
    return replace(facts, identity=replace(facts.identity, models=names, adapters=parse_adapters(listed)))


def with_setup(facts: EngineFacts, info: BufferedResponse | None) -> EngineFacts:
    """The same, and how the engine was started and how many requests it works on at a time, as far as it tells."""
    told = info and info.json_or_none
    identity = replace(facts.identity, setup=parse_setup(told))
    # SGLang has no `/version`.
    version = facts.version if facts.version != UNKNOWN_VERSION else parse_sglang_version(told)
    return replace(
        facts,
        version=version,
        max_num_seqs=parse_max_num_seqs(told),
        kv_tokens=parse_kv_tokens(told),
        ranks=parse_ranks(told),
        identity=identity,
    )


def is_to_be_asked_for_ranks(facts: EngineFacts, role: Role) -> bool:
    """Whether METRICS_PATH is for this engine: vLLM tells its configuration only in its development mode."""
    return role is Role.PREFILL and facts.ranks is None and facts.identity.kind == "vLLM"


def with_ranks(facts: EngineFacts, metrics: BufferedResponse | None) -> EngineFacts:
    """The same, and how many ranks its gauges are of. None: there was no answer."""
    if metrics is None or metrics.status != 200:
        return facts
    return replace(facts, ranks=exposition.parse_ranks(metrics.body))


def is_to_be_asked_for_chat_ids(facts: EngineFacts) -> bool:
    """Whether CHAT_IDS_QUESTION is for this engine: older ones ignore the member, and vLLM is known to tell them."""
    return facts.identity.kind == "SGLang" and TOKEN_IDS.is_in_engine(facts, "SGLang")


def with_chat_ids(facts: EngineFacts, answer: BufferedResponse | None) -> EngineFacts:
    """The same, and whether the engine tells token ids in chats, by its answer to that question. None: there was no
    answer.
    """
    tells = (
        answer is not None
        and answer.status == 400
        and b"temperature" in answer.body
        and b"return_token_ids" not in answer.body
    )
    setup = replace(facts.identity.setup or Setup(), has_chat_token_ids=tells)
    return replace(facts, identity=replace(facts.identity, setup=setup))
