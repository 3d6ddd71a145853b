"""The command line: flat flags, those of vLLM-Ascend's example proxies among them with the same meaning.

Values stay text here; the model judges them, as it does those of the other sources. Secrets have no flag, because
anybody on the host can read a command line.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from proxy.common.build_info import BUILD
from proxy.common.endpoints import (
    Endpoint,
    is_bootstrap_port,
    is_model,
    pair_endpoints,
    parse_endpoints,
    plain_host,
    port_range,
)
from proxy.settings.mistakes import SettingsError, did_you_mean, shown, told
from proxy.settings.sources import OPTIONS, Sourced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

# Flag → the options it sets. A later line overrides an earlier one.
_FLAGS: Final = {
    "--host": ["listen.host"],
    "--port": ["listen.port"],
    "--connector": ["connector"],
    "--policy": ["balance.prefill_policy", "balance.decode_policy"],
    "--prefill-policy": ["balance.prefill_policy"],
    "--decode-policy": ["balance.decode_policy"],
    "--server-group-threshold": ["balance.long_prompt_tokens"],
    "--max-request-tokens": ["balance.longest_prompt_tokens"],
    "--kv-events": ["kv_events.endpoint"],
    "--max-retries": ["retry.max_attempts"],
    "--retry-delay": ["retry.base_delay_seconds"],
    "--max-waiting-retries": ["joining.max_attempts"],
    "--waiting-retry-interval": ["joining.interval_seconds"],
    "--workers": ["workers"],
    "--log-level": ["log.level"],
    "--log-format": ["log.format"],
}

# The option, the noun, and the port of a host that is given without ports.
_ROLES: Final = (("prefill", "prefiller", 8001), ("decode", "decoder", 8002), ("encode", "encoder", 8003))

# What the examples for engines that do both stages, and for encoders, call our flags.
_ALIASES: Final = {
    **{f"--{noun}-{what}": f"--decoder-{what}" for noun in ("pd", "server") for what in ("hosts", "ports")},
    **{f"--{role}-servers-urls": f"--{role}" for role, _, _ in _ROLES},
}
_BOTH_STAGES: Final = ("--pd-hosts", "--pd-ports", "--server-hosts", "--server-ports")
"""Flags of engines that prefill and decode."""
_OTHER_SPELLINGS: Final = """\
--pd-hosts, --pd-ports, --server-hosts, --server-ports: --decoder-hosts and --decoder-ports, with --connector plain;
--encode-servers-urls, --prefill-servers-urls (or `disable`) and --decode-servers-urls take URLs with commas between."""
_NO_PREFILLERS: Final = ("disable", "none")
"""What the encoders' example is told instead of prefillers if engines do both stages."""
_LENGTH_GROUPS: Final = "--enable-dynamic-bucket"
_DISPATCH_MODE: Final = "--encoder-dispatch-mode"

_OF_OTHER_EXAMPLES: Final = (
    *_ALIASES,
    *("--server-group-threshold", "--max-request-tokens", _LENGTH_GROUPS, _DISPATCH_MODE),
)

_REPEATABLE: Final = tuple(f"--{role}" for role, _, _ in _ROLES)

_DESCRIPTION: Final = """\
One OpenAI-compatible endpoint in front of engines that prefill and engines that decode.
Every option can also be set in the environment (PROXY_LISTEN__PORT) or in the --config file, which have more options
than there are flags: see configs/full.yaml. A flag beats the environment, the environment beats the file."""

_WITH_THESE_FLAGS: Final = {
    "print-config": "print the effective options and where each came from",
    "check-config": "say whether the configuration is in order",
    "health": "ask the gateway on this host whether it is alive",
}
_WITH_OTHERS: Final = {
    "doctor": "ask every instance what it is, hand over a prompt in every pair, and say what does not fit",
    "top": "show what a running gateway does",
    "advise": "watch a running gateway's metrics, and say whether prefillers or decoders are the bottleneck",
    "launch": "make the commands of every node and the configuration of one description of the fleet",
    "roll": "restart the instances of a role one after the other, while gateways serve",
    "mock-engine": "run a simulated engine",
    "completion": "print a script by which bash or zsh completes all of this",
}
COMMANDS: Final = {**_WITH_THESE_FLAGS, **_WITH_OTHERS}
"""The sub-commands, and what each does."""


def _listed(commands: Mapping[str, str]) -> str:
    return "".join(f"\n  {name:14} {words}" for name, words in commands.items())


_EPILOG: Final = (
    f"sub-commands, as the first word, with the same flags:{_listed(_WITH_THESE_FLAGS)}\n"
    f"and with flags of their own besides:{_listed(_WITH_OTHERS)}\n"
    "Each of them tells its flags after --help."
)


class Parser(argparse.ArgumentParser):
    """The parser of a sub-command, whose mistakes are SettingsErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises SettingsError."""
        raise SettingsError(message.removeprefix("argument "))


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the flags say."""

    values: dict[str, Sourced]
    """The options that were given as flags."""
    config: str | None
    """The path after --config."""
    warnings: tuple[str, ...]
    """A sentence for each flag that was given again, of which only the last one counts."""


def parse(argv: Sequence[str], command: str | None = None) -> CommandLine:
    """Read the words behind the program's name, or behind that of a sub-command. Raises SettingsError.

    `--help` and `--version` print and raise SystemExit.
    """
    parser, known_flags = _parser(command)
    spelled = _in_full(argv, known_flags)
    in_full = [_translated(word) for word in spelled]
    found, unknown = parser.parse_known_args(in_full)
    if unknown:
        # Only the flag: what follows it, or its =, may be a secret.
        for word in unknown:
            if word.startswith("-"):
                flag = word.partition("=")[0]
                raise SettingsError(f"unknown flag {told(flag)}{did_you_mean(flag, known_flags)}")
        raise SettingsError(f"unexpected argument {unknown[0]!r}")
    given: dict[str, Any] = vars(found)
    values = {
        option: Sourced(given[flag], flag)
        for flag, options in _FLAGS.items()
        if given[flag] is not None
        for option in options
    }
    both_stages = [flag for flag in map(_flag_of, spelled) if flag in _BOTH_STAGES]
    if given["--prefill"] and given["--prefill"][0] in _NO_PREFILLERS:
        if len(given["--prefill"]) > 1:
            raise SettingsError(f"--prefill {given['--prefill'][0]} stands for no prefillers, and others are given")
        both_stages.append("--prefill-servers-urls")
        given["--prefill"] = None
    if both_stages:
        values.setdefault("connector", Sourced("plain", both_stages[0]))
    if given[_LENGTH_GROUPS]:
        values.setdefault("balance.decode_policy", Sourced("length_groups", _LENGTH_GROUPS))
    for role, noun, default_port in _ROLES:
        flags = [f"--{noun}-hosts", f"--{noun}-ports", f"--{role}"]
        if origin := ", ".join(flag for flag in flags if given[flag]):
            hosts = _each(flags[0], partial(_host_alone, url_flag=flags[2]), given[flags[0]])
            ports = _each(flags[1], port_range, given[flags[1]])
            words = [part for word in given[flags[2]] or () for part in word.split(",") if part]
            urls = _each(flags[2], parse_endpoints, _addresses(words, has_bootstrap_ports=role == "prefill"))
            if hosts or ports:
                urls.insert(0, _paired(noun, hosts or ["localhost"], ports or [range(default_port, default_port + 1)]))
            values[role] = Sourced([endpoint for several in urls for endpoint in several], origin)
    warnings = list(_given_again(in_full, known_flags))
    if given[_DISPATCH_MODE] == "single":
        warnings.append(f"{_DISPATCH_MODE} single: here each item goes to an encoder by itself, as with fanout")
    return CommandLine(values, given["--config"], tuple(warnings))


def _in_full(argv: Sequence[str], known_flags: Sequence[str]) -> list[str]:
    """The words, with each flag spelled out: its beginning is enough where no other flag begins so.

    That is what argparse does with the example's flags, and guides write `--prefiller-port`; those of the other
    examples come second, as they would make its flags ambiguous. Raises SettingsError.
    """
    first = [flag for flag in known_flags if flag not in _OF_OTHER_EXAMPLES]
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag != "--" and flag not in (*known_flags, *_ALIASES):
            meant = [known for known in first if known.startswith(flag)]
            meant = meant or [known for known in _OF_OTHER_EXAMPLES if known.startswith(flag)]
            if len(meant) > 1:
                raise SettingsError(f"{flag} is short for {' and '.join(meant)}: write out which one")
            flag = meant[0] if meant else flag
        words.append(f"{flag}{equals}{value}")
    return words


def _translated(word: str) -> str:
    """Our flag for one of another example's."""
    flag = _flag_of(word)
    return _ALIASES.get(flag, flag) + word[len(flag) :]


def _flag_of(word: str) -> str:
    return word.partition("=")[0]


def _given_again(words: Sequence[str], known_flags: Sequence[str]) -> Iterator[str]:
    """The words are flags in full and their values."""
    flags = [_flag_of(word) for word in words]
    for flag in known_flags:
        if flags.count(flag) > 1 and flag not in _REPEATABLE:
            yield f"{flag} is given {flags.count(flag)} times, and only the last one counts"


def _each(flag: str, convert: Callable[[str], T], words: Sequence[str] | None) -> list[T]:
    try:
        return [convert(word) for word in words or ()]
    except ValueError as error:
        raise SettingsError(f"{flag}: {error}") from None


def _host_alone(word: str, url_flag: str) -> str:
    """Raises ValueError, which says where an address goes that has a port."""
    if "://" in word or re.fullmatch(r"[^:]+:[0-9-]+|\[.*\]:[0-9-]+", word):
        raise ValueError(f"{shown(word.rpartition('@')[2])} is not just a host: {url_flag} takes URLs and host:port")
    return plain_host(word)


def _addresses(words: Sequence[str], *, has_bootstrap_ports: bool) -> list[str]:
    """Each address with the words behind it that tell more of it: its bootstrap port, a word of its own as SGLang's
    router has it, and its models.
    """
    joined: list[str] = []
    for word in words:
        if joined and (is_model(word) or (has_bootstrap_ports and is_bootstrap_port(word))):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _paired(noun: str, hosts: Sequence[str], ports: Sequence[range]) -> tuple[Endpoint, ...]:
    try:
        return pair_endpoints(noun, hosts, ports)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _parser(command: str | None) -> tuple[Parser, list[str]]:
    """The parser, whose results are named like their flags, and all flags."""
    parser = Parser(
        prog="pdproxy",
        description=_DESCRIPTION if command is None else f"{COMMANDS[command].capitalize()}.",
        epilog=_EPILOG if command is None else None,
        usage=f"pdproxy {'[sub-command]' if command is None else command} [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # done here before, so that a value behind `=`, which may be a secret, is in no sentence
    )
    parser.add_argument("--version", action="version", version=BUILD)
    flags = ["--help", "--version", "--config"]
    parser.add_argument("--config", dest="--config", metavar="FILE.yaml", help="YAML file; also PROXY_CONFIG")
    for role, noun, default_port in _ROLES:
        group = parser.add_argument_group(f"{noun}s")
        texts = {
            f"--{role}": (
                "URL",
                "http://host:port, host:port or host:7100-7115, IPv6 in brackets; repeatable"
                + ("; an URL may be followed by its bootstrap port" if role == "prefill" else ""),
            ),
            f"--{noun}-hosts": ("HOST", "hosts, in step with the ports (localhost)"),
            f"--{noun}-ports": ("PORT", f"ports or ranges like 7100-7115; one range serves all hosts ({default_port})"),
        }
        for flag, (metavar, text) in texts.items():
            action = "extend" if flag in _REPEATABLE else "store"
            group.add_argument(flag, dest=flag, nargs="+", action=action, metavar=metavar, help=text)
        flags += texts
    group = parser.add_argument_group("other options")
    for flag, options in _FLAGS.items():
        group.add_argument(flag, dest=flag, metavar="VALUE", help=_help(options))
    group = parser.add_argument_group("as vLLM-Ascend's other examples have it", _OTHER_SPELLINGS)
    group.add_argument(_LENGTH_GROUPS, dest=_LENGTH_GROUPS, action="store_true", help="--decode-policy length_groups")
    group.add_argument(
        _DISPATCH_MODE,
        dest=_DISPATCH_MODE,
        choices=("single", "fanout"),
        help="always fanout: each item goes to an encoder by itself",
    )
    return parser, [*flags, *_FLAGS, _LENGTH_GROUPS, _DISPATCH_MODE]


def _help(options: Sequence[str]) -> str:
    if len(options) > 1:
        return f"sets {' and '.join(options)}"
    field = OPTIONS[options[0]]
    default = field.get_default(call_default_factory=False)
    return f"{field.description} ({default})".replace("%", "%%")
