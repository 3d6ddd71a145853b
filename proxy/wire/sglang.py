"""Reads and writes requests, answers and errors of the native API of SGLang.

The formats are from SGLang: `managers/io_struct.py` (requests), `managers/tokenizer_manager.py` (answers), and
`mini_lb.py` of its router (merging the answers of both legs).
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
    "background",  # such a request continues after its client disconnects
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
"""Fields for routers, and internal fields of the engine. The gateway removes them from clients' requests."""

WHOLE_NUMBERS: Final = frozenset({"max_new_tokens", "min_new_tokens", "n", "beam_width"})
"""Names of the members of `sampling_params` that are whole numbers and that the gateway uses."""

DEFAULT_OUTPUT_TOKENS: Final = 128
"""Default of `max_new_tokens`."""

_PROMPT_MEMBERS: Final = ("text", "input_ids", "input_embeds")  # in the order in which the engine looks for them
# Members that may hold a list with one entry for each prompt of a list of prompts.
_MEMBERS_PER_PROMPT: Final = (
    *("sampling_params", "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_sampling_mask", "sampling_logprobs_mode", "return_hidden_states", "watermark"),
    *("lora_path", "custom_logit_processor", "extra_key", "cache_salt"),
    *("multi_item_delimiter_indices", "token_indices_to_pool"),
)
OUTPUT_LOGPROBS: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Members of `meta_info` that have one entry for each token of the answer."""
_INPUT_LOGPROBS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


# Requests


class GenerateItem(NamedTuple):
    """One sample of one prompt of a request to SGLang's `/generate`."""

    changes: dict[str, object]
    """The members that this item changes in the request."""
    is_first_sample: bool
    """Whether this is the first sample of its prompt."""


def read_prompt(values: Mapping[str, Any]) -> Any:
    """Return the prompt or the list of prompts, or None without one."""
    return next((values[name] for name in _PROMPT_MEMBERS if values.get(name) is not None), None)


def count_embeddings(values: Mapping[str, Any]) -> int | None:
    """Count the embeddings of all prompts, one for each token. Return None if the prompts are text or token IDs."""
    if values.get("text") is not None or values.get("input_ids") is not None:
        return None
    prompts = values.get("input_embeds")
    if not isinstance(prompts, list):
        return None
    return (
        sum(len(prompt) for prompt in prompts if isinstance(prompt, list)) if is_batch_request(values) else len(prompts)
    )


def is_batch_request(values: Mapping[str, Any]) -> bool:
    """Return whether the engine answers with a list, as it does for lists of prompts and for several samples."""
    return _is_list_of_prompts(values) or read_sample_count(values.get("sampling_params")) > 1


def read_sample_count(sampling_params: Any) -> int:
    """Return the number of answers for each prompt. With beam search it is 1, and `n` is the number of beams."""
    params = sampling_params[0] if isinstance(sampling_params, list) and sampling_params else sampling_params
    if not isinstance(params, dict) or (params.get("beam_width") or 1) != 1:
        return 1
    samples = params.get("n")
    return max(1, samples) if isinstance(samples, int) else 1


def read_output_limit(sampling_params: Any) -> int:
    """Return the maximum number of tokens of an answer of SGLang, by its `sampling_params`."""
    params = sampling_params[0] if isinstance(sampling_params, list) and sampling_params else sampling_params
    limit = params.get("max_new_tokens") if isinstance(params, dict) else None
    return limit if isinstance(limit, int) and limit >= 0 else DEFAULT_OUTPUT_TOKENS


def split_into_items(values: Mapping[str, Any], max_items: int) -> list[GenerateItem]:
    """Return one item for each sample of each prompt, in the order of the answers. Raises BadRequest.

    The item of a request with one prompt and one sample has no changes.
    """
    samples = read_sample_count(values.get("sampling_params"))
    prompts = read_prompt(values) if _is_list_of_prompts(values) else None
    count = (1 if prompts is None else len(prompts)) * samples
    if count > max_items:
        raise BadRequest(f"{count} answers are more than the limit of {max_items}", param="sampling_params")
    if count == 0:
        raise BadRequest("the list of prompts is empty")
    changes: list[dict[str, object]] = (
        [{}] if prompts is None else [_item_members(values, index) for index in range(len(prompts))]
    )
    return [
        GenerateItem(_single_sample_members(values, item) if samples > 1 else item, sample == 0)
        for item in changes
        for sample in range(samples)
    ]


MEMBERS_NEEDING_PREFILL_ANSWER: Final = (
    "return_logprob",
    "logprob_start_len",
    "return_routed_experts",
    "sampling_params",
)
"""Members that decide whether the answer needs a part that only the prefiller reports."""


def needs_prefill_answer(values: Mapping[str, Any]) -> bool:
    """Return whether the answer needs a part that only the prefiller reports."""
    return bool(values.get("return_logprob") and _asks_for_prompt_logprobs(values)) or bool(
        values.get("return_routed_experts")
    )


def asks_only_for_prompt_logprobs(values: Mapping[str, Any]) -> bool:
    """Return whether the request asks for log probabilities of the prompt and at most one token."""
    params = values.get("sampling_params")
    return bool(values.get("return_logprob")) and _asks_for_prompt_logprobs(values) and read_output_limit(params) <= 1


def _asks_for_prompt_logprobs(values: Mapping[str, Any]) -> bool:
    first = values.get("logprob_start_len")
    return isinstance(first, int) and first >= 0  # the default covers the output only


def _is_list_of_prompts(values: Mapping[str, Any]) -> bool:
    prompt = read_prompt(values)
    if not isinstance(prompt, list):
        return False
    if values.get("text") is not None:
        return True
    first = prompt[0] if prompt else None
    if values.get("input_ids") is not None:
        return isinstance(first, list)
    return isinstance(first, list) and bool(first) and isinstance(first[0], list)


def _item_members(values: Mapping[str, Any], index: int) -> dict[str, object]:
    name = next(name for name in _PROMPT_MEMBERS if values.get(name) is not None)
    prompts: Sequence[Any] = values[name]
    changes: dict[str, object] = {name: prompts[index]}
    for name in _MEMBERS_PER_PROMPT:
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


def _single_sample_members(values: Mapping[str, Any], item: dict[str, object]) -> dict[str, object]:
    params = item.get("sampling_params", values["sampling_params"])
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object, or a list of them", param="sampling_params")
    return {**item, "sampling_params": {**params, "n": 1}}


# Answers


def usage_of_event(payload: Any) -> dict[str, Any] | None:
    """Return the token counts of an answer, or of one event, as a usage object of OpenAI; None without any."""
    meta = payload.get("meta_info") if isinstance(payload, dict) else None
    if not isinstance(meta, dict):
        return None
    counts = {name: meta.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, "prompt_tokens_details": {"cached_tokens": meta.get("cached_tokens")}}


class PrefillerMeta:
    """The log probabilities and experts of a prompt, which only the prefiller reports.

    Only the prefiller reports them, so they are added to the answer.
    """

    def __init__(self, answer: bytes) -> None:
        metas = (payload.get("meta_info") for payload in iterate_payloads(answer) if isinstance(payload, dict))
        self._meta: dict[str, Any] = next((meta for meta in metas if isinstance(meta, dict)), {})

    def complete_event(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the decoder's answer, or one event of it, with the prefiller's parts added."""
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
            merged["routed_experts"] = _join_routed_experts(first, second)
        return {**payload, "meta_info": {**meta, **merged}}


def _join_routed_experts(prompt_experts: str, all_experts: str) -> str:
    """Return the experts of a prompt, followed by the experts of its answer.

    If a text is not base64, it is returned unchanged.
    """
    try:
        first, second = b64decode(prompt_experts), b64decode(all_experts)
    except ValueError:
        return all_experts
    return b64encode(first + second[len(first) :]).decode()


class LonePrefillerMeta:
    """Converts the answer of a prefiller without a decoder to the form of an ordinary engine's answer.

    A prefiller returns one token even if none was requested, and does not count it in the finish reason (seen with
    SGLang 0.5.23).
    """

    def __init__(self, wanted_tokens: int) -> None:
        self._wanted_tokens = wanted_tokens

    def complete_event(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the prefiller, or one event of it, with the requested number of tokens."""
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


# Errors inside answers with status 200, of the OpenAI API and the native API of SGLang

ERROR_HEADERS: Final[Mapping[str, str]] = {"content-type": "application/json"}
"""The HTTP headers that are sent with the body of an EngineError."""


class EngineError(NamedTuple):
    """An error that an engine reported inside an answer with status 200."""

    status: int
    """The HTTP status that fits the error."""
    body: bytes
    """A JSON object with the member `error`."""
    is_requested: bool = False
    """Whether an operator caused the error, by aborting the request or by pausing the engine.

    The engine did not fail.
    """


# Messages of SGLang 0.5.21 and later in `managers/schedule_batch.py`, with status 503 and 500.
_LACKS_KV_MEMORY: Final = (b"Retracted under decode memory pressure", b"Retraction host KV pool exhausted")


def reports_lack_of_kv_memory(status: int, body: bytes | None) -> bool:
    """Return whether an error says that a decoder abandoned a request for lack of KV memory."""
    return status >= 500 and body is not None and any(words in body for words in _LACKS_KV_MEMORY)


def find_answer_error(answer: bytes) -> EngineError | None:
    """Return the error inside the whole answer of a prefiller, streamed or not, or None.

    A request that an operator aborted is an error too, because no KV cache will arrive.
    """
    # These bytes cannot occur inside a JSON string, where quotes are escaped. So most answers need no parsing.
    if b'"error"' not in answer and b'"abort"' not in answer:
        return None
    for payload in iterate_payloads(answer):
        if error := find_event_error(payload):
            return error
        if isinstance(payload, dict) and any(map(_is_abort_reason, _finish_reasons(payload))):
            return _make_abort_error({})._replace(is_requested=True)
    return None


def find_event_error(payload: Any) -> EngineError | None:
    """Return the error in an answer, or in one event of it, or None.

    A stream has `{"error": {..., "code": status}}`. A native answer has the finish reason
    `{"type": "abort", "message": ..., "status_code": ...}`. Without a status an operator aborted the request, which is
    not an error.
    """
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    if error:
        return EngineError(_read_status(error.get("code") if isinstance(error, dict) else None), dumps(payload))
    meta = payload.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and _is_abort_reason(reason) and reason.get("status_code") is not None:
        return _make_abort_error(reason)
    return None


def iterate_payloads(answer: bytes) -> Iterator[Any]:
    """Yield the JSON values of a whole answer, or of the events of a stream. Other data is skipped."""
    for data in (
        [event.data for event in EventSplitter().split_chunk(answer)] if answer.startswith(b"data:") else [answer]
    ):
        try:
            yield loads(data or b"null")
        except orjson.JSONDecodeError:
            continue


def _finish_reasons(payload: dict[str, Any]) -> Iterator[Any]:
    meta, choices = payload.get("meta_info"), payload.get("choices")
    if isinstance(meta, dict):
        yield meta.get("finish_reason")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice.get("finish_reason")


def _is_abort_reason(finish: Any) -> bool:
    return finish == "abort" or (isinstance(finish, dict) and finish.get("type") == "abort")


def _make_abort_error(reason: dict[str, Any]) -> EngineError:
    status = _read_status(reason.get("status_code"))
    message = reason.get("message") or "the request was aborted"
    error = {"object": "error", "message": message, "type": reason.get("err_type") or "abort", "param": None}
    return EngineError(status, dumps({"error": {**error, "code": status}}))


def _read_status(code: Any) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500
