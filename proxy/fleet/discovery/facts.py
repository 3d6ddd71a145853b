"""Questions to an engine that has come up, and the facts in its answers.

The prober and the doctor ask them.
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

# SGLang serves it, and vLLM with VLLM_SERVER_DEV_MODE=1. Without the parameter, vLLM returns its configuration as one
# text. Its first answer takes seconds, because it searches for compilers, drivers and packages.
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
"""A request that shows whether SGLang reports token ids in the stream of a chat.

SGLang refuses it before any work: for the ids if it does not report them (`_convert_to_internal_request` in
serving_chat.py), and otherwise for the temperature (`SamplingParams.verify`).
"""


def facts_of(version: BufferedResponse | None, models: BufferedResponse | None) -> EngineFacts:
    """Return the facts in an engine's version and models.

    Args:
        version: Answer at `/version`, in vLLM `{"version": "0.23.0"}`; None if there was none.
        models: Answer at `/v1/models`, in vLLM with `max_model_len` for each model; None if there was none.
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
    """Return the facts with the models that an engine lists now, or the same object if it lists none.

    `models` None: there was no answer.
    """
    listed = models and models.json_or_none
    if not (names := parse_models(listed)):
        return facts
    return replace(facts, identity=replace(facts.identity, models=names, adapters=parse_adapters(listed)))


def with_setup(facts: EngineFacts, info: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the engine's options, version and limits, as far as it reports them.

    `info` None: there was no answer.
    """
    options = info and info.json_or_none
    identity = replace(facts.identity, setup=parse_setup(options))
    # SGLang has no `/version`.
    version = facts.version if facts.version != UNKNOWN_VERSION else parse_sglang_version(options)
    return replace(
        facts,
        version=version,
        max_num_seqs=parse_max_num_seqs(options),
        kv_tokens=parse_kv_tokens(options),
        ranks=parse_ranks(options),
        identity=identity,
    )


def needs_ranks_question(facts: EngineFacts, role: Role) -> bool:
    """Return whether to ask at METRICS_PATH: vLLM reports its configuration only in development mode."""
    return role is Role.PREFILL and facts.ranks is None and facts.identity.kind == "vLLM"


def with_ranks(facts: EngineFacts, metrics: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the number of ranks in an engine's gauges. `metrics` None: there was no answer."""
    if metrics is None or metrics.status != 200:
        return facts
    return replace(facts, ranks=exposition.parse_rank_count(metrics.body))


def needs_chat_ids_question(facts: EngineFacts) -> bool:
    """Return whether to ask CHAT_IDS_QUESTION: vLLM always reports ids, and older SGLang ignores the member."""
    return facts.identity.kind == "SGLang" and TOKEN_IDS.is_in_engine(facts, "SGLang")


def with_chat_ids(facts: EngineFacts, answer: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the result of CHAT_IDS_QUESTION. `answer` None: there was none."""
    reports_ids = (
        answer is not None
        and answer.status == 400
        and b"temperature" in answer.body
        and b"return_token_ids" not in answer.body
    )
    setup = replace(facts.identity.setup or Setup(), has_chat_token_ids=reports_ids)
    return replace(facts, identity=replace(facts.identity, setup=setup))
