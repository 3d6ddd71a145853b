"""The load generators: their command lines, and what they say in the end."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab.client_tools import sglang
from lab.client_tools.deployments import MODEL
from lab.common import environment
from lab.common.processes import HOST, finished

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INPUT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 100, 16, 8
_PATIENCE_SECONDS = 300.0
# The engines' environment of scripts/test-real, or that of the same variable.
_REAL = Path(os.environ.get("PDPROXY_REAL_VENV", ".venv-real")).absolute()
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# The lines of a summary that are shown, as both tools call them.
_SHOWN = (
    *("Successful requests:", "Failed requests:", "Total input tokens:", "Total generated tokens:"),
    *("Mean TTFT", "Mean TPOT", "P99 TPOT"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. `problem`: the end of the tool's own words, when it gave up."""

    completed: int
    failed: int
    missing_tokens: int
    """Of the answers that are complete."""
    summary: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator. `backends`: what it may speak to the engines of a deployment, by the deployment's name."""

    name: str
    python: Path
    words: Callable[[str, int, int, Path, Path], list[str]]
    """For a backend, a port, a number of requests, the tokenizer and the file for the result."""
    backends: Mapping[str, tuple[str, ...]]
    packages: Path | None
    """A directory of modules that it imports."""

    def run(self, backend: str, port: int, requests: int, tokenizer: Path, directory: Path) -> Outcome:
        """Against the gateway on this port."""
        result = directory / f"{self.name.split()[0]}-{backend}-{port}.json"
        words = [str(self.python), *self.words(backend, port, requests, tokenizer, result)]
        packages = {"PYTHONPATH": str(self.packages)} if self.packages else {}
        done = finished(words, _PATIENCE_SECONDS, {**_OFFLINE, **packages})
        said = done.stdout.splitlines()
        summary = tuple(" ".join(line.split()) for line in said if line.startswith(_SHOWN))
        if done.returncode != 0 or not result.exists():
            return Outcome(0, requests, 0, summary, "\n".join(said[-5:]))
        told = json.loads(result.read_text().splitlines()[-1])
        completed = told["completed"]
        missing = completed * OUTPUT_TOKENS - told["total_output_tokens"]
        return Outcome(completed, requests - completed, missing, summary)


def bench_serving() -> Tool | None:
    """`sglang.bench_serving`; None when it cannot be had."""
    packages = sglang.provide()
    if packages is None:
        return None
    backends = {"vLLM": ("vllm", "vllm-chat"), "SGLang": ("sglang", "sglang-oai", "sglang-oai-chat")}
    name = f"sglang.bench_serving {sglang.VERSION}"
    return Tool(name, environment.PYTHON.absolute(), _bench_serving, backends, packages)


def bench_serve() -> Tool | None:
    """`vllm bench serve` of the engines for scripts/test-real; None when they are not there."""
    python = _REAL / "bin" / "python"
    if not python.exists():
        return None
    backends = {"vLLM": ("openai", "openai-chat"), "SGLang": ("openai-chat",)}
    return Tool("vllm bench serve", python, _bench_serve, backends, None)


def _bench_serving(backend: str, port: int, requests: int, tokenizer: Path, result: Path) -> list[str]:
    options = {
        "--backend": backend,
        "--base-url": f"http://{HOST}:{port}",
        "--model": MODEL,
        "--tokenizer": tokenizer,
        # Of random ids, because the other random one begins with real conversations, which it would download.
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
