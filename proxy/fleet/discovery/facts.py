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
    EngineIdentity,
    EngineSetup,
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


def make_engine_facts(version_answer: BufferedResponse | None, models_answer: BufferedResponse | None) -> EngineFacts:
    """Return the facts in an engine's version and models.

    Args:
        version_answer: Answer at `/version`, in vLLM `{"version": "0.23.0"}`; None if there was none.
        models_answer: Answer at `/v1/models`, in vLLM with `max_model_len` for each model; None if there was none.
    """
    listed = models_answer and models_answer.parsed_json_or_none
    identity = EngineIdentity(
        engine_kind=parse_kind(listed),
        models=parse_models(listed),
        adapters=parse_adapters(listed),
        is_gateway=version_answer is not None and version_answer.headers.get("Server") == SERVER,
        has_refused_key=models_answer is not None and models_answer.status in (401, 403),
    )
    engine_version = (
        UNKNOWN_VERSION
        if identity.is_gateway
        else parse_engine_version(version_answer and version_answer.parsed_json_or_none)
    )
    return EngineFacts(engine_version, parse_max_model_len(listed), identity=identity)


def update_models(engine_facts: EngineFacts, models_answer: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the models that an engine lists now, or the same object if it lists none.

    `models_answer` None: there was no answer.
    """
    listed = models_answer and models_answer.parsed_json_or_none
    if not (names := parse_models(listed)):
        return engine_facts
    return replace(engine_facts, identity=replace(engine_facts.identity, models=names, adapters=parse_adapters(listed)))


def update_setup(engine_facts: EngineFacts, server_info: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the engine's options, version and limits, as far as it reports them.

    `server_info` None: there was no answer.
    """
    options = server_info and server_info.parsed_json_or_none
    identity = replace(engine_facts.identity, engine_setup=parse_setup(options))
    # SGLang has no `/version`.
    version = engine_facts.version if engine_facts.version != UNKNOWN_VERSION else parse_sglang_version(options)
    return replace(
        engine_facts,
        version=version,
        max_num_seqs=parse_max_num_seqs(options),
        kv_memory_tokens=parse_kv_tokens(options),
        data_parallel_ranks=parse_ranks(options),
        identity=identity,
    )


def needs_ranks_question(engine_facts: EngineFacts, role: Role) -> bool:
    """Return whether to ask at METRICS_PATH: vLLM reports its configuration only in development mode."""
    return (
        role is Role.PREFILL
        and engine_facts.data_parallel_ranks is None
        and engine_facts.identity.engine_kind == "vLLM"
    )


def update_ranks(engine_facts: EngineFacts, metrics_text: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the number of ranks in an engine's gauges. `metrics_text` None: there was no answer."""
    if metrics_text is None or metrics_text.status != 200:
        return engine_facts
    return replace(engine_facts, data_parallel_ranks=exposition.parse_rank_count(metrics_text.body))


def needs_chat_ids_question(engine_facts: EngineFacts) -> bool:
    """Return whether to ask CHAT_IDS_QUESTION: vLLM always reports ids, and older SGLang ignores the member."""
    return engine_facts.identity.engine_kind == "SGLang" and TOKEN_IDS.is_available_in(engine_facts, "SGLang")


def update_chat_ids(engine_facts: EngineFacts, chat_answer: BufferedResponse | None) -> EngineFacts:
    """Return the facts with the result of CHAT_IDS_QUESTION. `chat_answer` None: there was none."""
    reports_ids = (
        chat_answer is not None
        and chat_answer.status == 400
        and b"temperature" in chat_answer.body
        and b"return_token_ids" not in chat_answer.body
    )
    setup = replace(engine_facts.identity.engine_setup or EngineSetup(), has_chat_token_ids=reports_ids)
    return replace(engine_facts, identity=replace(engine_facts.identity, engine_setup=setup))
