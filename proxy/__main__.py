"""`pdproxy`, or `python -m proxy`: reads the settings and starts the supervisor.

The first argument may be a sub-command; without one the gateway serves. Mistakes of the operator are one sentence on
standard error, with exit code 2.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import TYPE_CHECKING

from proxy.common import blocking_http
from proxy.common.build_info import BUILD_KIND
from proxy.settings import SettingsError, connectable_host, load_settings, write_yaml
from proxy.settings.cli import COMMANDS, DOCUMENTS
from proxy.settings.mistakes import Parser
from proxy.settings.other_routers import describe_unknown_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.settings import LoadedSettings, Settings

_HEALTH_TIMEOUT_SECONDS = 5.0
# An engine may set this variable if its image or service also starts the gateway. prometheus-client would store the
# metrics there.
_METRICS_OF_ANOTHER_PROGRAM = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in _METRICS_OF_ANOTHER_PROGRAM:  # before prometheus-client is imported
        os.environ.pop(name, None)
    try:
        exit_code = _run(words)
        sys.stdout.flush()  # so that an error of the reader is raised here, and not at Python's exit
        return exit_code
    except BrokenPipeError:
        # As in `pdproxy completion bash | head`. At its exit, Python would write the rest to the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SettingsError as error:
        hint = "" if words else "; `pdproxy --help` lists all flags"
        print(f"pdproxy: error: {error}{hint}", file=sys.stderr)
        # the health check of a container knows only 0 and 1
        return 1 if words[:1] == ["health"] else 2
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    # Imported at their use: serving must not load the simulator, and printing the settings must load neither.
    match words:
        case ["print-config", *flags] if {*DOCUMENTS} & {*flags}:
            from proxy.settings import reference

            print(reference.render_options_page(flags))
            return 0
        case ["print-config", *flags]:
            print(write_yaml(_warned(load_settings(flags, os.environ, needs_backends=False, command="print-config"))))
            return 0
        case ["check-config", *flags]:
            settings = _warned(load_settings(flags, os.environ, command="check-config")).settings
            print(f"ok: {settings.fleet}, connector {settings.connector}")
            for told in settings.access_warnings:
                print(f"note: {told}")
            return 0
        case ["health", *flags]:
            return _health(load_settings(flags, os.environ, needs_backends=False, command="health").settings)
        case ["doctor", *flags]:
            from proxy.tools.doctor import main as doctor

            return doctor(flags, os.environ)
        case ["top", *flags]:
            from proxy.tools.top import main as top

            return top(flags, os.environ)
        case ["advise", *flags]:
            from proxy.tools.advise import main as advise

            return advise(flags)
        case ["launch", *flags]:
            from proxy.tools.launch import main as launch

            return launch(flags, os.environ)
        case ["roll", *flags]:
            from proxy.tools.roll import main as roll

            return roll(flags, os.environ)
        case ["mock-engine", *flags]:
            from proxy.sim.engine import main as mock_engine

            return mock_engine(flags)
        case ["completion", *flags]:
            from proxy.tools import completion

            print(completion.completion_script(flags, _help))
            return 0
        case ["help" | "version" as command, *arguments]:
            return _about(command, arguments)
        case ["serve", *flags]:
            return _serve(flags, "serve")
        case [name, *_] if not name.startswith("-"):
            raise SettingsError(describe_unknown_command(name, COMMANDS))
        case _:
            return _serve(words, None)


def _serve(flags: list[str], command: str | None) -> int:
    from proxy.process.supervisor import run_supervisor

    return run_supervisor(lambda: load_settings(flags, os.environ, command=command))


def _about(command: str, arguments: list[str]) -> int:
    """Print the help of the program or of a sub-command, or the version."""
    parser = Parser(prog=f"pdproxy {command}", description=f"{COMMANDS[command].capitalize()}.", allow_abbrev=False)
    if command == "help":
        parser.add_argument("command", nargs="?", metavar="COMMAND", help="Name of a sub-command.")
    name = getattr(parser.parse_args(arguments), "command", None)
    if command == "version":
        print(BUILD_KIND)
        return 0
    if name and name not in COMMANDS:
        raise SettingsError(describe_unknown_command(name, COMMANDS))
    return _run([name, "--help"] if name else ["--help"])


def _help(words: Sequence[str]) -> str:
    """Return the text of `--help`."""
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        _run([*words, "--help"])
    return said.getvalue()


def _warned(loaded: LoadedSettings) -> LoadedSettings:
    """Print the warnings on standard error."""
    for warning in loaded.warnings:
        print(f"pdproxy: warning: {warning}", file=sys.stderr)
    return loaded


def _health(settings: Settings) -> int:
    """Return 0 if the gateway on this host is alive, and 1 otherwise. A port for probes is used if there is one."""
    listen, admin = settings.listen, settings.admin
    host, port = (listen.host, listen.port) if admin.probe_port is None else (admin.host, admin.probe_port)
    host = connectable_host(host)
    try:
        tls = blocking_http.local_tls(settings.has_tls(port))
        answer = blocking_http.get_blocking(host, port, "/livez", _HEALTH_TIMEOUT_SECONDS, tls=tls)
    except blocking_http.HttpRequestError as error:
        # The event loop has answered the handshake, and then rejected this program for its missing certificate.
        if error.is_hang_up and settings.needs_client_certificate(port):
            return 0
        print(f"pdproxy: {host} port {port} does not answer: {error}", file=sys.stderr)
        return 1
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
