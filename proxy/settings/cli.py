"""The command line: flags for common options, with the names and meanings of vLLM-Ascend's example proxies.

Values stay text here; the model validates them, as it does for the other sources. Secrets have no flag, because every
user on the host can read a command line.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from proxy.common.build_info import BUILD_KIND
from proxy.common.endpoints import (
    Endpoint,
    is_bootstrap_port_suffix,
    is_model_name,
    pair_endpoints,
    parse_endpoints,
    parse_port_range,
    strip_host_brackets,
)
from proxy.settings.mistakes import Parser, SettingsError, printable_value
from proxy.settings.other_routers import ACCEPTED_FLAGS, WORKERS_FLAG, describe_unknown_flag
from proxy.settings.sources import OPTIONS, SourcedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

# Options that each flag sets. A later flag of this table overrides an earlier one.
_FLAG_OPTIONS: Final = {
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

# Option, noun in flags, and default port of a host.
_ROLES: Final = (("prefill", "prefiller", 8001), ("decode", "decoder", 8002), ("encode", "encoder", 8003))

# Flags of the examples for engines that do both stages, and for encoders, with our names for them.
_FLAG_ALIASES: Final = {
    **{f"--{noun}-{what}": f"--decoder-{what}" for noun in ("pd", "server") for what in ("hosts", "ports")},
    **{f"--{role}-servers-urls": f"--{role}" for role, _, _ in _ROLES},
    WORKERS_FLAG: "--decode",
}
_BOTH_STAGES: Final = ("--pd-hosts", "--pd-ports", "--server-hosts", "--server-ports", WORKERS_FLAG)
"""Flags of engines that prefill and decode."""
_FLAG_SPELLINGS: Final = """\
--pd-hosts, --pd-ports, --server-hosts, --server-ports: --decoder-hosts and --decoder-ports, with --connector plain;
--encode-servers-urls, --prefill-servers-urls (or `disable`) and --decode-servers-urls take comma-separated URLs."""
_FLAGS_OF_OTHER_ROUTERS: Final = textwrap.fill(
    f"Accepted with the same meaning: {WORKERS_FLAG} (--decode, with --connector plain), {', '.join(ACCEPTED_FLAGS)}."
    " Any other flag of these routers gets an error that names what to use.",
    width=100,
    break_on_hyphens=False,
)
_NO_PREFILLERS: Final = ("disable", "none")
"""Values of the encoder example's --prefill-servers-urls if engines do both stages."""
_LENGTH_GROUPS: Final = "--enable-dynamic-bucket"
_DISPATCH_MODE: Final = "--encoder-dispatch-mode"

_FLAGS_OF_OTHER_EXAMPLES: Final = (
    *_FLAG_ALIASES,
    *("--server-group-threshold", "--max-request-tokens", _LENGTH_GROUPS, _DISPATCH_MODE),
    *ACCEPTED_FLAGS,
)

_ELASTIC: Final = "--elastic"
_REPEATABLE: Final = (*(f"--{role}" for role, _, _ in _ROLES), _ELASTIC)

_DESCRIPTION: Final = """\
OpenAI-compatible gateway for engines that prefill and engines that decode.
All options can be set in the environment (PROXY_LISTEN__PORT) or in the --config file. The most common ones have flags,
and `pdproxy print-config --full` prints all of them. Flags override the environment, and the environment
overrides the file."""

_WITH_THESE_FLAGS: Final = {
    "serve": "serve requests, as without a sub-command",
    "print-config": "print the effective options and where each came from",
    "check-config": "check the configuration",
    "health": "check whether the gateway on this host is alive",
}
_WITH_OTHERS: Final = {
    "doctor": "test every instance and the KV handoff of every pair, and report incompatibilities",
    "top": "show the activity of a running gateway",
    "advise": "find out from a running gateway's metrics whether prefillers or decoders are the bottleneck",
    "launch": "generate the commands of every node and the gateway configuration from a description of the fleet",
    "roll": "restart the instances of a role one by one while gateways serve",
    "mock-engine": "run a simulated engine",
    "completion": "print a shell completion script for bash, zsh or fish",
    "help": "print the flags of pdproxy or of a sub-command",
    "version": "print the version and how it was built",
}
COMMANDS: Final = {**_WITH_THESE_FLAGS, **_WITH_OTHERS}
"""Sub-commands with their descriptions."""

DOCUMENTS: Final = {
    "--full": "Print a configuration file with every option, its meaning and its default.",
    "--schema": "Print the JSON Schema of configuration files, for editors and other tools.",
}
"""Flags of print-config that print a document instead of the effective options."""


def _format_commands(commands: Mapping[str, str]) -> str:
    return "".join(f"\n  {name:14} {words}" for name, words in commands.items())


_EPILOG: Final = (
    f"sub-commands with the same flags:{_format_commands(_WITH_THESE_FLAGS)}\n"
    f"sub-commands with other flags:{_format_commands(_WITH_OTHERS)}\n"
    "Run `pdproxy COMMAND --help` for details."
)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options and warnings of a parsed command line."""

    values: dict[str, SourcedValue]
    """Options that were set by flags, by name."""
    config: str | None
    """Path from --config; None: the flag is missing."""
    warnings: tuple[str, ...]
    """One sentence for each flag that was given more than once or has no effect."""


def parse_command_line(argv: Sequence[str], command: str | None = None) -> CommandLine:
    """Parse the arguments of the program or of a sub-command.

    `--help` and `--version` print and raise SystemExit.

    Args:
        argv: The arguments without the names of the program and the sub-command.
        command: Name of the sub-command; None: the program itself.

    Raises:
        SettingsError: A flag or an argument is invalid.
    """
    parser, known_flags = _build_parser(command)
    spelled = _expand_abbreviations(argv, known_flags)
    in_full = [_translate_word(word) for word in spelled]
    found, unknown = parser.parse_known_args(in_full)
    given: dict[str, Any] = vars(found)
    addresses = [word for flag in _REPEATABLE for word in given[flag] or ()]
    for word in (*unknown, *addresses):
        if word in COMMANDS:  # an address has a port
            raise _make_late_command_error(word)
    # Show only the flag: its value may be a secret.
    if flags := [_read_flag_name(word) for word in unknown if word.startswith("-")]:
        raise SettingsError(describe_unknown_flag(flags[0], known_flags))
    if unknown:
        raise SettingsError(f"unexpected argument {unknown[0]!r}")
    values = {
        option: SourcedValue(accepted.convert_value(flag, given[flag]), flag)
        for flag, accepted in ACCEPTED_FLAGS.items()
        if given[flag] is not None
        for option in accepted.options
    }
    values |= {
        option: SourcedValue(given[flag], flag)
        for flag, options in _FLAG_OPTIONS.items()
        if given[flag] is not None
        for option in options
    }
    both_stages = [flag for flag in map(_read_flag_name, spelled) if flag in _BOTH_STAGES]
    if given["--prefill"] and given["--prefill"][0] in _NO_PREFILLERS:
        if len(given["--prefill"]) > 1:
            raise SettingsError(f"--prefill {given['--prefill'][0]} means no prefillers and excludes other values")
        both_stages.append("--prefill-servers-urls")
        given["--prefill"] = None
    if both_stages:
        values.setdefault("connector", SourcedValue("plain", both_stages[0]))
    if given[_LENGTH_GROUPS]:
        values.setdefault("balance.decode_policy", SourcedValue("length_groups", _LENGTH_GROUPS))
    for role, noun, default_port in _ROLES:
        flags = [f"--{noun}-hosts", f"--{noun}-ports", f"--{role}"]
        if origin := ", ".join(flag for flag in flags if given[flag]):
            hosts = _converted_words(flags[0], partial(_strip_scheme, url_flag=flags[2]), given[flags[0]])
            ports = _converted_words(flags[1], parse_port_range, given[flags[1]])
            urls = _parse_urls(flags[2], given[flags[2]], has_bootstrap_ports=role == "prefill")
            if hosts or ports:
                urls.insert(
                    0,
                    _pair_hosts_and_ports(
                        noun, hosts or ["localhost"], ports or [range(default_port, default_port + 1)]
                    ),
                )
            values[role] = SourcedValue([endpoint for several in urls for endpoint in several], origin)
    if given[_ELASTIC]:
        urls = _parse_urls(_ELASTIC, given[_ELASTIC], has_bootstrap_ports=True)
        values["elastic.instances"] = SourcedValue([endpoint for several in urls for endpoint in several], _ELASTIC)
    warnings = list(_repeated_flags(in_full, known_flags))
    if given[_DISPATCH_MODE] == "single":
        warnings.append(f"{_DISPATCH_MODE} single is ignored: each media item is sent to one encoder, as with fanout")
    return CommandLine(values, given["--config"], tuple(warnings))


def _make_late_command_error(command: str) -> SettingsError:
    """Return the error for a sub-command after flags."""
    return SettingsError(f"a sub-command comes first: write `pdproxy {command} [flags]`")


def _expand_abbreviations(argv: Sequence[str], known_flags: Sequence[str]) -> list[str]:
    """Return the arguments with all abbreviated flags written out.

    argparse accepts unambiguous abbreviations of the example's flags, and guides write `--prefiller-port`. The flags
    of the other examples are considered only if no other flag matches, because they would make some ambiguous.
    Raises SettingsError for an ambiguous abbreviation.
    """
    first = [flag for flag in known_flags if flag not in _FLAGS_OF_OTHER_EXAMPLES]
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag != "--" and flag not in (*known_flags, *_FLAG_ALIASES):
            meant = [known for known in first if known.startswith(flag)]
            meant = meant or [known for known in _FLAGS_OF_OTHER_EXAMPLES if known.startswith(flag)]
            if len(meant) > 1:
                raise SettingsError(f"{flag} is ambiguous: use {' or '.join(meant)}")
            flag = meant[0] if meant else flag
        words.append(f"{flag}{equals}{value}")
    return words


def _translate_word(word: str) -> str:
    """Replace a flag of another example by ours."""
    flag = _read_flag_name(word)
    return _FLAG_ALIASES.get(flag, flag) + word[len(flag) :]


def _read_flag_name(word: str) -> str:
    return word.partition("=")[0]


def _repeated_flags(words: Sequence[str], known_flags: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each flag that is repeated although only its last value applies."""
    flags = [_read_flag_name(word) for word in words]
    for flag in known_flags:
        if flags.count(flag) > 1 and flag not in _REPEATABLE:
            yield f"{flag} is given {flags.count(flag)} times: the last value applies"


def _converted_words(flag: str, convert: Callable[[str], T], words: Sequence[str] | None) -> list[T]:
    try:
        return [convert(word) for word in words or ()]
    except ValueError as error:
        raise SettingsError(f"{flag}: {error}") from None


def _parse_urls(flag: str, words: Sequence[str] | None, *, has_bootstrap_ports: bool) -> list[tuple[Endpoint, ...]]:
    """Return the instances of each address of a flag. Raises SettingsError."""
    parts = [part for word in words or () for part in word.split(",") if part]
    return _converted_words(flag, parse_endpoints, _split_addresses(parts, has_bootstrap_ports=has_bootstrap_ports))


def _strip_scheme(word: str, url_flag: str) -> str:
    """Return a host name. Raises ValueError for a URL or an address with a port."""
    if "://" in word or re.fullmatch(r"[^:]+:[0-9-]+|\[.*\]:[0-9-]+", word):
        raise ValueError(
            f"{printable_value(word.rpartition('@')[2])} is not a host name: use {url_flag} for URLs and host:port"
        )
    return strip_host_brackets(word)


def _split_addresses(words: Sequence[str], *, has_bootstrap_ports: bool) -> list[str]:
    """Join each address with the bootstrap port (as in SGLang's router) and the models that follow it."""
    joined: list[str] = []
    for word in words:
        if joined and (is_model_name(word) or (has_bootstrap_ports and is_bootstrap_port_suffix(word))):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _pair_hosts_and_ports(noun: str, hosts: Sequence[str], ports: Sequence[range]) -> tuple[Endpoint, ...]:
    try:
        return pair_endpoints(noun, hosts, ports)
    except ValueError as error:
        for host in hosts:
            if host in COMMANDS:  # --decoder-hosts has taken it for one more host
                raise _make_late_command_error(host) from None
        raise SettingsError(str(error)) from None


def _build_parser(command: str | None) -> tuple[Parser, list[str]]:
    """Return the parser and all flags. Each result of the parser is named like its flag."""
    parser = Parser(
        prog="pdproxy",
        description=_DESCRIPTION if command is None else f"{COMMANDS[command].capitalize()}.",
        epilog=_EPILOG if command is None else None,
        usage=f"pdproxy {'[sub-command]' if command is None else command} [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # `_expand_abbreviations` handles abbreviations. argparse would show the value after `=`, maybe a secret.
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=BUILD_KIND, help="Print the version and exit.")
    flags = ["--help", "--version", "--config"]
    parser.add_argument(
        "--config",
        dest="--config",
        metavar="FILE.yaml",
        help="Path of the YAML configuration file. Can also be set by PROXY_CONFIG.",
    )
    if command == "print-config":
        for flag, text in DOCUMENTS.items():
            parser.add_argument(flag, dest=flag, action="store_true", help=f"{text} No other flag may be given.")
    for role, noun, default_port in _ROLES:
        group = parser.add_argument_group(f"{noun}s")
        texts = {
            f"--{role}": (
                "URL",
                "Addresses as http://host:port, host:port or host:7100-7115, IPv6 in brackets. Repeatable."
                + (" A bootstrap port may follow an address." if role == "prefill" else ""),
            ),
            f"--{noun}-hosts": ("HOST", "Host names, paired with the ports. Default: localhost."),
            f"--{noun}-ports": (
                "PORT",
                f"Ports or ranges like 7100-7115. A single range applies to all hosts. Default: {default_port}.",
            ),
        }
        for flag, (metavar, text) in texts.items():
            action = "extend" if flag in _REPEATABLE else "store"
            group.add_argument(flag, dest=flag, nargs="+", action=action, metavar=metavar, help=text)
        flags += texts
    group = parser.add_argument_group("elastic instances")
    group.add_argument(
        _ELASTIC,
        dest=_ELASTIC,
        nargs="+",
        action="extend",
        metavar="URL",
        help="Addresses of instances that may exchange their role between prefill and decode, as for --prefill."
        " Repeatable.",
    )
    flags.append(_ELASTIC)
    group = parser.add_argument_group("other options")
    for flag, options in _FLAG_OPTIONS.items():
        group.add_argument(flag, dest=flag, metavar="VALUE", help=_describe_options(options))
    group = parser.add_argument_group("flags of vLLM-Ascend's other examples", _FLAG_SPELLINGS)
    group.add_argument(
        _LENGTH_GROUPS, dest=_LENGTH_GROUPS, action="store_true", help="Same as --decode-policy length_groups."
    )
    group.add_argument(
        _DISPATCH_MODE,
        dest=_DISPATCH_MODE,
        choices=("single", "fanout"),
        help="Accepted for compatibility. Each media item is always sent to one encoder (fanout).",
    )
    group = parser.add_argument_group("flags of vllm-router, sglang-router and smg", _FLAGS_OF_OTHER_ROUTERS)
    for flag, accepted in ACCEPTED_FLAGS.items():
        if accepted.constant_value is not None:
            group.add_argument(flag, dest=flag, action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            group.add_argument(flag, dest=flag, nargs=accepted.nargs, metavar="VALUE", help=argparse.SUPPRESS)
    return parser, [*flags, *_FLAG_OPTIONS, _LENGTH_GROUPS, _DISPATCH_MODE, *ACCEPTED_FLAGS]


def _describe_options(options: Sequence[str]) -> str:
    if len(options) > 1:
        return f"Sets {' and '.join(options)}."
    field = OPTIONS[options[0]]
    default = field.get_default(call_default_factory=False)
    shown_default = "" if default is None else f" Default: {default}."
    return f"{field.description}{shown_default}".replace("%", "%%")
