"""Splits requests for several samples or several prompts into single units, and merges their answers.

The answer of a prefill leg has the KV parameters of one sequence (vLLM returns only those of the first). A handoff of
several sequences would pin KV cache that no decoder pulls, or decode every prompt with the KV cache of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest, GatewayError
from proxy.dialects.base import AnsweredAttempt, Unit, UnitRendering
from proxy.dialects.call import Call, estimate_text_tokens
from proxy.wire import openai
from proxy.wire.document import REMOVED
from proxy.wire.openai import Api, data_event, read_usage_counts
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.settings import Cost


# vLLM treats this value as no seed (`SamplingParams.__post_init__`).
_INVALID_SEED: Final = -1


def split_into_units(call: Call, cost: Cost, max_units: int) -> list[Unit]:
    """Return the units of a call, ordered by index: `prompt index * n + sample index`, as in the engines.

    Raises BadRequest for more than `max_units`.
    """
    prompts, samples = _prompt_list(call), call.samples_per_prompt
    if len(prompts) * samples > max_units:
        raise BadRequest(
            f"{len(prompts)} prompts x n={samples} is more than the limit of {max_units} answers", param="n"
        )
    if len(prompts) * samples == 1 and prompts[0] is None:
        return [Unit(call, 0, True)]
    seed = call.values.get("seed")
    units = []
    for prompt_index, prompt in enumerate(prompts):
        for sample in range(samples):
            changes: dict[str, object] = {"n": REMOVED, "best_of": REMOVED}
            if isinstance(seed, int) and seed != _INVALID_SEED and sample:
                # An engine that gets n gives sample i the seed `seed + i`. It is a signed 64-bit number.
                changes["seed"] = (seed + sample + 2**63) % 2**64 - 2**63
            tokens = None
            if prompt is not None:
                changes["prompt"] = prompt
                tokens = max(1, estimate_text_tokens(prompt, cost))
            units.append(Unit(call.make_unit_call(changes, tokens), prompt_index * samples + sample, sample == 0))
    return units


def has_single_choice(call: Call) -> bool:
    """Return whether the answer is one choice that is generated as one sequence of tokens."""
    values = call.values
    return (
        _prompt_list(call) == [None]
        and call.samples_per_prompt == 1
        and not (values.get("use_beam_search") or values.get("best_of"))
    )


def _prompt_list(call: Call) -> list[Any]:
    """Return the prompts of a request with a list of prompts; [None] for a single prompt, which stays unchanged."""
    if call.api is not Api.COMPLETIONS or not call.document.is_list_of_prompts("prompt"):
        return [None]
    prompts: list[Any] = call.values["prompt"]
    if not all(map(_is_single_prompt, prompts)):
        raise BadRequest("prompt must be text, token ids, or a list of either", param="prompt")
    return prompts or [None]


def _is_single_prompt(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) <= {int})


def merge_answers(units: Sequence[Unit], answers: Sequence[dict[str, Any]], alias: str | None = None) -> bytes:
    """Merge the units' answers, which are in the order of the units, into one answer. `alias`: see Call."""
    choices = [
        {**choice, "index": unit.index}
        for unit, answer in zip(units, answers, strict=True)
        for choice in answer["choices"]
    ]
    usage = merge_usage(units, [answer.get("usage") for answer in answers])
    changes: dict[str, Any] = {} if alias is None else {"model": alias}
    if "metrics" in answers[0]:
        changes["metrics"] = None  # they belong to one sequence, and vLLM reports none for several
    return dumps({**answers[0], **changes, "choices": choices, "usage": usage})


def merge_usage(units: Sequence[Unit], usages: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the sum of the units' usage, in which each prompt counts once; None if an engine reported none."""
    objects = [usage for usage in usages if isinstance(usage, dict)]
    if len(objects) < len(units):
        return None
    unit_counts = [read_usage_counts(usage) for usage in objects]
    firsts = [each for unit, each in zip(units, unit_counts, strict=True) if unit.is_first_sample]
    prompt = sum(each.prompt_tokens or 0 for each in firsts)
    completion = sum(each.completion_tokens or 0 for each in unit_counts)
    merged: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    of_firsts = [usage for unit, usage in zip(units, objects, strict=True) if unit.is_first_sample]
    if _all_usages_have(of_firsts, "prompt_tokens_details"):
        merged["prompt_tokens_details"] = {"cached_tokens": sum(each.cached_tokens or 0 for each in firsts)}
    if _all_usages_have(objects, "completion_tokens_details"):
        merged["completion_tokens_details"] = {
            "reasoning_tokens": sum(each.reasoning_tokens or 0 for each in unit_counts)
        }
    return merged


def _all_usages_have(usages: Sequence[dict[str, Any]], member_name: str) -> bool:
    """Return whether every usage has this member, as an object that is not empty."""
    return all(isinstance(usage.get(member_name), dict) and usage[member_name] for usage in usages)


class MergedStreams:
    """Rewrites the chunks of several streams as chunks of one stream, with the id of the first chunk.

    Args:
        units: The units of the request.
        has_usage_chunk: Whether the client asked for the usage chunk.
        alias: See Call.
    """

    def __init__(self, units: Sequence[Unit], *, has_usage_chunk: bool, alias: str | None = None) -> None:
        self._units = units
        self._has_usage_chunk = has_usage_chunk
        self._shared_members: dict[str, Any] = {} if alias is None else {"model": alias}

    def make_unit_rendering(self, unit: Unit) -> UnitRendering:
        return _MergedUnitRendering(self._shared_members, unit.index)

    def render_final_events(self, usages: Sequence[dict[str, Any] | None], last_payload: dict[str, Any]) -> bytes:
        """Return the usage chunk of all units; empty if the client wants none, or if an engine reported no usage."""
        usage = merge_usage(self._units, usages) if self._has_usage_chunk else None
        if usage is None:
            return b""
        return data_event({**last_payload, **self._shared_members, "choices": [], "usage": usage})

    def error_event(self, error: GatewayError) -> bytes:
        """Return the event of an error, in the form that engines use."""
        return openai.error_event(error)


class _MergedUnitRendering:
    def __init__(self, shared_members: dict[str, Any], index: int) -> None:
        self._shared_members = shared_members
        self._index = index

    def begin_decoder_answer(self, attempt: AnsweredAttempt, *, goes_on: bool) -> None:
        """Do nothing, because no event of the previous decoder waits here."""

    def render(self, payload: dict[str, Any]) -> bytes:
        """Return the payload with the members that all chunks of the answer have in common."""
        if "id" not in self._shared_members:
            self._shared_members.update((name, payload[name]) for name in ("id", "created") if name in payload)
        choices = [{**choice, "index": self._index} for choice in payload["choices"]]
        return data_event({**payload, **self._shared_members, "choices": choices})

    async def wait_for_remaining_events(self) -> bytes:
        """Return nothing, because no event waits for another engine."""
        return b""
