"""The programs that pdproxy is compared with, each started in front of the same engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from lab.common.processes import HOST, clean_environment, free_ports

_LIST: Final = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({d.metadata["Name"].lower().replace("_", "-"): d.version for d in found}))
"""


class Environment:
    """A virtual environment in a directory of the project that git ignores."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()
        self.python = self.directory / "bin" / "python"

    def provide(self, packages: tuple[str, ...], *options: str) -> bool:
        """Install the missing ones of these packages. Return False if pip fails.

        Wheels only: a build from source could behave differently, if it succeeds at all.
        Args:
          packages: `name`, `name==version` or `name<version`.
          options: options of pip.
        """
        installed = self._installed()
        if not installed:
            run(sys.executable, "-m", "venv", "--clear", str(self.directory))
            (self.directory / ".gitignore").write_text("*\n")
        missing = [package for package in packages if not _is_in(installed, package)]
        if not missing:
            return True
        print(f"installing {', '.join(missing)} in {self.directory.name} (once)", file=sys.stderr, flush=True)
        pip = ("-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
        return run(str(self.python), *pip, *options, *missing)

    def has(self, package: str) -> bool:
        """Return whether this package is installed."""
        return _is_in(self._installed(), package)

    def _installed(self) -> dict[str, str]:
        """Return versions by name. Empty if the environment is missing or broken."""
        try:
            done = subprocess.run((str(self.python), "-c", _LIST), capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        return dict(json.loads(done.stdout))


def _is_in(installed: dict[str, str], package: str) -> bool:
    name, _, version = package.partition("==")
    found = installed.get(name.partition("<")[0].partition("[")[0])
    return found is not None and version in ("", found)


def run(*command: str) -> bool:
    """Run an installer. Return whether it succeeded."""
    # A virtual environment is no place for a user, target or prefix install, which a machine may have as pip's default.
    environment = clean_environment() | {"PIP_USER": "0"}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH"):
        environment.pop(name, None)
    try:
        return subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode == 0
    except FileNotFoundError:  # no npm
        return False


PEERS: Final = Environment(".venv-bench")
"""Environment of the peers that pdproxy is compared with."""


Spelling: TypeAlias = Callable[[int, Sequence[int], Sequence[int]], list[str]]

OURS = "pdproxy"
RUST_ROUTERS = ("vllm-router", "sglang-router")
REFERENCE = "reference"
# The imports of the script, and the packages that uvicorn finds wherever vLLM is installed.
_REFERENCE_NEEDS = ("fastapi<0.124.0", "httpx", "uvicorn", "uvloop", "httptools")
_BOOTSTRAP_PORT = "8998"
_PYTHON = str(PEERS.python)


def _as_lists(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    """Return the flags that the reference has and pdproxy accepts."""
    return [
        *("--host", HOST, "--port", str(port)),
        *("--prefiller-hosts", *[HOST] * len(prefill), "--prefiller-ports", *map(str, prefill)),
        *("--decoder-hosts", *[HOST] * len(decode), "--decoder-ports", *map(str, decode)),
    ]


def _as_urls(port: int, prefill: Sequence[int], decode: Sequence[int], *behind: str) -> list[str]:
    """Return the flags of the routers, with the words `behind` after each prefiller's URL."""
    (metrics_port,) = free_ports(1)
    return [
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)),
        *(word for engine in prefill for word in ("--prefill", f"http://{HOST}:{engine}", *behind)),
        *(word for engine in decode for word in ("--decode", f"http://{HOST}:{engine}")),
    ]


def _as_urls_with_bootstrap_ports(port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    return _as_urls(port, prefill, decode, _BOOTSTRAP_PORT)


@dataclass(frozen=True, slots=True)
class Peer:
    """A program and the words that start it. Flags for ports and engines follow them."""

    name: str
    words: tuple[str, ...]
    ready_path: str
    spelling: Spelling = _as_lists
    saturating: tuple[str, ...] = ()
    """Additional words for a run on two cores. Empty if the program always uses them, or never can."""
    is_one_hop: bool = False
    """Whether the program forwards requests to a decoder and ignores prefillers."""

    def command(
        self, port: int, prefill: Sequence[int], decode: Sequence[int], *, saturating: bool = False
    ) -> list[str]:
        """Return the command line."""
        return [*self.words, *(self.saturating if saturating else ()), *self.spelling(port, prefill, decode)]


def ours(directory: Path | None = None) -> Peer:
    """Return pdproxy with its default settings.

    `directory`: where the package is, or None for the project's.
    """
    there = () if directory is None else ("env", "-C", str(directory.resolve()))
    return Peer(OURS, (*there, sys.executable, "-m", "proxy"), "/readyz", saturating=("--workers", "2"))


def routers(policy: str = "round_robin") -> list[Peer]:
    """Return the routers in Rust for which this platform has wheels.

    Round robin is the cheapest policy that both have.
    """
    found = []
    for peer, version in ((_vllm_router(policy), "0.1.17"), (_sglang_router(policy), "0.3.2")):
        if PEERS.provide((f"{peer.name}=={version}",)):
            found.append(peer)
        else:
            print(f"without {peer.name} {version}: no wheel of it could be installed", file=sys.stderr)
    return found


# They log errors only. All other options have their defaults.
def _vllm_router(policy: str) -> Peer:
    """Return vllm-router, which speaks the pull protocol: the prefiller first, then the decoder."""
    flags = ("--vllm-pd-disaggregation", "--policy", policy, "--log-level", "error")
    return Peer("vllm-router", (_PYTHON, "-m", "vllm_router.launch_router", *flags), "/readiness", _as_urls)


def _sglang_router(policy: str) -> Peer:
    """Return sglang-router, which sends the same request to both engines at once."""
    flags = ("--pd-disaggregation", "--policy", policy, "--log-level", "error")
    words = (_PYTHON, "-m", "sglang_router.launch_router", *flags)
    return Peer("sglang-router", words, "/readiness", _as_urls_with_bootstrap_ports)


def reference(script: Path) -> Peer:
    """Return vLLM-Ascend's example proxy, after its requirements are installed. Exits if that fails."""
    if not script.is_file():
        sys.exit(f"--reference: there is no file {script}")
    if not PEERS.provide(_REFERENCE_NEEDS):
        sys.exit("--reference: what the script needs could not be installed")
    return Peer(REFERENCE, (_PYTHON, str(script.resolve())), "/healthcheck")
