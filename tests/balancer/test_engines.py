"""Facts about engines from their answers, and the table of capabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proxy.balancer.engines import (
    CHAT_STREAM_TOKEN_IDS,
    CHAT_TOKEN_IDS,
    SEEDS_REPEAT,
    TOKEN_IDS,
    UNKNOWN_VERSION,
    Capability,
    EngineFacts,
    EngineIdentity,
    EngineSetup,
    EngineVersion,
    parse_engine_version,
    parse_kv_tokens,
    parse_max_model_len,
    parse_max_num_seqs,
    parse_ranks,
    parse_setup,
    parse_sglang_version,
)


@pytest.mark.parametrize(("told", "is_deterministic"), [(True, True), (False, False), (None, False), ("yes", False)])
def test_deterministic_inference_is_read_from_server_info(told: object, is_deterministic: bool) -> None:
    info = {"disaggregation_mode": "decode", "enable_deterministic_inference": told}
    assert parse_setup(info).is_deterministic is is_deterministic


@pytest.mark.parametrize(
    ("told", "is_whole"),
    [({}, True), ({"incremental_streaming_output": True}, False), ({"skip_tokenizer_init": True}, False)],
)
def test_cumulative_events_are_read_from_server_info(told: dict[str, Any], is_whole: bool) -> None:
    assert parse_setup({"disaggregation_mode": "decode", **told}).has_cumulative_events is is_whole


@pytest.mark.parametrize(
    ("mode", "states", "expected"),
    [
        ("decode", [{"decode_cuda_graph_memory_gb": 1.5, "decode_cuda_graph_bs": [1, 2]}], (1.5, (1, 2))),
        ("decode", [{"decode_cuda_graph_memory_gb": 0.0, "decode_cuda_graph_bs": []}], (0.0, ())),
        (
            "decode",
            [{"decode_cuda_graph_memory_gb": 1.5}, {"decode_cuda_graph_memory_gb": 2, "decode_cuda_graph_bs": [4]}],
            (2, ()),
        ),
        ("decode", [{"decode_cuda_graph_memory_gb": 1.5}, {}], (None, ())),
        ("decode", [], (None, ())),
        ("prefill", [{"decode_cuda_graph_memory_gb": 0.0}], (None, ())),
        (
            "decode",
            [{"disaggregation_mode": "prefill", "decode_cuda_graph_memory_gb": 1.5}],
            (None, ()),
        ),
    ],
)
def test_setup_has_the_graphs_of_sglangs_decoders(mode: str, states: list[Any], expected: object) -> None:
    setup = parse_setup({"disaggregation_mode": mode, "internal_states": states})
    assert (setup.decode_graph_gb, setup.decode_graph_sizes) == expected


def sglang(*ranks: object) -> dict[str, Any]:
    states = [{"dp_size": len(ranks), "effective_max_running_requests_per_dp": rank} for rank in ranks]
    return {"max_running_requests": None, "dp_size": len(ranks), "internal_states": states, "version": "0.5.18"}


def vllm(max_num_seqs: object, scheduler: dict[str, object] | None = None, **parallel: object) -> dict[str, Any]:
    config = {
        "scheduler_config": {"max_num_seqs": max_num_seqs, "max_num_active_seqs": None, **(scheduler or {})},
        "parallel_config": {
            "data_parallel_size": 1,
            "data_parallel_size_local": 1,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
            **parallel,
        },
    }
    return {"vllm_config": config, "vllm_env": {}, "system_env": {}}


@pytest.mark.parametrize(
    ("parse", "answer", "expected"),
    [
        (parse_engine_version, {"version": "0.23.0.post1"}, (0, 23)),
        (parse_engine_version, {"version": "v0.18"}, (0, 18)),
        (parse_engine_version, {"version": "dev"}, UNKNOWN_VERSION),
        (parse_engine_version, {"version": None}, UNKNOWN_VERSION),
        (parse_engine_version, ["0.23"], UNKNOWN_VERSION),
        (parse_sglang_version, {"disaggregation_mode": "decode", "version": "0.5.17"}, (0, 5, 17)),
        (parse_sglang_version, {"disaggregation_mode": "null", "version": "0.5.18.dev3+gabc"}, (0, 5, 18)),
        (parse_sglang_version, {"disaggregation_mode": "null", "version": "0.5"}, UNKNOWN_VERSION),
        (parse_sglang_version, {"vllm_config": {}, "version": "0.5.17"}, UNKNOWN_VERSION),
        (parse_sglang_version, None, UNKNOWN_VERSION),
        (parse_max_model_len, {"object": "list", "data": [{"id": "kimi", "max_model_len": 262144}]}, 262144),
        (
            parse_max_model_len,
            {"data": [{"id": "adapter", "max_model_len": None}, "?", {"max_model_len": 4096}, {"max_model_len": 1}]},
            4096,
        ),
        (
            parse_max_model_len,
            {"data": [{"max_model_len": "4096"}, {"max_model_len": True}, {"max_model_len": -1}]},
            None,
        ),
        (parse_max_model_len, {"data": {"max_model_len": 4096}}, None),
        (parse_max_model_len, {"error": "Unauthorized"}, None),
        (parse_max_model_len, [{"max_model_len": 4096}], None),
        (parse_max_model_len, None, None),
        pytest.param(parse_max_num_seqs, sglang(128), 128, id="SGLang"),
        pytest.param(parse_max_num_seqs, sglang(128, 128, 64), 320, id="SGLang, three ranks"),
        pytest.param(parse_max_num_seqs, sglang(128, None), None, id="SGLang, a rank that does not tell"),
        pytest.param(parse_max_num_seqs, sglang(), None, id="SGLang, no ranks"),
        pytest.param(parse_max_num_seqs, {"internal_states": [7]}, None, id="SGLang, something else"),
        pytest.param(parse_max_num_seqs, vllm(256), 256, id="vLLM"),
        pytest.param(parse_max_num_seqs, vllm(256, {"max_num_active_seqs": 100}), 100, id="vLLM, fewer may run"),
        pytest.param(
            parse_max_num_seqs, vllm(256, data_parallel_size=4, data_parallel_size_local=2), 1024, id="vLLM, four ranks"
        ),
        pytest.param(
            parse_max_num_seqs,
            vllm(256, data_parallel_size=4, data_parallel_size_local=2, data_parallel_hybrid_lb=True),
            512,
            id="vLLM, two ranks on each of two nodes, balanced from outside",
        ),
        pytest.param(
            parse_max_num_seqs,
            vllm(256, data_parallel_size=4, data_parallel_external_lb=True),
            256,
            id="vLLM, one of four ranks",
        ),
        pytest.param(parse_max_num_seqs, vllm("256"), None, id="vLLM, no number"),
        pytest.param(
            parse_max_num_seqs,
            {"vllm_config": {"scheduler_config": {"max_num_seqs": 8}}},
            8,
            id="vLLM, no parallel config",
        ),
        pytest.param(parse_max_num_seqs, {"vllm_config": "model='kimi', max_num_seqs=256"}, None, id="vLLM, as text"),
        pytest.param(parse_max_num_seqs, {"detail": "Not Found"}, None, id="not found"),
        pytest.param(parse_max_num_seqs, None, None, id="nothing"),
        (parse_kv_tokens, {"vllm_config": {"cache_config": {"num_gpu_blocks": 10, "block_size": 16}}}, 160),
        (
            parse_kv_tokens,
            {
                "vllm_config": {
                    "cache_config": {"num_gpu_blocks": 10, "block_size": 16},
                    "parallel_config": {"data_parallel_size": 2},
                }
            },
            320,
        ),
        (parse_kv_tokens, {"vllm_config": {"cache_config": {"num_gpu_blocks": None, "block_size": 16}}}, None),
        (parse_kv_tokens, {"max_total_num_tokens": 500, "internal_states": [{}, {}]}, 1000),
        (parse_kv_tokens, {"vllm_config": "text"}, None),
        (parse_kv_tokens, None, None),
        pytest.param(parse_ranks, sglang(128, 128), 2, id="SGLang, two ranks"),
        pytest.param(parse_ranks, vllm(256), 1, id="vLLM"),
        pytest.param(parse_ranks, vllm(256, data_parallel_size=4), 4, id="vLLM, four ranks"),
        pytest.param(
            parse_ranks,
            vllm(256, data_parallel_size=4, data_parallel_size_local=2, data_parallel_hybrid_lb=True),
            2,
            id="vLLM, two ranks on each of two nodes, balanced from outside",
        ),
        pytest.param(
            parse_ranks,
            vllm(256, data_parallel_size=4, data_parallel_external_lb=True),
            1,
            id="vLLM, one of four ranks",
        ),
        pytest.param(
            parse_ranks, {"vllm_config": {"scheduler_config": {"max_num_seqs": 8}}}, None, id="vLLM, no parallel config"
        ),
        pytest.param(parse_ranks, {"detail": "Not Found"}, None, id="not found"),
        pytest.param(parse_ranks, None, None, id="nothing"),
    ],
)
def test_facts_are_parsed_from_the_answers_of_engines(
    parse: Callable[[object], object], answer: object, expected: object
) -> None:
    assert parse(answer) == expected


# Capabilities


UNKNOWN = EngineFacts()


def facts(version: EngineVersion, setup: EngineSetup | None = None) -> EngineFacts:
    return EngineFacts(version, identity=EngineIdentity(engine_setup=setup))


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
        (CHAT_STREAM_TOKEN_IDS, "SGLang", facts((0, 5, 23), EngineSetup()), False),
        (CHAT_STREAM_TOKEN_IDS, "SGLang", facts((0, 5, 23), EngineSetup(has_chat_token_ids=True)), True),
        (SEEDS_REPEAT, "SGLang", facts((0, 5, 23), EngineSetup()), False),
        (SEEDS_REPEAT, "SGLang", facts((0, 5, 23), EngineSetup(is_deterministic=True)), True),
    ],
)
def test_engines_have_capabilities_by_kind_version_and_setup(
    capability: Capability, kind: str, told: EngineFacts | None, has: bool
) -> None:
    assert capability.is_available_in(told, kind) is has


def test_sglang_lacks_a_capability_that_names_no_sglang_version() -> None:
    capability = Capability((0, 1), if_unknown=True)
    assert not capability.is_available_in(replace(UNKNOWN, version=(9, 9, 9)), "SGLang")
