"""Reading of YAML files that may contain keys.

Errors are one sentence with the file and, if possible, the line, and without the file's content.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from proxy.settings.mistakes import SettingsError

# The only errors of PyYAML's scanner and parser that quote more than a character of the file.
_QUOTING_ERROR_PATTERN: Final = re.compile(r"(?<=tag handle) .*")
_TEXT_TAG: Final = "tag:yaml.org,2002:str"


def read_yaml(path: str | Path, texts: str = "") -> Any:
    """Return the content of a YAML file, or None if it is empty.

    Raises SettingsError, with the whole path if the file cannot be read, because a wrong directory may be the mistake.
    `texts`: names of mappings whose values are read as text, because YAML reads 4:8 as 248 and off as false.
    """
    try:
        return _StrictLoader(Path(path).read_text(encoding="utf-8"), texts).get_single_data()
    except OSError as error:
        raise SettingsError(
            f"{Path(path).absolute()} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None
    except (_RepeatedKey, yaml.scanner.ScannerError, yaml.parser.ParserError) as error:
        raise SettingsError(
            f"{path}{_describe_line(error)}: {_QUOTING_ERROR_PATTERN.sub('', error.problem or '')}"
        ) from None
    except yaml.MarkedYAMLError as error:
        # without PyYAML's text, which quotes the file
        raise SettingsError(f"{path}{_describe_line(error)}: this is not valid YAML") from None
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # PyYAML passes on exceptions of its constructors, for a date that does not exist or a number without digits.
        raise SettingsError(f"{path} is not valid YAML") from None


def _describe_line(error: yaml.MarkedYAMLError) -> str:
    return f", line {error.problem_mark.line + 1}" if error.problem_mark else ""


class _RepeatedKey(yaml.constructor.ConstructorError):
    pass


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys. PyYAML would use the last one silently."""

    def __init__(self, stream: str, texts: str) -> None:
        super().__init__(stream)
        self._texts = texts

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                name = key.value if key.value.isidentifier() else "a member"
                raise _RepeatedKey(problem=f"{name} is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
            if self._texts and key.value == self._texts and isinstance(value, yaml.MappingNode):
                for _, member in value.value:
                    member.tag = member.tag if isinstance(member, yaml.CollectionNode) else _TEXT_TAG
        return super().construct_mapping(node, deep)
