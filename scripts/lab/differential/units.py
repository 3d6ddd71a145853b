"""What a request for several answers stands for: requests with one prompt and one sample each.

Said once more, and not taken from the gateway, because this is what it is measured by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

_PROMPTS = ("prompt", "text", "input_ids")
# Members of a body that have a list with an entry for each prompt, or for each answer.
_LISTS = ("sampling_params", "image_data", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_NO_SEED = -1


def prompts(asked: Mapping[str, Any]) -> int:
    """How many there are in a body."""
    listed = _listed(asked)
    return 1 if listed is None else len(asked[listed])


def answers(asked: Mapping[str, Any]) -> int:
    """How many are wanted."""
    return prompts(asked) * _samples(asked)


def is_several(asked: Mapping[str, Any]) -> bool:
    """Whether more than one answer is wanted, or it is spelled as if there were."""
    return _listed(asked) is not None or _samples(asked) > 1


def units(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The single requests."""
    listed, samples = _listed(asked), _samples(asked)
    single = {name: value for name, value in asked.items() if name not in ("n", "best_of")}
    for number, (prompt, sample) in enumerate(product(range(prompts(asked)), range(samples))):
        unit = dict(single)
        if listed is not None:
            unit[listed] = asked[listed][prompt]
        for name in _LISTS:
            if isinstance(asked.get(name), list):
                unit[name] = asked[name][number * len(asked[name]) // answers(asked)]
        if isinstance(asked.get("seed"), int) and asked["seed"] != _NO_SEED:
            unit["seed"] = asked["seed"] + sample
        if samples > 1 and "sampling_params" in unit:
            unit["sampling_params"] = {**unit["sampling_params"], "n": 1}
        yield unit


def _listed(asked: Mapping[str, Any]) -> str | None:
    """The member that is a list of prompts. A list of numbers is one prompt."""
    for name in _PROMPTS:
        value = asked.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return name
    return None


def _samples(asked: Mapping[str, Any]) -> int:
    params = asked.get("sampling_params")
    if isinstance(params, list):
        params = params[0]
    return asked.get("n") or (params or {}).get("n") or 1
