"""Run the engines' own load generators against the gateway in front of simulated engines: no request may fail."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from lab.client_tools import tools
from lab.client_tools.deployments import DEPLOYMENTS
from lab.common.invocation import unwind_on_signals
from lab.common.table import aligned

_NOTES = f"""
Two prefillers and two decoders each; prompts of {tools.INPUT_TOKENS} tokens and answers of {tools.OUTPUT_TOKENS}, \
{tools.CONCURRENCY} at a time. The engines are simulated: the
tools' figures say that they understand the answers, and nothing about speed."""


def main() -> None:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    found = [tool for tool in (tools.bench_serving(), tools.bench_serve()) if tool is not None]
    if not found:
        sys.exit("neither tool can be had")
    rows: list[tuple[str, ...]] = [("engines", "tool", "backend", "completed", "tokens missing", "failed")]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer = _tokenizer(found[0].python, directory)
        for deployment in DEPLOYMENTS:
            if options.engines not in (None, deployment.name):
                continue
            with deployment.started(directory) as port:
                for tool, backend in ((each, name) for each in found for name in each.backends[deployment.name]):
                    outcome = tool.run(backend, port, options.requests, tokenizer, directory)
                    numbers = (outcome.completed, outcome.missing_tokens, outcome.failed)
                    rows.append((deployment.name, tool.name, backend, *map(str, numbers)))
                    print(f"{deployment.name}, {tool.name}, {backend}: {'; '.join(outcome.summary)}", flush=True)
                    if outcome.problem:
                        print(outcome.problem, file=sys.stderr, flush=True)
    print(f"\n{aligned(rows)}")
    print(_NOTES)
    _tell_what_is_missing([tool.name for tool in found])
    sys.exit(any(row[-2:] != ("0", "0") for row in rows[1:]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/client-tools", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--engines", choices=[deployment.name for deployment in DEPLOYMENTS], help="only these")
    return parser.parse_args()


def _tokenizer(python: Path, directory: Path) -> Path:
    made = directory / "tokenizer"
    script = Path(__file__).with_name("tokenizer.py")
    done = subprocess.run([str(python), str(script), str(made)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the tokenizer could not be made:\n{done.stderr}")
    return made


def _tell_what_is_missing(found: list[str]) -> None:
    if not any(name.startswith("sglang") for name in found):
        print("Without sglang.bench_serving: its wheel, or what it needs, could not be installed.")
    if not any(name.startswith("vllm") for name in found):
        print("Without `vllm bench serve`: run scripts/test-real once, which installs vLLM into .venv-real.")


if __name__ == "__main__":
    main()
