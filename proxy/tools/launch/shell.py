"""Commands and scripts in the syntax of a shell."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from proxy.tools.launch.topology import OptionValue

BASH: Final = "#!/bin/bash"


def option_line(flag: str, *values: object) -> str:
    """Return `--flag` and its arguments, quoted where needed."""
    return " ".join([f"--{flag}", *(shlex.quote(str(value)) for value in values)])


def option_lines(values: Mapping[str, OptionValue]) -> Iterator[str]:
    """Return each option of a mapping without null values, in its order."""
    for flag, value in values.items():
        match value:
            case True:
                yield option_line(flag)
            case dict():
                yield option_line(flag, json.dumps(value))
            case list():
                yield option_line(flag, *value)
            case _:
                yield option_line(flag, value)


def export_lines(environment: Mapping[str, str]) -> Iterator[str]:
    """Return `export` lines. The shell expands variables in values, and nothing else."""
    for name, value in environment.items():
        yield f"export {name}={_quote_for_shell(value)}"


def command_text(program: str, words: Sequence[str]) -> str:
    """Return a shell command with one option per line."""
    return " \\\n  ".join([program, *words])


def script_text(comments: Iterable[str], *parts: Iterable[str]) -> str:
    """Return a script: comments, and parts separated by empty lines."""
    head = "\n".join([BASH, *(f"# {comment}" for comment in comments)])
    paragraphs = ("\n".join(part) for part in parts)
    return "\n\n".join([head, *filter(None, paragraphs)]) + "\n"


def _quote_for_shell(value: str) -> str:
    if "$" not in value:
        return shlex.quote(value)
    escaped = re.sub(r'([\\"`]|\$(?![A-Za-z_{]))', r"\\\1", value)
    return f'"{escaped}"'


def shell_word(text: str) -> str:
    """Return one word of a shell command, quoted if needed."""
    return shlex.quote(text)
