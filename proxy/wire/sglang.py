"""The shapes of SGLang's own API that the gateway reads or writes.

From SGLang `managers/io_struct.py` (requests), `managers/tokenizer_manager.py` (answers) and, for what is merged of the
two legs, its router's `mini_lb.py`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from proxy.common.errors import BadRequest
from proxy.wire.openai import RESERVED_FIELDS as RESERVED_OPENAI_FIELDS
from proxy.wire.python_json import dumps, loads
from proxy.wire.sse import EventSplitter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


RESERVED_FIELDS: Final = RESERVED_OPENAI_FIELDS | {
    "background",  # goes on when its client has left
    "decode_tp_size",
    "encoder_urls",
    "external_trace_header",
    "http_worker_ipc",
    "lora_id",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "received_time",
    "return_bytes",
}
"""Fields of a request that are the router's or internal to the engine, and so are removed when a client sends them."""

WHOLE_NUMBERS: Final = frozenset({"max_new_tokens", "min_new_tokens", "n", "beam_width"})
"""Members of `sampling_params` that the gateway acts on, or the engine together with those."""

DEFAULT_OUTPUT_TOKENS: Final = 128
"""`max_new_tokens` of a request that does not say."""

_PROMPTS: Final = ("text", "input_ids", "input_embeds")  # in this order the engine looks for one
# Members that may hold a list with one entry for each prompt of a list of prompts.
_PER_PROMPT: Final = (
    *("sampling_params", "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_sampling_mask", "sampling_logprobs_mode", "return_hidden_states", "watermark"),
    *("lora_path", "custom_logit_processor", "extra_key", "cache_salt"),
    *("multi_item_delimiter_indices", "token_indices_to_pool"),
)
OUTPUT_LOGPROBS: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Members of an answer's `meta_info` that have an entry for each of its tokens."""
_INPUT_LOGPROBS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


# Requests


class Item(NamedTuple):
    """One prompt and one sample of a request: what is different in it. `is_first`: of the samples of its prompt."""

    changes: dict[str, object]
    is_first: bool


def prompt_of(values: Mapping[str, Any]) -> Any:
    """The prompt or the list of prompts; None when there is none."""
    return next((values[name] for name in _PROMPTS if values.get(name) is not None), None)


def embeddings(values: Mapping[str, Any]) -> int | None:
    """How many embeddings, of one token each, the prompts consist of; None when they are text or token ids."""
    if values.get("text") is not None or values.get("input_ids") is not None:
        return None
    prompts = values.get("input_embeds")
    if not isinstance(prompts, list):
        return None
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, list)) if is_batch(values) else len(prompts)


def is_batch(values: Mapping[str, Any]) -> bool:
    """Whether the engine answers a list: to a list of prompts, be it of one, and to several samples."""
    return _is_list_of_prompts(values) or samples_of(values.get("sampling_params")) > 1


def samples_of(sampling_params: Any) -> int:
    """How many answers are wanted for each prompt. With beam search `n` is how many of one answer's beams are shown."""
    params = sampling_params[0] if isinstance(sampling_params, list) and sampling_params else sampling_params
    if not isinstance(params, dict) or (params.get("beam_width") or 1) != 1:
        return 1
    samples = params.get("n")
    return max(1, samples) if isinstance(samples, int) else 1


def output_limit(sampling_params: Any) -> int:
    """The most tokens an answer may have."""
    params = sampling_params[0] if isinstance(sampling_params, list) and sampling_params else sampling_params
    limit = params.get("max_new_tokens") if isinstance(params, dict) else None
    return limit if isinstance(limit, int) and limit >= 0 else DEFAULT_OUTPUT_TOKENS


def items_of(values: Mapping[str, Any], max_items: int) -> list[Item]:
    """A request as single prompts and samples, in the order of the engine's answers. Raises BadRequest.

    What is one prompt and one sample already is left as it is.
    """
    samples = samples_of(values.get("sampling_params"))
    prompts = prompt_of(values) if _is_list_of_prompts(values) else None
    count = (1 if prompts is None else len(prompts)) * samples
    if count > max_items:
        raise BadRequest(f"{count} answers are more than the limit of {max_items}", param="sampling_params")
    if count == 0:
        raise BadRequest("the list of prompts is empty")
    changes: list[dict[str, object]] = (
        [{}] if prompts is None else [_item(values, index) for index in range(len(prompts))]
    )
    return [
        Item(_single_sample(values, item) if samples > 1 else item, sample == 0)
        for item in changes
        for sample in range(samples)
    ]


ABOUT_PROMPT: Final = ("return_logprob", "logprob_start_len", "return_routed_experts", "sampling_params")
"""What decides whether only the prefiller has a part of what is asked for."""


def wants_prefillers_answer(values: Mapping[str, Any]) -> bool:
    """Whether only the prefiller has a part of what is asked for."""
    return bool(values.get("return_logprob") and _asks_for_input(values)) or bool(values.get("return_routed_experts"))


def is_about_prompt(values: Mapping[str, Any]) -> bool:
    """Whether one prompt's log probabilities are asked for, and at most one token besides."""
    params = values.get("sampling_params")
    return bool(values.get("return_logprob")) and _asks_for_input(values) and output_limit(params) <= 1


def _asks_for_input(values: Mapping[str, Any]) -> bool:
    first = values.get("logprob_start_len")
    return isinstance(first, int) and first >= 0  # by default only the output's are told


def _is_list_of_prompts(values: Mapping[str, Any]) -> bool:
    prompt = prompt_of(values)
    if not isinstance(prompt, list):
        return False
    if values.get("text") is not None:
        return True
    first = prompt[0] if prompt else None
    if values.get("input_ids") is not None:
        return isinstance(first, list)
    return isinstance(first, list) and bool(first) and isinstance(first[0], list)


def _item(values: Mapping[str, Any], index: int) -> dict[str, object]:
    name = next(name for name in _PROMPTS if values.get(name) is not None)
    prompts: Sequence[Any] = values[name]
    changes: dict[str, object] = {name: prompts[index]}
    for name in _PER_PROMPT:
        entries = values.get(name)
        if (
            not isinstance(entries, list)
            or not entries
            or (name == "token_ids_logprob" and isinstance(entries[0], int))
        ):
            continue
        if len(entries) != len(prompts):
            raise BadRequest(f"{name} has {len(entries)} entries for {len(prompts)} prompts", param=name)
        changes[name] = entries[index]
    return changes


def _single_sample(values: Mapping[str, Any], item: dict[str, object]) -> dict[str, object]:
    params = item.get("sampling_params", values["sampling_params"])
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object, or a list of them", param="sampling_params")
    return {**item, "sampling_params": {**params, "n": 1}}


# Answers


def usage_of(payload: Any) -> dict[str, Any] | None:
    """What an answer, or one event of it, tells of tokens, in OpenAI's words."""
    meta = payload.get("meta_info") if isinstance(payload, dict) else None
    if not isinstance(meta, dict):
        return None
    counts = {name: meta.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, "prompt_tokens_details": {"cached_tokens": meta.get("cached_tokens")}}


class PrefilledParts:
    """What the prefiller's answer adds to the decoder's: the log probabilities of the prompt, and its experts."""

    def __init__(self, answer: bytes) -> None:
        metas = (payload.get("meta_info") for payload in payloads_of(answer) if isinstance(payload, dict))
        self._meta: dict[str, Any] = next((meta for meta in metas if isinstance(meta, dict)), {})

    def complete(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The decoder's answer, or one event of it, with them."""
        meta = payload.get("meta_info")
        if not isinstance(meta, dict):
            return payload
        merged: dict[str, Any] = {}
        for name in _INPUT_LOGPROBS:
            first, second = self._meta.get(name), meta.get(name)
            if isinstance(first, list) and isinstance(second, list):
                merged[name] = first + second
        first, second = self._meta.get("routed_experts"), meta.get("routed_experts")
        if isinstance(first, str) and isinstance(second, str):
            merged["routed_experts"] = _joined_experts(first, second)
        return {**payload, "meta_info": {**meta, **merged}}


def _joined_experts(of_prompt: str, of_all: str) -> str:
    """Return the experts of a prompt, and behind them those of its answer. What is not base64 is left as it is."""
    try:
        first, second = b64decode(of_prompt), b64decode(of_all)
    except ValueError:
        return of_all
    return b64encode(first + second[len(first) :]).decode()


class LoneAnswer:
    """Makes a prefiller's answer, which no decoder continues, that of an ordinary engine. A prefiller gives one token
    even if none is wanted, and does not count it in the reason for the end (seen of SGLang 0.5.23).
    """

    def __init__(self, wanted_tokens: int) -> None:
        self._wanted_tokens = wanted_tokens

    def complete(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The prefiller's answer, or one event of it, as it was asked for."""
        meta = payload.get("meta_info")
        if not isinstance(meta, dict):
            return payload
        changes: dict[str, Any] = {}
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "length":
            changes["finish_reason"] = {**reason, "length": self._wanted_tokens}
        if self._wanted_tokens:
            return {**payload, "meta_info": {**meta, **changes}}
        changes |= {name: [] for name in OUTPUT_LOGPROBS if meta.get(name)}
        changes["completion_tokens"] = 0
        without = {name: type(payload[name])() for name in ("text", "output_ids") if payload.get(name)}
        return {**payload, **without, "meta_info": {**meta, **changes}}


# Errors inside answers with status 200, of the OpenAI API of SGLang and of its own API

ERROR_HEADERS: Final[Mapping[str, str]] = {"content-type": "application/json"}
"""Of an EngineError's body."""


class EngineError(NamedTuple):
    """What an engine told of a failure inside an answer with status 200. `body` is a JSON object with `error`."""

    status: int
    body: bytes
    is_wish: bool = False
    """The request was aborted by its name, or because the engine is paused: nothing broke."""


# SGLang 0.5.21 and later, `managers/schedule_batch.py`: with status 503, and with 500.
_LACKS_KV_MEMORY: Final = (b"Retracted under decode memory pressure", b"Retraction host KV pool exhausted")


def lacks_kv_memory(status: int, body: bytes | None) -> bool:
    """Whether an engine's error says that a decoder gave a request up for lack of KV memory."""
    return status >= 500 and body is not None and any(words in body for words in _LACKS_KV_MEMORY)


def error_in_answer(answer: bytes) -> EngineError | None:
    """The error that a prefiller's whole answer tells of, streamed or not; None when there is none.

    That somebody had its request aborted is one, too: no KV cache comes of it.
    """
    # The bytes cannot occur inside a JSON string, where the quotes would be escaped, so most answers are not parsed.
    if b'"error"' not in answer and b'"abort"' not in answer:
        return None
    for payload in payloads_of(answer):
        if error := error_of(payload):
            return error
        if isinstance(payload, dict) and any(map(_is_abort, _finishes(payload))):
            return _aborted({})._replace(is_wish=True)
    return None


def error_of(payload: Any) -> EngineError | None:
    """The error that an answer, or one event of it, stands for; None when it is none.

    `{"error": {..., "code": status}}` in a stream, or a finish `{"type": "abort", "message": ..., "status_code": ...}`
    of a native answer. Without a status it was somebody's wish, and is no error.
    """
    if not isinstance(payload, dict):
        return None
    told = payload.get("error")
    if told:
        return EngineError(_status(told.get("code") if isinstance(told, dict) else None), dumps(payload))
    meta = payload.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and _is_abort(reason) and reason.get("status_code") is not None:
        return _aborted(reason)
    return None


def payloads_of(answer: bytes) -> Iterator[Any]:
    """The JSON of a whole answer, or of the events of a stream; what is neither is left out."""
    for data in [event.data for event in EventSplitter().feed(answer)] if answer.startswith(b"data:") else [answer]:
        try:
            yield loads(data or b"null")
        except orjson.JSONDecodeError:
            continue


def _finishes(payload: dict[str, Any]) -> Iterator[Any]:
    meta, choices = payload.get("meta_info"), payload.get("choices")
    if isinstance(meta, dict):
        yield meta.get("finish_reason")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice.get("finish_reason")


def _is_abort(finish: Any) -> bool:
    return finish == "abort" or (isinstance(finish, dict) and finish.get("type") == "abort")


def _aborted(reason: dict[str, Any]) -> EngineError:
    status = _status(reason.get("status_code"))
    message = reason.get("message") or "the request was aborted"
    told = {"object": "error", "message": message, "type": reason.get("err_type") or "abort", "param": None}
    return EngineError(status, dumps({"error": {**told, "code": status}}))


def _status(code: Any) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500
