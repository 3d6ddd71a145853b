"""Run clients against the gateway in front of simulated engines. No request may fail.

Clients are the engines' load generators, client libraries, Claude Code, Codex and opencode, and lm-eval.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from lab.client_tools import evaluations, tools
from lab.client_tools.coding_agents import CODING_AGENTS, names, provide, ran
from lab.client_tools.tools import DEPLOYMENTS, TOOLS
from lab.common.output import aligned
from lab.common.processes import unwind_on_signals

_NOTES = f"""
Two prefillers and two decoders each; prompts of {tools.INPUT_TOKENS} tokens and answers of {tools.OUTPUT_TOKENS}, \
{tools.CONCURRENCY} at a time. The engines are simulated, so
the tools' figures show that they accept the answers, and nothing about speed."""


def main() -> None:
    unwind_on_signals()
    options = _options()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        successes = [run(options, directory) for name, run in _RUNS.items() if options.only in (None, name)]
    sys.exit(not all(successes))


def _run_load(options: argparse.Namespace, directory: Path) -> bool:
    found = [tool for tool in (tools.bench_serving(), tools.bench_serve()) if tool is not None]
    if not found:
        sys.exit("no load generator could be installed")
    rows: list[tuple[str, ...]] = [("engines", "tool", "backend", "completed", "tokens missing", "failed")]
    tokenizer = _tokenizer(found[0].python, directory)
    for deployment in DEPLOYMENTS:
        if options.engines not in (None, deployment.name):
            continue
        with deployment.started() as gateway:
            for tool, backend in ((each, name) for each in found for name in each.backends[deployment.name]):
                outcome = tool.run(backend, gateway.port, options.requests, tokenizer, directory)
                numbers = (outcome.completed, outcome.missing_tokens, outcome.failed)
                rows.append((deployment.name, tool.name, backend, *map(str, numbers)))
                print(f"{deployment.name}, {tool.name}, {backend}: {'; '.join(outcome.summary)}", flush=True)
                if outcome.problem:
                    print(outcome.problem, file=sys.stderr, flush=True)
    print(f"\n{aligned(rows)}")
    print(_NOTES)
    _print_missing_tools([tool.name for tool in found])
    return all(row[-2:] == ("0", "0") for row in rows[1:])


def _run_libraries(options: argparse.Namespace, directory: Path) -> bool:
    if not provide():
        sys.exit("the client libraries could not be installed")
    successes = []
    with TOOLS.started() as gateway:
        for name in names():
            is_success, summary = ran(name, gateway.port)
            print(f"{name}: {summary}" if is_success else f"{name} failed:\n{summary}", flush=True)
            successes.append(is_success)
    return all(successes)


def _run_agents(options: argparse.Namespace, directory: Path) -> bool:
    """Run each agent in front of separate engines, one of which is killed."""
    if not provide():
        sys.exit("Claude Code, Codex and opencode could not be installed")
    successes = []
    for agent in CODING_AGENTS:
        place = directory / agent.name.replace(" ", "-")
        place.mkdir()
        with TOOLS.started() as gateway:
            is_success, summary = agent.run(gateway, place)
        print(f"{agent.name}: {summary}" if is_success else f"{agent.name} failed: {summary}", flush=True)
        successes.append(is_success)
    return all(successes)


def _run_evaluations(options: argparse.Namespace, directory: Path) -> bool:
    if options.only is None and not evaluations.is_installed():
        print("lm-eval is not installed: --only evaluations installs it (1 GB).")
        return True
    if not evaluations.provide():
        sys.exit("lm-eval could not be installed")
    successes = []
    for deployment in DEPLOYMENTS:
        place = directory / f"evaluations-{deployment.name}"
        place.mkdir()
        with deployment.started() as gateway:
            is_success, summary = evaluations.run(gateway.port, place)
        print(
            f"lm-eval, {deployment.name}: {summary}" if is_success else f"lm-eval, {deployment.name} failed: {summary}"
        )
        successes.append(is_success)
    return all(successes)


_RUNS: Final = {
    "load": _run_load,
    "libraries": _run_libraries,
    "agents": _run_agents,
    "evaluations": _run_evaluations,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/client-tools", description=__doc__)
    parser.add_argument("--only", choices=list(_RUNS), help="run only these clients")
    parser.add_argument("--requests", type=int, default=60, help="requests per run of a load generator (default: 60)")
    parser.add_argument(
        "--engines",
        choices=[deployment.name for deployment in DEPLOYMENTS],
        help="run load generators only on these engines",
    )
    return parser.parse_args()


def _tokenizer(python: Path, directory: Path) -> Path:
    target = directory / "tokenizer"
    script = Path(__file__).with_name("tokenizer.py")
    done = subprocess.run([str(python), str(script), str(target)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the tokenizer could not be made:\n{done.stderr}")
    return target


def _print_missing_tools(found: list[str]) -> None:
    if not any(name.startswith("sglang") for name in found):
        print("sglang.bench_serving is missing: its wheel or requirements could not be installed.")
    if not any(name.startswith("vllm") for name in found):
        print("`vllm bench serve` is missing: scripts/test-real installs vLLM into .venv-real.")


if __name__ == "__main__":
    main()
