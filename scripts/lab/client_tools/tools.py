"""The load generators of the engines: their command lines and results.

`sglang.bench_serving` needs no CUDA. SGLang requires gigabytes of packages for engines, so the load generator is
extracted from its wheel without installing it, with a few small packages and two stubs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.common.fleet import Fleet, Gateway
from lab.common.peers import PEERS
from lab.common.processes import HOST, finished

MODEL = "served"
_SPEED = ("--prefill-ms-per-1k-tokens", "50", "--decode-step-ms", "5")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two prefillers and two decoders of one kind. `flags`: of each engine; `connector`: of the gateway."""

    name: str
    flags: tuple[str, ...]
    connector: str
    has_bootstrap_ports: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of the gateway."""

    @contextmanager
    def started(self) -> Iterator[Gateway]:
        """Run engines and gateway."""
        with Fleet() as fleet:
            for role in ("prefill", "prefill", "decode", "decode"):
                has_bootstrap_port = self.has_bootstrap_ports and role == "prefill"
                fleet.mock_engine(role, "--model", MODEL, *_SPEED, *self.flags, bootstrap=has_bootstrap_port)
            yield fleet.keep(fleet.gateway("--connector", self.connector, environment=self.environment))


DEPLOYMENTS = (
    Deployment("vLLM", ("--profile", "v0.33"), "vllm_pull"),
    Deployment("SGLang", ("--profile", "sglang"), "sglang_bootstrap", has_bootstrap_ports=True),
)
TOOLS = Deployment(
    "vLLM",
    ("--profile", "v0.33", "--tool-call-parser", "kimi_k2", "--eos-after", "60", "--max-model-len", "1000000"),
    "vllm_pull",
    environment={"PROXY_MODELS__ALIASES": f"claude-*={MODEL},gpt-*={MODEL}"},
)
"""Engines that call tools, with aliases for the default models of clients."""


INPUT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 100, 16, 8
_PATIENCE_SECONDS = 300.0
_SGLANG = "0.5.23"
_SGLANG_DIRECTORY = PEERS.directory / f"sglang-{_SGLANG}"
_NEEDS = (
    *("aiohttp", "msgspec", "numpy", "orjson", "pillow", "psutil", "pybase64", "pyzmq", "requests", "tqdm"),
    "transformers<6",
)
_PARTS = ("sglang/bench_serving.py", "sglang/benchmark/", "sglang/srt/environ.py", "sglang/srt/utils/network.py")
_IN_PLACE_OF_OTHERS = {
    "sglang/srt/disaggregation/utils.py": 'FAKE_BOOTSTRAP_HOST = "2.2.2.2"\n',
    "datasets.py": "load_dataset = None\n",
}
# The files are the same in all wheels, so any platform's wheel is used.
_ANY_WHEEL = ("--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--only-binary", ":all:", "--no-deps")

# Environment of the engines of scripts/test-real, or that of the same variable.
_REAL = Path(os.environ.get("PDPROXY_REAL_VENV", ".venv-real")).absolute()
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Lines of a summary that are printed, as both tools name them.
_SHOWN = (
    *("Successful requests:", "Failed requests:", "Total input tokens:", "Total generated tokens:"),
    *("Mean TTFT", "Mean TPOT", "P99 TPOT"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run. `problem`: end of the tool's output if it failed."""

    completed: int
    failed: int
    missing_tokens: int
    """Missing tokens of complete answers."""
    summary: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator. `backends`: its backends for each deployment."""

    name: str
    python: Path
    words: Callable[[str, int, int, Path, Path], list[str]]
    """Returns the words for a backend, a port, a number of requests, the tokenizer and the file of the result."""
    backends: Mapping[str, tuple[str, ...]]
    packages: Path | None
    """A directory of modules that it imports, or None."""

    def run(self, backend: str, port: int, requests: int, tokenizer: Path, directory: Path) -> Outcome:
        """Run the tool against the gateway on this port."""
        result = directory / f"{self.name.split()[0]}-{backend}-{port}.json"
        words = [str(self.python), *self.words(backend, port, requests, tokenizer, result)]
        packages = {"PYTHONPATH": str(self.packages)} if self.packages else {}
        done = finished(words, _PATIENCE_SECONDS, {**_OFFLINE, **packages})
        lines = done.stdout.splitlines()
        summary = tuple(" ".join(line.split()) for line in lines if line.startswith(_SHOWN))
        if done.returncode != 0 or not result.exists():
            return Outcome(0, requests, 0, summary, "\n".join(lines[-5:]))
        report = json.loads(result.read_text().splitlines()[-1])
        completed = report["completed"]
        missing = completed * OUTPUT_TOKENS - report["total_output_tokens"]
        return Outcome(completed, requests - completed, missing, summary)


def bench_serving() -> Tool | None:
    """Return `sglang.bench_serving`, or None if it cannot be installed."""
    packages = _sglang_packages()
    if packages is None:
        return None
    backends = {"vLLM": ("vllm", "vllm-chat"), "SGLang": ("sglang", "sglang-oai", "sglang-oai-chat")}
    name = f"sglang.bench_serving {_SGLANG}"
    return Tool(name, PEERS.python, _bench_serving, backends, packages)


def bench_serve() -> Tool | None:
    """Return `vllm bench serve` of scripts/test-real's environment, or None without it."""
    python = _REAL / "bin" / "python"
    if not python.exists():
        return None
    backends = {"vLLM": ("openai", "openai-chat"), "SGLang": ("openai-chat",)}
    return Tool("vllm bench serve", python, _bench_serve, backends, None)


def _sglang_packages() -> Path | None:
    """Return the directory of its modules, extracted at the first use, or None if that fails."""
    if not PEERS.provide(_NEEDS):
        return None
    if not _SGLANG_DIRECTORY.exists():
        with tempfile.TemporaryDirectory(dir=_SGLANG_DIRECTORY.parent) as temporary:
            wheel = _download(Path(temporary))
            if wheel is None:
                return None
            _unpack(wheel, Path(temporary) / "unpacked")
            (Path(temporary) / "unpacked").rename(_SGLANG_DIRECTORY)
    return _SGLANG_DIRECTORY


def _download(directory: Path) -> Path | None:
    print(f"fetching the client side of sglang {_SGLANG} (40 MB, once)", file=sys.stderr, flush=True)
    pip = [str(PEERS.python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *_ANY_WHEEL, "--dest", str(directory), f"sglang=={_SGLANG}"], check=False)
    return next(directory.glob("*.whl"), None) if done.returncode == 0 else None


def _unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.startswith(_PARTS)])
    for name, text in _IN_PLACE_OF_OTHERS.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def _bench_serving(backend: str, port: int, requests: int, tokenizer: Path, result: Path) -> list[str]:
    options = {
        "--backend": backend,
        "--base-url": f"http://{HOST}:{port}",
        "--model": MODEL,
        "--tokenizer": tokenizer,
        # Random ids, because the data set `random` begins with real conversations, which it would download.
        "--dataset-name": "random-ids",
        "--random-input-len": INPUT_TOKENS,
        "--random-output-len": OUTPUT_TOKENS,
        "--random-range-ratio": 1,
        "--num-prompts": requests,
        "--max-concurrency": CONCURRENCY,
        "--output-file": result,
    }
    words = [str(word) for option in options.items() for word in option]
    flags = ["--disable-tqdm", *(["--pd-separated"] if backend.startswith("sglang") else [])]
    return ["-m", "sglang.bench_serving", *words, *flags]


def _bench_serve(backend: str, port: int, requests: int, tokenizer: Path, result: Path) -> list[str]:
    options = {
        "--backend": backend,
        "--base-url": f"http://{HOST}:{port}",
        "--endpoint": "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions",
        "--model": MODEL,
        "--tokenizer": tokenizer,
        "--dataset-name": "random",
        "--random-input-len": INPUT_TOKENS,
        "--random-output-len": OUTPUT_TOKENS,
        "--num-prompts": requests,
        "--max-concurrency": CONCURRENCY,
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    words = [str(word) for option in options.items() for word in option]
    flags = ["--ignore-eos", "--disable-tqdm", "--save-result"]
    return ["-m", "vllm.entrypoints.cli.main", "bench", "serve", *words, *flags]
