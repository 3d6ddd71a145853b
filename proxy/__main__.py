"""`pdproxy`, or `python -m proxy`: settings in, supervisor up.

The first word may be a sub-command; without one the gateway serves. A mistake of the operator is one sentence on
standard error and exit code 2.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import TYPE_CHECKING

from proxy.common import blocking_http
from proxy.settings import SettingsError, load, reachable, to_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.settings import Loaded, Settings

_HEALTH_TIMEOUT_SECONDS = 5.0
# An engine's, where its image or its service starts the gateway, too. prometheus-client would keep the metrics there.
_METRICS_OF_ANOTHER_PROGRAM = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in _METRICS_OF_ANOTHER_PROGRAM:  # before prometheus-client is imported
        os.environ.pop(name, None)
    try:
        exit_code = _run(words)
        sys.stdout.flush()  # an error of the reader is to be raised here, and not while Python exits
        return exit_code
    except BrokenPipeError:
        # As in `pdproxy completion bash | head`. Python writes what is left at its exit, which nothing may read.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SettingsError as error:
        print(f"pdproxy: error: {error}", file=sys.stderr)
        # A container's health check knows only 0 and 1.
        return 1 if words[:1] == ["health"] else 2
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    # Imported where they are needed: serving must not load the simulator, and a look at the settings neither of them.
    match words:
        case ["print-config", *flags]:
            print(to_yaml(_warned(load(flags, os.environ, needs_backends=False, command="print-config"))))
            return 0
        case ["check-config", *flags]:
            settings = _warned(load(flags, os.environ, command="check-config")).settings
            print(f"ok: {settings.fleet}, connector {settings.connector}")
            for told in settings.doors:
                print(f"note: {told}")
            return 0
        case ["health", *flags]:
            return _health(load(flags, os.environ, needs_backends=False, command="health").settings)
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

            print(completion.script(flags, _help))
            return 0
        case _:
            from proxy.process.supervisor import serve

            return serve(lambda: load(words, os.environ))


def _help(words: Sequence[str]) -> str:
    """What the program says after `--help`."""
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        _run([*words, "--help"])
    return said.getvalue()


def _warned(loaded: Loaded) -> Loaded:
    """Print the warnings, beside what is asked for."""
    for warning in loaded.warnings:
        print(f"pdproxy: warning: {warning}", file=sys.stderr)
    return loaded


def _health(settings: Settings) -> int:
    """Is the gateway on this host alive? 0 if it says so, 1 otherwise. A port for probes is asked, if there is one."""
    listen, admin = settings.listen, settings.admin
    host, port = (listen.host, listen.port) if admin.probe_port is None else (admin.host, admin.probe_port)
    host = reachable(host)
    try:
        answer = blocking_http.get(host, port, "/livez", _HEALTH_TIMEOUT_SECONDS)
    except blocking_http.HttpRequestError as error:
        print(f"pdproxy: {host} port {port} does not answer: {error}", file=sys.stderr)
        return 1
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
