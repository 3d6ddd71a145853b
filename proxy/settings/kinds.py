"""Sections and types of options, such as a number of seconds, a secret, or a list of endpoints.

The text of a ValueError that begins with "must" is an expectation, to which the option's name and value are added.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from proxy.common.endpoints import Endpoint, parse_endpoints
from proxy.settings.connectors import CONNECTOR_TRAITS, read_connector_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic.fields import FieldInfo

# Policies as text, because settings are a lower layer than the balancer and cannot import it.
POLICIES: Final = {
    "least_load": "proxy.balancer.policies.least_seconds:LeastSeconds",
    "least_tokens": "proxy.balancer.policies.least_tokens:LeastTokens",
    "round_robin": "proxy.balancer.policies.least_tokens:RoundRobin",
    "power_of_two": "proxy.balancer.policies.least_tokens:PowerOfTwo",
    "random": "proxy.balancer.policies.least_tokens:RandomChoice",
    "length_groups": "proxy.balancer.policies.least_tokens:LengthGroups",
}
DECODE_POLICIES: Final = POLICIES | {"least_load": "proxy.balancer.policies.least_decode_seconds:LeastDecodeSeconds"}
"""Policies for decoders, which work in another way than those for prefillers."""
_POLICY_ADVICE: Final = {
    **dict.fromkeys(
        ("cache_aware", "kv_aware", "prefix_aware", "consistent_hash", "sticky_least_loaded", "manual", "session"),
        "least_load, which prefers instances with cached prefixes and keeps sessions together",
    ),
    "bucket": "length_groups",
    "least_request": "least_tokens",
}
"""Policies of other routers, with the closest policy of pdproxy."""

MAX_GATHER_SECONDS: Final = 0.2
"""The longest time for which tokens may wait for others. It is far below all limits of silence."""

# As browsers write an origin (RFC 6454 6.2): without a path, not even a slash.
_is_origin = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?").fullmatch
_is_http_url = re.compile(r"https?://[^/?#\s]+([/?#]\S*)?").fullmatch


class Section(BaseModel):
    """A frozen section without unknown options, whose fields are documented."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


def find_section(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field of the settings holds, or None if the field is an option."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def list_policy_names(quote: str = "") -> str:
    """Return the names of all routing policies as text for users."""
    *others, last = (f"{quote}{name}{quote}" for name in POLICIES)
    return f"{', '.join(others)} or {last}"


def check_policy_name(name: str) -> str:
    """Return the name of a routing policy. Raises ValueError for an unknown policy."""
    if name not in POLICIES:
        if advice := _POLICY_ADVICE.get(name):
            raise ValueError(f"must be {advice}")
        raise ValueError("must be " + list_policy_names(quote="'"))
    return name


def _reject_boolean(value: object) -> object:
    # YAML's `yes` would otherwise become 1.
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _cores_for_auto(value: object) -> object:
    return len(os.sched_getaffinity(0)) if value == "auto" else value


def _seconds_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds <= MAX_GATHER_SECONDS:
        raise ValueError(f"must be auto or a number of seconds from 0 to {MAX_GATHER_SECONDS:g}")
    return seconds


_BOOLEAN: Final = TypeAdapter(bool)


def _boolean_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        raise ValueError("must be auto, true or false") from None


def _uppercase_text(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _split_list(value: object) -> list[object]:
    """Return a comma-separated text, the form in environment variables, as a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list")
    return list(value)


def _parse_endpoint_list(value: object) -> list[Endpoint]:
    found: list[Endpoint] = []
    for item in _split_list(value):
        if isinstance(item, Endpoint):
            found.append(item)
        elif isinstance(item, str):
            found.extend(parse_endpoints(item))
        else:
            raise ValueError("must be a list of host:port")
    return found


def empty_is_none(value: object) -> object:
    return (value.strip() or None) if isinstance(value, str) else value


def check_header_value(text: str) -> None:
    """Raise ValueError, without the text, if it cannot be the value of an HTTP header."""
    if not (text.isascii() and text.isprintable()):
        raise ValueError("must be printable ASCII, as it is sent in an HTTP header")


def _check_secret_header(value: SecretStr | None) -> SecretStr | None:
    check_header_value(value.get_secret_value() if value else "")
    return value


def _check_http_url(value: str | None) -> str | None:
    if value is not None and not (_is_http_url(value) and value.isascii() and value.isprintable()):
        raise ValueError("must be a URL like http://localhost:4318/v1/traces")
    return value


def _check_absolute_path(value: str) -> str:
    if not value.startswith("/") or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("must be a path that begins with /")
    return value


def _parse_networks(value: object) -> list[object]:
    found: list[object] = []
    for item in _split_list(value):
        try:
            found.append(item if not isinstance(item, str) else str(ipaddress.ip_network(item)))
        except ValueError:
            raise ValueError(f"must be a list of networks like 10.0.0.0/8, not {item!r}") from None
    return found


def _check_origins(value: object) -> list[object]:
    found = _split_list(value)
    for item in found:
        if item != "*" and not (isinstance(item, str) and _is_origin(item)):
            raise ValueError("must be a list of origins like https://chat.example.com, without a path, or *")
    return found


def _check_model_aliases(value: object) -> list[object]:
    found = _split_list(value)
    for item in found:
        if not (isinstance(item, str) and all(item.rpartition("="))):
            raise ValueError("must be a list of name=served name, such as claude-*=kimi")
    return found


# Ranges of sampling parameters, as SGLang checks them (`SamplingParams.verify`). A repetition penalty is not allowed,
# because it depends on the tokens of the answer, so no answer could be resumed exactly.
_SAMPLING_CHECKS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value == -1 or (value >= 1 and value.is_integer()),
    "min_p": lambda value: 0 <= value <= 1,
}


def _check_sampling(value: object) -> list[object]:
    found = _split_list(value)
    for item in found:
        name, _, number = item.partition("=") if isinstance(item, str) else ("", "", "")
        try:
            is_right = _SAMPLING_CHECKS[name](float(number))
        except (KeyError, ValueError):
            is_right = False
        if not is_right:
            raise ValueError(
                f"must be a list of name=number, such as temperature=0.6, of {', '.join(_SAMPLING_CHECKS)}"
            )
    return found


def make_text_list_check(noun: str) -> Callable[[object], list[object]]:
    """Return a type for lists of texts that are not empty. `noun`: their name in errors."""

    def checked(value: object) -> list[object]:
        found = _split_list(value)
        if not all(isinstance(item, str) and item for item in found):
            raise ValueError(f"must be a list of {noun}")
        return found

    return checked


_reject_boolean_number = BeforeValidator(_reject_boolean)

Seconds = Annotated[float, _reject_boolean_number, Field(gt=0)]
Delay = Annotated[float, _reject_boolean_number, Field(ge=0)]
Ratio = Annotated[float, _reject_boolean_number, Field(ge=0, le=1)]
Natural = Annotated[int, _reject_boolean_number, Field(ge=0)]
Positive = Annotated[int, _reject_boolean_number, Field(ge=1)]
# vLLM-Ascend's example proxy tries once for the value 0.
Attempts = Annotated[int, _reject_boolean_number, Field(ge=0), AfterValidator(lambda count: max(count, 1))]
ListenPort = Annotated[int, _reject_boolean_number, Field(ge=0, le=65535)]
Workers = Annotated[
    int,
    BeforeValidator(_cores_for_auto),
    _reject_boolean_number,
    Field(ge=1),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
BooleanOrAuto = Annotated[Literal["auto"] | bool, BeforeValidator(_boolean_or_auto)]
GatherSeconds = Annotated[
    float | Literal["auto"],
    BeforeValidator(_seconds_or_auto),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": MAX_GATHER_SECONDS}, {"const": "auto"}]}),
]

Endpoints = Annotated[
    tuple[Endpoint, ...],
    BeforeValidator(_parse_endpoint_list),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
]
# Editors offer the names, and accept synonyms.
ConnectorName = Annotated[
    str,
    AfterValidator(read_connector_name),
    WithJsonSchema({"anyOf": [{"enum": [*CONNECTOR_TRAITS]}, {"type": "string"}]}),
]
PolicyName = Annotated[str, AfterValidator(check_policy_name), WithJsonSchema({"enum": [*POLICIES]})]
Networks = Annotated[tuple[str, ...], BeforeValidator(_parse_networks)]
ModelAliases = Annotated[tuple[str, ...], BeforeValidator(_check_model_aliases)]
Names = Annotated[tuple[str, ...], BeforeValidator(make_text_list_check("names, such as qwen*"))]
Sampling = Annotated[tuple[str, ...], BeforeValidator(_check_sampling)]
Origins = Annotated[tuple[str, ...], BeforeValidator(_check_origins)]
RouteGroups = Annotated[tuple[Literal["tokenizer", "pooling"], ...], BeforeValidator(_split_list)]
CollectorUrl = Annotated[str | None, BeforeValidator(empty_is_none), AfterValidator(_check_http_url)]
AbsolutePath = Annotated[str, AfterValidator(_check_absolute_path)]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_uppercase_text)]

Secret = Annotated[SecretStr | None, BeforeValidator(empty_is_none), AfterValidator(_check_secret_header)]
FilePath = Annotated[Path | None, BeforeValidator(empty_is_none)]
