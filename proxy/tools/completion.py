"""`pdproxy completion bash`, `zsh` or `fish`: a script for the completion of sub-commands, flags and policies.

    pdproxy completion bash > /etc/bash_completion.d/pdproxy
    pdproxy completion fish > ~/.config/fish/completions/pdproxy.fish

The script is generated from the `--help` text of each sub-command.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from proxy.settings.cli import COMMANDS
from proxy.settings.connectors import CONNECTOR_TRAITS
from proxy.settings.kinds import DECODE_POLICIES, POLICIES
from proxy.settings.mistakes import SettingsError, join_alternatives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_SHELLS: Final = ("bash", "zsh", "fish")
_VALUES: Final = {
    "--connector": sorted({"auto", *CONNECTOR_TRAITS}),
    "--prefill-policy|*--policy": POLICIES,
    "--decode-policy": DECODE_POLICIES,
}
_ZSH: Final = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
# Where nothing fits, files are completed: they stand behind --config.
_SCRIPT: Final = """\
_pdproxy() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  case ${{COMP_WORDS[1]}} in
{commands}
    *) words="{flags}" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{names} $words"; fi
  case ${{COMP_WORDS[1]}}$before in
    mock-engine*) ;;
    *--config) words="" ;;
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _pdproxy pdproxy"""


# The function succeeds behind this sub-command, or for an empty name, while there is none.
_FISH: Final = """\
function __fish_pdproxy_behind
  set -l command ''
  set -l words (commandline -opc)
  if set -q words[2]; and contains -- $words[2] {names}
    set command $words[2]
  end
  test "$command" = "$argv[1]"
end
complete -c pdproxy -f
{commands}
{flags}"""


def completion_script(words: Sequence[str], help_of: Callable[[Sequence[str]], str]) -> str:
    """Return the completion script for a shell. Raises SettingsError.

    Args:
        words: Name of the shell.
        help_of: Returns the `--help` text of the program, or of the sub-command with this name.
    """
    if {*words} & {"--help", "-h"}:
        return f"usage: pdproxy completion {{{','.join(_SHELLS)}}}\n\n{COMMANDS['completion'].capitalize()}."
    if len(words) != 1 or words[0] not in _SHELLS:
        raise SettingsError(f"completion takes the name of a shell: {join_alternatives(_SHELLS)}")
    all_flags = _words_of_help(help_of([]))
    flags = {
        name: _words_of_help(help_of([name]), all_flags) for name in COMMANDS if name not in ("completion", "help")
    }
    flags |= {"completion": " ".join(_SHELLS), "help": " ".join(COMMANDS)}
    if words[0] == "fish":
        return _fish_script({"": all_flags, **flags})
    text = _SCRIPT.format(
        commands="\n".join(f'    {name}) words="{told}" ;;' for name, told in flags.items()),
        flags=all_flags,
        names=" ".join(COMMANDS),
        values="\n".join(f'    *{flag}) words="{" ".join(values)}" ;;' for flag, values in _VALUES.items()),
    )
    return _ZSH + text if words[0] == "zsh" else text


def _fish_script(flags: Mapping[str, str]) -> str:
    """Return the script for fish. `flags`: words that may follow each sub-command, or the program for an empty name."""
    lines = []
    for command, words in flags.items():
        here = f"complete -c pdproxy -n '__fish_pdproxy_behind \"{command}\"'"
        for word in words.split():
            if not word.startswith("--"):
                lines.append(f"{here} -a {word}")
            elif command != "mock-engine" and (values := _values_of(word)):
                lines.append(f"{here} -l {word[2:]} -x -a '{' '.join(values)}'")
            else:
                lines.append(f"{here} -l {word[2:]}{' -r -F' if word == '--config' else ''}")
    return _FISH.format(
        names=" ".join(COMMANDS),
        commands="\n".join(
            f"complete -c pdproxy -n 'test (count (commandline -opc)) -eq 1' -a {name} -d '{text.replace(chr(39), '')}'"
            for name, text in COMMANDS.items()
        ),
        flags="\n".join(lines),
    )


def _values_of(flag: str) -> Iterable[str]:
    """Return the values of a flag, or nothing if it takes others."""
    return next((values for pattern, values in _VALUES.items() if flag in pattern.replace("*", "").split("|")), ())


def _words_of_help(help_text: str, all_flags: str = "") -> str:
    """Return the words that may follow, taken from a `--help` text: sub-commands and flags.

    `all_flags`: flags of the program, which are also accepted.
    """
    choices = ",".join(re.findall(r"^  \{([a-z,]+)\}", help_text, re.MULTILINE)).split(",")
    own = re.findall(r"^  (?:-\w(?: \S+)?, )?(--[a-z][a-z0-9-]*)(?= |$)", help_text, re.MULTILINE)  # not in prose
    more = all_flags.split() if "[flags of pdproxy]" in help_text else []
    return " ".join(dict.fromkeys([*filter(None, choices), *own, *more]))
