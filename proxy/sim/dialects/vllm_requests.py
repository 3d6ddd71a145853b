"""Reads and checks request bodies of the OpenAI API as vLLM does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeGuard
from zlib import crc32

from proxy.sim.model.grammar import Grammar, UnsupportedSchema, read_grammar
from proxy.sim.model.request import EngineError, GenerationRequest
from proxy.sim.model.tokenizer import asks_for_thinking, encode_text, render_chat

if TYPE_CHECKING:
    from proxy.sim.options import Options

COMPLETION_DEFAULT_TOKENS = 16
PRIVATE_PROMPT_IDS = "_vllm_ascend_recompute_token_ids"


def read_vllm_request(body: Any, *, is_chat: bool, options: Options, headers: dict[str, str]) -> GenerationRequest:
    """Read and check a request. Raises EngineError with the engine's answer."""
    _check_schema(body, is_chat)
    _check_model(body, options)
    prompts = _render_chat_prompt(body, options) if is_chat else _read_completion_prompts(body["prompt"])
    for prompt in prompts:
        if len(prompt) >= options.max_model_len:
            raise _make_late_error(
                f"This model's maximum context length is {options.max_model_len} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
                f"Please reduce the length of the input prompt.",
                "input_tokens",
            )
    echo_only = bool(body.get("echo")) and not is_chat and body.get("max_tokens") == 0
    max_tokens, min_tokens = _read_token_limits(body | {"max_tokens": 1} if echo_only else body, is_chat)
    logprobs = _read_logprobs(body, is_chat)
    dp_rank = _read_dp_rank(headers, options)
    stop = body.get("stop") or ()
    stream_options = body.get("stream_options") or {}
    tools = is_chat and bool(body.get("tools")) and body.get("tool_choice") != "none"
    thinking = is_chat and asks_for_thinking(body) and bool(options.reasoning_parser)
    calls_tools = tools and bool(options.tool_call_parser)
    # The parser engine asks for special tokens in every chat (vLLM 0.32 `parser/engine/parser_engine.py`).
    is_read = is_chat and bool(options.reasoning_parser) and options.profile.has_parser_engine
    return GenerationRequest(
        is_chat=is_chat,
        model=body.get("model") or options.model,
        prompts=prompts,
        samples=body.get("n") or 1,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
        include_stop=bool(body.get("include_stop_str_in_output")),
        ignore_eos=bool(body.get("ignore_eos")),
        keep_markers=body.get("skip_special_tokens") is False or thinking or calls_tools or is_read,
        spaces_markers=not is_chat and body.get("spaces_between_special_tokens") is not False,
        stream=bool(body.get("stream")),
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(stream_options.get("include_usage") and stream_options.get("continuous_usage_stats")),
        logprobs=logprobs,
        return_token_ids=bool(body.get("return_token_ids")),
        echo=bool(body.get("echo")),
        echo_only=echo_only,
        prompt_logprobs=_read_prompt_logprobs(body, logprobs),
        kv_params=body.get("kv_transfer_params") or {},
        media=_read_media(body) if is_chat else (),
        ec_params=body.get("ec_transfer_params") or {},
        is_thinking=thinking,
        include_reasoning=body.get("include_reasoning") is not False,
        calls_tools=calls_tools,
        names_tool=isinstance(body.get("tool_choice"), dict),
        grammar=_read_grammar(body),
        one_call=body.get("parallel_tool_calls") is False,
        dp_rank=dp_rank,
        cache_salt=body.get("cache_salt") or "",
    )


def _read_grammar(body: dict[str, Any]) -> Grammar | None:
    try:
        return read_grammar(body)
    except UnsupportedSchema as problem:
        raise _make_late_error(f"The grammar cannot be kept to here: {problem}.", "structured_outputs") from None


def _read_dp_rank(headers: dict[str, str], options: Options) -> int | None:
    given = headers.get("x-data-parallel-rank", "")
    if not given.lstrip("-").isdigit():
        return None
    if not 0 <= int(given) < options.dp_size:
        raise _make_late_error(f"data_parallel_rank {given} is out of range [0, {options.dp_size}).")
    return int(given)


def _make_late_error(message: str, param: str | None = None) -> EngineError:
    return EngineError(400, message, "BadRequestError", param, late=True)


def _make_invalid_error(message: str, param: str | None) -> EngineError:
    """Return an error of the schema check, which precedes the handler."""
    return EngineError(400, f"1 validation error:\n  {message}", "Bad Request", param)


def _check_schema(body: Any, is_chat: bool) -> None:
    if not isinstance(body, dict):
        raise _make_invalid_error("Input should be a valid dictionary", "body")
    if is_chat and not (isinstance(body.get("messages"), list) and all(isinstance(m, dict) for m in body["messages"])):
        raise _make_invalid_error(
            "Field required" if "messages" not in body else "Input should be a valid list", "body.messages"
        )
    if not is_chat and body.get("prompt") in (None, "", []):
        raise _make_invalid_error(
            "Value error, Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "n"):
        if not isinstance(body.get(name, 0), int | None):
            raise _make_invalid_error("Input should be a valid integer", f"body.{name}")
    if body.get("stream_options") and not body.get("stream"):
        raise _make_invalid_error(
            "Value error, Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if body.get("stream") and (body.get("prompt_logprobs") or 0) != 0:
        raise _make_invalid_error(
            "Value error, `prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
        )
    if body.get("continue_final_message") and body.get("add_generation_prompt", True):
        raise _make_invalid_error("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None)
    if not isinstance(body.get("kv_transfer_params"), dict | None):
        raise _make_invalid_error("Input should be a valid dictionary", "body.kv_transfer_params")


def _check_model(body: dict[str, Any], options: Options) -> None:
    model = body.get("model")
    if model and model != options.model and model not in options.adapters:
        message = f"The model `{model}` does not exist. Valid aliases: {options.model}."
        raise EngineError(404, message, "NotFoundError", "model", late=True)


def _read_token_limits(body: dict[str, Any], is_chat: bool) -> tuple[int | None, int]:
    max_tokens = body.get("max_tokens")
    if is_chat and body.get("max_completion_tokens") is not None:
        max_tokens = body["max_completion_tokens"]
    if not is_chat and max_tokens is None:
        max_tokens = COMPLETION_DEFAULT_TOKENS
    min_tokens = body.get("min_tokens") or 0
    if max_tokens is not None and max_tokens < 1:
        raise _make_late_error(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    if min_tokens < 0:
        raise _make_late_error(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if max_tokens is not None and min_tokens > max_tokens:
        raise _make_late_error(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    return max_tokens, min_tokens


def _read_logprobs(body: dict[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        count = body.get("logprobs")
        return count if isinstance(count, int) and not isinstance(count, bool) else None
    return (body.get("top_logprobs") or 0) if body.get("logprobs") else None


def _read_prompt_logprobs(body: dict[str, Any], logprobs: int | None) -> int | None:
    """Return the number of logprobs for each token of an echoed prompt. The answer has the same number."""
    count = body.get("prompt_logprobs")
    if count is None:
        return logprobs if body.get("echo") else None
    return int(count)


def _read_completion_prompts(prompt: Any) -> list[list[int]]:
    match prompt:
        case str():
            return [encode_text(prompt)]
        case [int(), *_]:
            return [list(prompt)]
        case [list() | str(), *_]:
            return [encode_text(one) if isinstance(one, str) else list(one) for one in prompt]
    raise _make_invalid_error("Input should be a valid string or list", "body.prompt")


def _render_chat_prompt(body: dict[str, Any], options: Options) -> list[list[int]]:
    params = body.get("kv_transfer_params") or {}
    if options.private_prompt_ids and _are_token_ids(private := params.get(PRIVATE_PROMPT_IDS)):
        return [private]
    given = params.get("prompt_token_ids")
    rule = options.profile.chat_prompt_ids
    if given is None or rule == "ignored":
        return [render_chat(body)]
    if rule == "text_only" and (body.get("echo") or _read_media(body)):
        return [render_chat(body)]
    if not _are_token_ids(given):
        if rule == "replace":
            return [render_chat(body)]
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        raise _make_late_error(message, "kv_transfer_params.prompt_token_ids")
    return [given]


def _are_token_ids(given: Any) -> TypeGuard[list[int]]:
    return isinstance(given, list) and bool(given) and all(type(token) is int and token >= 0 for token in given)


def _read_media(body: dict[str, Any]) -> tuple[str, ...]:
    contents = (message.get("content") for message in body["messages"])
    parts = (part for content in contents if isinstance(content, list) for part in content)
    media = (part for part in parts if isinstance(part, dict) and "text" not in part)
    return tuple(f"{crc32(json.dumps(part, sort_keys=True).encode()):08x}" for part in media)
