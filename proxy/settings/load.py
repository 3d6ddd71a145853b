"""Loading of settings: command line > environment > YAML file > default.

The origin of each value is kept. The keys of clients are read together with the settings, so that both are valid or
neither is used. Errors are raised as SettingsError, in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import ValidationError

from proxy.settings import cli
from proxy.settings.client_keys import ClientKey, load_client_keys
from proxy.settings.mistakes import SettingsError, explain_mistakes
from proxy.settings.model import Settings
from proxy.settings.sources import (
    CONFIG_VARIABLE,
    OPTIONS,
    PATH_LIST_OPTIONS,
    PATH_OPTIONS,
    SECRET_OPTIONS,
    SourcedValue,
    drop_missing_tracing,
    find_misspelled_variables,
    read_environment,
    read_key_file,
    read_option,
    read_otel_variables,
    read_yaml_options,
    variable_name,
    warn_of_other_protocol,
)
from proxy.settings.tls import TlsFiles, load_tls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


DEFAULT_ORIGIN: Final = "default"
# A URL may contain a password, although it should not.
_OPTIONS_NEVER_SHOWN: Final = (*SECRET_OPTIONS, "replicas.url", "tracing.endpoint")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, the origin of each option (a flag, a variable, a file or `default`), and the keys of clients."""

    settings: Settings
    origins: Mapping[str, str]
    client_keys: tuple[ClientKey, ...] = ()
    warnings: tuple[str, ...] = ()
    """Sentences about values that are probably mistakes."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """The certificates and keys of the settings."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The changes that one reload of the configuration made."""

    options: tuple[str, ...] = ()
    """Names of the options with new values."""
    added: tuple[str, ...] = ()
    """Names of the configured instances that joined."""
    removed: tuple[str, ...] = ()
    """Names of the configured instances that drain now."""

    def __str__(self) -> str:
        told = (("changed", self.options), ("added", self.added), ("removed", self.removed))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in told if names) or "nothing has changed"


def load_settings(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    needs_backends: bool = True,
    command: str | None = None,
    paths_begin: Path | None = None,
) -> LoadedSettings:
    """Load and check all settings. Raises SettingsError.

    Args:
        argv: Command line without the program's name.
        environ: Environment variables.
        needs_backends: False: accept settings without engines, and read neither the keys of clients nor certificates.
        command: Sub-command to which the flags belong; None: the program itself.
        paths_begin: Directory of relative paths in a file; None: the file's directory.
    """
    line = cli.parse_command_line(argv, command)
    warnings = (*line.warnings, *find_misspelled_variables(environ))
    try:
        loaded = _combine_sources(line, environ, needs_backends, paths_begin)
        return replace(loaded, warnings=(*warnings, *loaded.warnings))
    except SettingsError as error:
        # an ignored option may be the missing one
        raise SettingsError("; ".join((str(error), *warnings))) from None


def _warn_of_options_without_effect(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each option that lets decoders compute prompts, if the other options prevent it."""
    kv = settings.kv
    if settings.connector != "auto" and not settings.connector_traits.has_prefill_first:
        for option, value in (("prefill_min_tokens", kv.prefill_min_tokens), ("skip_prefill", kv.skip_prefill)):
            if value and value != "auto":
                yield f"kv.{option} has no effect with connector {settings.connector}: prefillers compute all prompts"
    elif kv.skip_prefill is True and (policy := settings.balance.prefill_policy) != "least_load":
        yield f"kv.skip_prefill has no effect with prefill policy {policy}: it needs least_load"


def _combine_sources(
    line: cli.CommandLine, environ: Mapping[str, str], needs_backends: bool, paths_begin: Path | None
) -> LoadedSettings:
    variables = read_environment(environ)
    path = line.config or environ.get(CONFIG_VARIABLE, "").strip()
    values = {
        **dict(read_otel_variables(environ)),
        **(read_yaml_options(path) if path else {}),
        **variables,
        **line.values,
    }
    values, warnings = drop_missing_tracing(values)
    values |= {option: _split_list_value(values[option]) for option in PATH_LIST_OPTIONS if option in values}
    values |= {
        option: _make_paths_absolute(values[option], paths_begin)
        for option in (*PATH_OPTIONS, *PATH_LIST_OPTIONS)
        if option in values
    }
    settings = _validate_settings(values)
    keys = dict(_read_key_files(settings, values, environ))
    if keys:
        values |= keys
        settings = _validate_settings(values)
    origins = {option: values[option].origin if option in values else DEFAULT_ORIGIN for option in OPTIONS}
    if settings.discovery.dns_names and find_spec("dns") is None:
        raise SettingsError("discovery by DNS needs the extra dns: pip install '.[dns]' in the checkout")
    if settings.replicas.url is not None and find_spec("redis") is None:
        raise SettingsError("replicas.url needs the extra redis: pip install '.[redis]' in the checkout")
    if settings.kv_events.endpoint is not None and find_spec("zmq") is None:
        raise SettingsError("kv_events.endpoint needs the extra events: pip install '.[events]' in the checkout")
    if settings.tracing.endpoint is not None:
        warnings += tuple(warn_of_other_protocol(environ))
    warnings += tuple(_warn_of_options_without_effect(settings))
    if not needs_backends:
        return LoadedSettings(settings, origins, warnings=warnings)
    _require_backends(settings)
    keys_file = settings.auth.client_keys_file
    client_keys = load_client_keys(keys_file) if keys_file else ()
    return LoadedSettings(settings, origins, client_keys, warnings, load_tls(settings))


def _split_list_value(found: SourcedValue) -> SourcedValue:
    """Return a comma-separated value as a list."""
    return replace(found, value=found.value.split(",")) if isinstance(found.value, str) else found


def _make_paths_absolute(found: SourcedValue, begins: Path | None) -> SourcedValue:
    """Return an absolute path for a relative one in a file, so that it is valid in every working directory.

    `begins`: directory of relative paths; None: the file's directory. Other relative paths refer to the working
    directory.
    """
    directory = (begins or Path(found.origin).absolute().parent) if found.in_file else Path.cwd()

    def absolute(path: object) -> object:
        return str(directory / path.strip()) if isinstance(path, str) and path.strip() else path

    value = found.value
    return replace(found, value=[absolute(path) for path in value] if isinstance(value, list) else absolute(value))


def _validate_settings(values: Mapping[str, SourcedValue]) -> Settings:
    tree: dict[str, object] = {}
    for option, found in values.items():
        section, _, name = option.rpartition(".")
        branch = tree.setdefault(section, {}) if section else tree
        assert isinstance(branch, dict)
        branch[name] = found.value

    def name_of(option: str) -> str:
        found = values.get(option)
        if found is None:
            return option
        return f"{found.origin}: {option}" if found.in_file else found.origin

    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(explain_mistakes(error, name_of, _OPTIONS_NEVER_SHOWN)) from None


def _read_key_files(
    settings: Settings, values: Mapping[str, SourcedValue], environ: Mapping[str, str]
) -> Iterator[tuple[str, SourcedValue]]:
    """Read keys from files, and set the default of the engine key."""
    for option in SECRET_OPTIONS:
        path: Path | None = read_option(settings, f"{option}_file")
        is_given = option in values and values[option].value is not None
        if path is not None:
            if is_given:
                raise SettingsError(f"{option} and {option}_file are both given: give only one of them")
            yield option, SourcedValue(read_key_file(f"{option}_file", path), str(path))
        elif option == "auth.engine_api_key" and not is_given and (key := environ.get("OPENAI_API_KEY")):
            yield option, SourcedValue(key, "OPENAI_API_KEY")


def _require_backends(settings: Settings) -> None:
    missing = {
        role: noun
        for role, noun in (("prefill", "prefiller"), ("decode", "decoder"))
        if not settings.instances_of(role) and settings.needs(role) and not settings.may_find(role)
    }
    if missing:
        nouns = " and ".join(f"no {noun}" for noun in missing.values())
        flags = " and ".join(f"--{role}" for role in missing)
        variables = " and ".join(variable_name(role) for role in missing)
        raise SettingsError(f"{nouns} given: use {flags}, {variables} or a --config file")


# The current settings as YAML, each option with its origin as a comment, and with masked keys.


def write_yaml(loaded: LoadedSettings) -> str:
    """Return one line per option, and one line per item of a list. Without keys, it loads as the same settings."""
    tree: dict[str, Any] = loaded.settings.model_dump(mode="json")
    lines: list[str] = []
    section = ""
    for option in OPTIONS:
        parent, _, name = option.rpartition(".")
        if parent != section:
            section = parent
            lines.append(f"{section}:")
        value = (tree[section] if section else tree)[name]
        indent = "  " if section else ""
        if isinstance(value, list) and value:
            lines.append(f"{indent}{name}:  # {loaded.origins[option]}")
            lines += [f"{indent}  - {yaml_scalar(item)}" for item in value]
        else:
            lines.append(f"{indent}{name}: {yaml_scalar(value)}  # {loaded.origins[option]}")
    return "\n".join(lines)


def yaml_scalar(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, width=float("inf")).removesuffix("\n").removesuffix("\n...")
