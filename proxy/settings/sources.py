"""Reads options from the environment and a YAML file.

Both become a flat table from dotted options such as `listen.port` to a value and its origin, so that a later source
replaces entries. Unknown names are refused; the model checks types.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from proxy.settings.kinds import Section, find_section
from proxy.settings.mistakes import SettingsError, join_alternatives, printable_word, suggest_known_word
from proxy.settings.model import Settings
from proxy.settings.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo


VARIABLE_PREFIX: Final = "PROXY_"
CONFIG_VARIABLE: Final = "PROXY_CONFIG"
"""The environment variable with the path of the configuration file."""

# Variables that Kubernetes sets for services whose name is, or begins with, `proxy`.
_NAME_FOR_A_SERVICE: Final = re.compile(r".*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT_[0-9]+_(TCP|UDP|SCTP)(_.*)?")
_VALUE_FOR_A_SERVICE: Final = re.compile(r"(tcp|udp|sctp)://.*")
# similarity of the shortest option, PROXY_DECODE, with one wrong letter
_MIN_SIMILARITY: Final = 0.82


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and its origin: `--port`, `PROXY_LISTEN__PORT`, or the path of a file."""

    value: object
    origin: str
    in_file: bool = False


def _iterate_options(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if section := find_section(field):
            yield from _iterate_options(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


OPTIONS: Final[Mapping[str, FieldInfo]] = dict(_iterate_options(Settings))
SECTION_NAMES: Final = frozenset(option.rpartition(".")[0] for option in OPTIONS if "." in option)
SECRET_OPTIONS: Final = ("auth.engine_api_key", "auth.admin_key", "replicas.password")
TLS_FILE_OPTIONS: Final = (
    *(f"{section}.tls_{name}" for section in ("listen", "admin") for name in ("certificate", "key", "client_ca")),
    *("engines.client_certificate", "engines.client_key", "engines.ca_file"),
)
"""Options that name files in PEM format."""
PATH_OPTIONS: Final = (
    *(f"{option}_file" for option in SECRET_OPTIONS),
    "auth.client_keys_file",
    "admin.usage_file",
    "kubernetes.token_file",
    "kubernetes.ca_file",
    *TLS_FILE_OPTIONS,
)
PATH_LIST_OPTIONS: Final = ("discovery.files",)


def read_option(settings: Settings, name: str) -> Any:
    """Return the value of a dotted option."""
    return reduce(getattr, name.split("."), settings)


def variable_name(option: str) -> str:
    """Return the environment variable of an option: `listen.port` is PROXY_LISTEN__PORT."""
    return VARIABLE_PREFIX + option.upper().replace(".", "__")


def _option_of_variable(name: str) -> str:
    """Return the option that an environment variable sets."""
    return name.removeprefix(VARIABLE_PREFIX).replace("__", ".").lower()


def read_environment(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the options in `PROXY_…` variables that are not empty.

    Raises SettingsError for a variable that names no option of a section. Other unknown variables are ignored:
    Kubernetes sets PROXY_PORT and others for a service named proxy.
    """
    found: dict[str, SourcedValue] = {}
    for name, value in environ.items():
        if not name.startswith(VARIABLE_PREFIX) or not value.strip():
            continue
        option = _option_of_variable(name)
        if option in OPTIONS and name == variable_name(option):
            found[option] = SourcedValue(value.strip(), name)
        elif option in SECTION_NAMES:
            example = next(known for known in OPTIONS if known.startswith(f"{option}."))
            raise SettingsError(f"{name} is a section: set its options, such as {variable_name(example)}")
        elif option.partition(".")[0] in SECTION_NAMES:
            raise SettingsError(
                f"{printable_word(name)} names no option{suggest_known_word(name, map(variable_name, OPTIONS))}"
            )
    return found


def find_misspelled_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Return a sentence for each ignored variable whose name resembles that of an option.

    It differs in letter case, in the number of underscores, or by a misspelling.
    """
    meant = {_simplify_name(name): name for name in (CONFIG_VARIABLE, *map(variable_name, OPTIONS))}
    for name, value in environ.items():
        if not name.upper().startswith(VARIABLE_PREFIX) or name in meant.values() or not value.strip():
            continue
        if _option_of_variable(name).partition(".")[0] in SECTION_NAMES:
            continue  # refused, and not ignored
        if _NAME_FOR_A_SERVICE.fullmatch(name) or _VALUE_FOR_A_SERVICE.fullmatch(value):
            continue
        if near := difflib.get_close_matches(_simplify_name(name), meant, n=1, cutoff=_MIN_SIMILARITY):
            yield f"{printable_word(name)} is no option and is ignored: did you mean {meant[near[0]]}?"


def _simplify_name(name: str) -> str:
    """Return the part of a variable's name that is compared, without the common prefix."""
    return re.sub("_+", "_", name.upper()).removeprefix(VARIABLE_PREFIX)


def read_yaml_options(path: str) -> dict[str, SourcedValue]:
    """Return the options of a YAML file. Raises SettingsError."""
    tree = read_yaml(path)
    if not isinstance(tree, dict | None):
        raise SettingsError(f"{path} must hold options such as `workers: 2`, not {_describe_yaml_kind(tree)}")
    return dict(_flatten_options(tree or {}, path))


def _flatten_options(tree: dict[object, object], path: str, prefix: str = "") -> Iterator[tuple[str, SourcedValue]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in OPTIONS:
            yield name, SourcedValue(value, path, in_file=True)
        elif name not in SECTION_NAMES:
            raise SettingsError(f"{path}: unknown option {printable_word(name)}{_suggest_option(name)}")
        elif isinstance(value, dict):
            yield from _flatten_options(value, path, f"{name}.")
        elif value is not None:  # only comments below the name of a section
            raise SettingsError(f"{path}: {name} is a section: write its options indented below it")


def _suggest_option(name: str) -> str:
    """Return a suggestion for an unknown option: an option of this name in another section, or a similar name."""
    last = name.rpartition(".")[2]
    if found := [option for option in OPTIONS if option.rpartition(".")[2] == last]:
        return f" (did you mean {join_alternatives(found)}?)"
    return suggest_known_word(name, [*OPTIONS, *SECTION_NAMES])


def read_key_file(what: str, path: Path) -> str:
    """Return the key in a file. Errors name the key `what`. Raises SettingsError."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{what} {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{what} {path} is not text") from None
    except ValueError:  # a null byte
        raise SettingsError(f"{what} must be a path") from None
    if not key:
        raise SettingsError(f"{what} {path} is empty")
    return key


def _describe_yaml_kind(tree: object) -> str:
    """Return the kind of a file's content, without any word of it."""
    return "a list" if isinstance(tree, list) else "a single value"


# Options from OpenTelemetry's environment variables, and the check for its SDK.
#
# Names and meanings: opentelemetry.io/docs/specs/otel, "Environment Variable Specification" and "OTLP Exporter
# Configuration". The SDK itself reads all other variables, such as headers, timeouts, certificates and the sampler.


OTEL_ENDPOINT_OPTION: Final = "tracing.endpoint"
_OTEL_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_OTEL_BASE_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OTEL_TRACES_PATH: Final = "v1/traces"
_OTEL_MODULES: Final = "opentelemetry.exporter.otlp.proto.http"
_OTEL_MISSING_WARNING: Final = "is given, but the extra otel is not installed: pip install '.[otel]' in the checkout"


def read_otel_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, SourcedValue]]:
    """Return the collector's options if the environment names a collector for traces."""
    if _has_variable_value(environ, "OTEL_SDK_DISABLED", "true") or _has_variable_value(
        environ, "OTEL_TRACES_EXPORTER", "none"
    ):
        return
    if full := environ.get(_OTEL_TRACES_ENDPOINT, "").strip():
        yield OTEL_ENDPOINT_OPTION, SourcedValue(full, _OTEL_TRACES_ENDPOINT)
    elif base := environ.get(_OTEL_BASE_ENDPOINT, "").strip():
        yield OTEL_ENDPOINT_OPTION, SourcedValue(f"{base.rstrip('/')}/{_OTEL_TRACES_PATH}", _OTEL_BASE_ENDPOINT)


def drop_missing_tracing(values: Mapping[str, SourcedValue]) -> tuple[dict[str, SourcedValue], tuple[str, ...]]:
    """Return the options without tracing if the SDK is not installed, and warnings.

    Raises SettingsError if the gateway's own options ask for tracing.
    """
    found = values.get(OTEL_ENDPOINT_OPTION)
    if found is None or not found.value or is_otel_installed():
        return dict(values), ()
    if found.origin not in (_OTEL_TRACES_ENDPOINT, _OTEL_BASE_ENDPOINT):
        place = f"{found.origin}: {OTEL_ENDPOINT_OPTION}" if found.in_file else found.origin
        raise SettingsError(f"{place} {_OTEL_MISSING_WARNING}")
    kept = {option: value for option, value in values.items() if option != OTEL_ENDPOINT_OPTION}
    return kept, (f"{found.origin} {_OTEL_MISSING_WARNING}; nothing is traced",)


def warn_of_other_protocol(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence if the environment names an OTLP protocol that pdproxy does not support."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (value := environ.get(name, "").strip()) and value != "http/protobuf":
            given = printable_word(value)
            yield f"{name} is {given}, but traces are only sent as http/protobuf (port 4318 of most collectors)"
            return


def is_otel_installed() -> bool:
    """Return whether the packages for OpenTelemetry are installed."""
    try:
        return find_spec(_OTEL_MODULES) is not None
    except ModuleNotFoundError:
        return False


def _has_variable_value(environ: Mapping[str, str], name: str, value: str) -> bool:
    return environ.get(name, "").strip().lower() == value
