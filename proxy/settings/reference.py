"""Documents that follow from the model of the options: a configuration file with every option, and a JSON Schema.

`pdproxy print-config --full > configs/full.yaml` writes the file of the repository again.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, Final

from proxy.settings.cli import DOCUMENTS
from proxy.settings.kinds import Section, find_section
from proxy.settings.load import yaml_scalar
from proxy.settings.mistakes import SettingsError
from proxy.settings.model import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic.fields import FieldInfo


_LINE_WIDTH: Final = 120
# Instances have no default, so the file has an example.
_EXAMPLE_VALUES: Final = {
    "prefill": ["10.0.0.1:7100-7101", "10.0.0.2:7100-7101"],
    "decode": ["10.0.0.3:7100-7115"],
}
_FILE_HEAD: Final = """\
# Every option, with its meaning and its default. The instances are an example: they have no default.
#
#   pdproxy print-config --full > my.yaml
#   pdproxy --config my.yaml
#
# Command-line flags and environment variables (PROXY_LISTEN__PORT is listen.port) override the file.
# `pdproxy print-config` prints the effective values and their origins."""

# Keywords of pydantic for constraints that it does not translate behind a validator.
_CONSTRAINTS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def render_options_page(flags: Sequence[str]) -> str:
    """Return the document that one of DOCUMENTS names. Raises SettingsError if there are other flags."""
    if len(flags) != 1:
        raise SettingsError(f"print-config {next(flag for flag in flags if flag in DOCUMENTS)} takes no other flags")
    return render_full_file() if flags[0] == "--full" else json.dumps(make_json_schema(), indent=2, ensure_ascii=False)


def render_full_file() -> str:
    """Return a configuration file with every option, its meaning and its default."""
    defaults = Settings().model_dump(mode="json") | _EXAMPLE_VALUES
    blocks = [_FILE_HEAD]
    for name, field in Settings.model_fields.items():
        section = find_section(field)
        lines = [*_comment_lines(_description_text(section or field), 0)]
        if section:
            lines.append(f"{name}:")
            for option, its_field in section.model_fields.items():
                lines += _comment_lines(_description_text(its_field), 2)
                lines += _value_lines(f"  {option}", defaults[name][option])
        else:
            lines += _value_lines(name, defaults[name])
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def make_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of configuration files (draft 2020-12)."""
    generated = Settings.model_json_schema()
    definitions = generated.pop("$defs")
    schema = _translate_schema(generated, definitions)
    for part in schema["properties"].values():
        if "properties" in part:
            part["type"] = ["object", "null"]  # a section that has only comments is null
            del part["default"]  # its options have their own
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Configuration of pdproxy",
        "description": "Options of pdproxy, a gateway for disaggregated prefill and decode.",
    }


def _translate_schema(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of pydantic without references and titles, and with the keywords of JSON Schema."""
    if reference := schema.get("$ref"):
        schema = {**definitions[reference.rpartition("/")[2]], **schema}
    translated: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "properties":
            translated[name] = {option: _translate_schema(part, definitions) for option, part in value.items()}
        elif name == "items":
            translated[name] = _translate_schema(value, definitions)
        elif name == "anyOf":
            translated[name] = [_translate_schema(part, definitions) for part in value]
        elif name == "description":
            translated[name] = " ".join(value.split())
        elif name not in ("$ref", "title"):
            translated[_CONSTRAINTS.get(name, name)] = value
    return translated


def _description_text(documented: FieldInfo | type[Section]) -> str:
    """Return the description of an option or a section on one line."""
    text = documented.__doc__ if isinstance(documented, type) else documented.description
    return " ".join((text or "").split())


def _comment_lines(text: str, indent: int) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _LINE_WIDTH,
        initial_indent=f"{' ' * indent}# ",
        subsequent_indent=f"{' ' * indent}# ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _value_lines(name: str, value: object) -> list[str]:
    if not isinstance(value, list) or not value:
        return [f"{name}: {yaml_scalar(value)}"]
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    return [f"{name}:", *(f"{indent}- {yaml_scalar(item)}" for item in value)]
