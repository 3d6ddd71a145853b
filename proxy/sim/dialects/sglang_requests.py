"""Reads and checks request bodies as SGLang does, for the OpenAI API and for its native `/generate`.

The body says where the engine meets its partner (SGLang `managers/io_struct.py`): `bootstrap_host`, `bootstrap_port`
and `bootstrap_room`, one of each or a list with one per prompt. One room for several prompts means consecutive rooms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proxy.sim.dialects.vllm_requests import read_vllm_request
from proxy.sim.model.request import EngineError, GenerationRequest
from proxy.sim.model.tokenizer import encode_text, render_chat

if TYPE_CHECKING:
    from proxy.sim.options import Options

_DEFAULT_TOKENS = 128
_FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""The bootstrap host in requests to a prefiller without a decoder (`FAKE_BOOTSTRAP_HOST`)."""
_IGNORED_MEMBERS = ("model", "kv_transfer_params", "continue_final_message")
_SAMPLING_MEMBERS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    **{name: name for name in ("stop", "stop_token_ids", "ignore_eos", "n", "skip_special_tokens")},
}


def read_openai_request(body: Any, *, is_chat: bool, options: Options, headers: dict[str, str]) -> GenerationRequest:
    """Read a chat or completion. All model names are accepted, and headers have no effect."""
    if isinstance(body, dict) and body.get("max_tokens") == 0:
        raise _make_invalid_error("1 validation error:\n  Value error, max_tokens must be positive")
    known = {name: body[name] for name in body if name not in _IGNORED_MEMBERS} if isinstance(body, dict) else body
    ask = read_vllm_request(known, is_chat=is_chat, options=options, headers={})
    ask = replace(
        ask,
        model=body.get("model") or options.model,
        include_stop=bool(body.get("no_stop_trim")),
        return_token_ids=_reports_token_ids(ask, options),
    )
    if (body.get("temperature") or 0) < 0:
        raise _make_invalid_error(f"temperature must be non-negative, got {body['temperature']}.")
    if is_chat and body.get("input_ids"):
        ask = replace(ask, prompts=[body["input_ids"]], phase_prompt=_read_phase_prompt(body))
    return _add_bootstrap_members(ask, body, options)


def _reports_token_ids(ask: GenerationRequest, options: Options) -> bool:
    profile = options.profile
    if not ask.return_token_ids or not profile.tells_completion_ids:
        return False
    if ask.is_chat and ask.stream and not profile.streams_chat_ids:
        raise _make_invalid_error(
            "return_token_ids is not supported with streaming on /v1/chat/completions. "
            "Please set stream=false when using return_token_ids=true."
        )
    return True


def _read_phase_prompt(body: dict[str, Any]) -> list[int]:
    """Return the IDs by which the parser decides whether a chat that was given as IDs begins in reasoning.

    They are those of its messages. With `continue_final_message`, the markers in the last message decide (SGLang
    `parser/reasoning_parser.py`).
    """
    if not body.get("continue_final_message"):
        return render_chat(body)
    *messages, last = body["messages"]
    begun = render_chat({**body, "messages": messages, "continue_final_message": False})
    return [*begun, *encode_text(str(last.get("content") or ""))]


def read_generate_request(body: Any, *, options: Options, headers: dict[str, str]) -> GenerationRequest:
    """Read a request to `/generate`, whose `text` or `input_ids` may be a list.

    Of several `sampling_params`, use the first.
    """
    if not isinstance(body, dict):
        raise _make_invalid_error("Input should be a valid dictionary")
    prompt = body.get("text") if body.get("text") is not None else body.get("input_ids")
    if not prompt:
        raise _make_invalid_error("Either text, input_ids or input_embeds should be provided.")
    given = body.get("sampling_params") or {}
    sampling = (given[0] if given else {}) if isinstance(given, list) else given
    completion = {name: sampling[key] for key, name in _SAMPLING_MEMBERS.items() if sampling.get(key) is not None}
    echo_only = completion.get("max_tokens") == 0
    if echo_only:
        completion["max_tokens"] = 1  # it samples all the same
    completion = {"max_tokens": _DEFAULT_TOKENS} | completion | {"prompt": prompt, "stream": body.get("stream")}
    ask = read_vllm_request(completion, is_chat=False, options=options, headers={})
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    logprobs = body.get("return_logprob")
    ask = replace(
        ask,
        is_batch=is_batch or ask.samples > 1,
        echo_only=echo_only,
        logprobs=(body.get("top_logprobs_num") or 0) if logprobs else None,
        prompt_logprobs_from=body.get("logprob_start_len", -1) if logprobs else -1,
    )
    return _add_bootstrap_members(ask, body, options)


def _add_bootstrap_members(ask: GenerationRequest, body: dict[str, Any], options: Options) -> GenerationRequest:
    """Return the request with its bootstrap members as `kv_params`.

    A prefiller generates one token, even if the request asks for more.
    """
    ranks = {name: body.get(name) for name in ("routed_dp_rank", "disagg_prefill_dp_rank")}
    if ranks["routed_dp_rank"] is None:
        ranks["routed_dp_rank"] = body.get("data_parallel_rank")
    _check_rank(ranks["routed_dp_rank"], options)
    if options.role == "both":
        return replace(ask, kv_params={})
    rooms = _read_rooms(body, len(ask.prompts))
    if options.role == "prefill" and all(place["bootstrap_host"] == _FAKE_BOOTSTRAP_HOST for place in rooms):
        return replace(ask, kv_params={}, max_tokens=1, min_tokens=0, echo_only=False)
    if any(place["bootstrap_room"] is None for place in rooms):
        raise _make_invalid_error(
            f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={body.get('rid')!r}"
        )
    ask = replace(ask, kv_params={"rooms": rooms, **ranks})
    return replace(ask, max_tokens=1, min_tokens=0, echo_only=False) if options.role == "prefill" else ask


def _check_rank(rank: Any, options: Options) -> None:
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < options.dp_size):
        raise _make_invalid_error(f"routed_dp_rank={rank} out of range [0, {options.dp_size})")


def _read_rooms(body: dict[str, Any], prompts: int) -> list[dict[str, Any]]:
    """Return the bootstrap host, port and room of each prompt."""
    columns = {}
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        given = body.get(name)
        if isinstance(given, list):
            if len(given) != prompts:
                raise _make_invalid_error(f"{name} has {len(given)} entries for {prompts} prompts")
            columns[name] = given
        elif name == "bootstrap_room" and given is not None:
            columns[name] = [given + index for index in range(prompts)]
        else:
            columns[name] = [given] * prompts
    return [{name: column[index] for name, column in columns.items()} for index in range(prompts)]


def _make_invalid_error(message: str) -> EngineError:
    return EngineError(400, message, "BadRequestError")
