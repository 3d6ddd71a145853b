"""Run clients against the gateway in front of simulated engines: no request may fail.

Those are the engines' own load generators, clients' libraries, Claude Code, Codex and opencode, and lm-eval.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from lab.client_tools import evaluations, libraries, tools
from lab.client_tools.coding_agents import CODING_AGENTS
from lab.client_tools.deployments import DEPLOYMENTS, TOOLS
from lab.common.output import aligned
from lab.common.processes import unwind_on_signals

_NOTES = f"""
Two prefillers and two decoders each; prompts of {tools.INPUT_TOKENS} tokens and answers of {tools.OUTPUT_TOKENS}, \
{tools.CONCURRENCY} at a time. The engines are simulated: the
tools' figures say that they understand the answers, and nothing about speed."""


def main() -> None:
    """The whole run."""
    unwind_on_signals()
    options = _options()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        went_well = [run(options, directory) for name, run in _RUNS.items() if options.only in (None, name)]
    sys.exit(not all(went_well))


def _run_load(options: argparse.Namespace, directory: Path) -> bool:
    found = [tool for tool in (tools.bench_serving(), tools.bench_serve()) if tool is not None]
    if not found:
        sys.exit("neither load generator can be had")
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
    _tell_what_is_missing([tool.name for tool in found])
    return all(row[-2:] == ("0", "0") for row in rows[1:])


def _run_libraries(options: argparse.Namespace, directory: Path) -> bool:
    if not libraries.provide():
        sys.exit("clients' libraries cannot be had")
    went_well = []
    with TOOLS.started() as gateway:
        for name in libraries.names():
            is_well, told = libraries.ran(name, gateway.port)
            print(f"{name}: {told}" if is_well else f"{name} failed:\n{told}", flush=True)
            went_well.append(is_well)
    return all(went_well)


def _run_agents(options: argparse.Namespace, directory: Path) -> bool:
    """Each in front of engines of its own, of which it loses one."""
    if not libraries.provide():
        sys.exit("Claude Code, Codex and opencode cannot be had")
    went_well = []
    for agent in CODING_AGENTS:
        place = directory / agent.name.replace(" ", "-")
        place.mkdir()
        with TOOLS.started() as gateway:
            is_well, told = agent.run(gateway, place)
        print(f"{agent.name}: {told}" if is_well else f"{agent.name} failed: {told}", flush=True)
        went_well.append(is_well)
    return all(went_well)


def _run_evaluations(options: argparse.Namespace, directory: Path) -> bool:
    if options.only is None and not evaluations.is_installed():
        print("Without lm-eval: --only evaluations installs it, which takes a gigabyte.")
        return True
    if not evaluations.provide():
        sys.exit("lm-eval cannot be had")
    went_well = []
    for deployment in DEPLOYMENTS:
        place = directory / f"evaluations-{deployment.name}"
        place.mkdir()
        with deployment.started() as gateway:
            is_well, told = evaluations.run(gateway.port, place)
        print(f"lm-eval, {deployment.name}: {told}" if is_well else f"lm-eval, {deployment.name} failed: {told}")
        went_well.append(is_well)
    return all(went_well)


_RUNS: Final = {
    "load": _run_load,
    "libraries": _run_libraries,
    "agents": _run_agents,
    "evaluations": _run_evaluations,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/client-tools", description=__doc__)
    parser.add_argument("--only", choices=list(_RUNS), help="only these clients")
    parser.add_argument("--requests", type=int, default=60, help="of each run of a load generator (default: 60)")
    parser.add_argument("--engines", choices=[deployment.name for deployment in DEPLOYMENTS], help="only load of these")
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
