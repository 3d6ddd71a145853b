"""Words of commands and lines of scripts, as a shell reads them."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from proxy.tools.launch.topology import OptionValue

BASH: Final = "#!/bin/bash"


def option(flag: str, *values: object) -> str:
    """`--flag` and the words behind it, quoted as far as they need it."""
    return " ".join([f"--{flag}", *(shlex.quote(str(value)) for value in values)])


def options(values: Mapping[str, OptionValue]) -> Iterator[str]:
    """Each option of a mapping, none of them null, in its order."""
    for flag, value in values.items():
        match value:
            case True:
                yield option(flag)
            case dict():
                yield option(flag, json.dumps(value))
            case list():
                yield option(flag, *value)
            case _:
                yield option(flag, value)


def exports(environment: Mapping[str, str]) -> Iterator[str]:
    """`export` lines. Variables in values are the shell's, and nothing else of a value is."""
    for name, value in environment.items():
        yield f"export {name}={_quoted(value)}"


def command(program: str, words: Sequence[str]) -> str:
    """A command with an option on each line."""
    return " \\\n  ".join([program, *words])


def script(comments: Iterable[str], *parts: Iterable[str]) -> str:
    """A script: comments, and parts with an empty line between each two."""
    head = "\n".join([BASH, *(f"# {comment}" for comment in comments)])
    paragraphs = ("\n".join(part) for part in parts)
    return "\n\n".join([head, *filter(None, paragraphs)]) + "\n"


def _quoted(value: str) -> str:
    if "$" not in value:
        return shlex.quote(value)
    escaped = re.sub(r'([\\"`]|\$(?![A-Za-z_{]))', r"\\\1", value)
    return f'"{escaped}"'


def word(text: str) -> str:
    """One word, quoted if it needs that."""
    return shlex.quote(text)
