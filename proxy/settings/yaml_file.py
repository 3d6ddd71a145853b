"""Reading a YAML file that people write and that may hold keys.

Every mistake is one sentence that names the file, if possible the line, and never what stands there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from proxy.settings.mistakes import SettingsError

# The only words of PyYAML's scanner and parser that quote more than a character of the file.
_QUOTED: Final = re.compile(r"(?<=tag handle) .*")
_TEXT: Final = "tag:yaml.org,2002:str"


def read_yaml(path: str | Path, texts: str = "") -> Any:
    """What the file holds; None when it holds nothing. `texts`: what mappings are called whose values are texts as they
    stand there, since YAML reads 4:8 as 248 and off as false. Raises SettingsError, with the whole path of one that
    cannot be read: which directory it was looked for in may be the mistake.
    """
    try:
        return _Loader(Path(path).read_text(encoding="utf-8"), texts).get_single_data()
    except OSError as error:
        raise SettingsError(
            f"{Path(path).absolute()} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None
    except (_GivenTwice, yaml.scanner.ScannerError, yaml.parser.ParserError) as error:
        raise SettingsError(f"{path}{_line(error)}: {_QUOTED.sub('', error.problem or '')}") from None
    except yaml.MarkedYAMLError as error:
        # Not in its own words, which quote the file.
        raise SettingsError(f"{path}{_line(error)}: this is not valid YAML") from None
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # PyYAML lets through what its constructors raise, for a date that does not exist or a number without digits.
        raise SettingsError(f"{path} is not valid YAML") from None


def _line(error: yaml.MarkedYAMLError) -> str:
    return f", line {error.problem_mark.line + 1}" if error.problem_mark else ""


class _GivenTwice(yaml.constructor.ConstructorError):
    pass


class _Loader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win without a word."""

    def __init__(self, stream: str, texts: str) -> None:
        super().__init__(stream)
        self._texts = texts

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                name = key.value if key.value.isidentifier() else "a member"
                raise _GivenTwice(problem=f"{name} is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
            if self._texts and key.value == self._texts and isinstance(value, yaml.MappingNode):
                for _, member in value.value:
                    member.tag = member.tag if isinstance(member, yaml.CollectionNode) else _TEXT
        return super().construct_mapping(node, deep)
