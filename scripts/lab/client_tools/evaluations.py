"""lm-eval, with log-likelihoods and texts: results must equal those of a single engine.

It is installed only on request, into .venv-evaluations, because it takes a gigabyte, mostly data sets.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from lab.client_tools.tools import MODEL
from lab.common.fleet import Fleet
from lab.common.peers import Environment
from lab.common.processes import HOST, clean_environment

_ENVIRONMENT: Final = Environment(".venv-evaluations")
# These three have no wheels, and are pure Python.
_SOURCES: Final = ("sqlitedict", "word2number", "rouge-score")
_WHEELS: Final = ("lm-eval[api]==0.4.13", "transformers<6")
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_QUESTIONS: Final = (
    {"question": "Which river flows through Cairo?", "choices": ["the Nile", "the Po"], "answer": 0},
    {"question": "Which river flows through Turin?", "choices": ["the Nile", "the Po"], "answer": 1},
    {"question": "What is two and two?", "choices": ["four", "a long way of saying five"], "answer": 0},
)
_CHOICE: Final = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
_GENERATE: Final = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
_TASKS: Final[dict[str, dict[str, Any]]] = {"choice": _CHOICE, "generate": _GENERATE}
_RUNS: Final = (
    ("local-completions", "completions", tuple(_TASKS)),
    ("local-chat-completions", "chat/completions", ("generate",)),
)


def is_installed() -> bool:
    """Return whether lm-eval is installed."""
    return _ENVIRONMENT.has(_WHEELS[0])


def provide() -> bool:
    """Install lm-eval (900 MB). Return False if pip fails, which prints the reason."""
    return _ENVIRONMENT.provide(_WHEELS, "--no-binary", ",".join(_SOURCES))


def run(port: int, directory: Path) -> tuple[bool, str]:
    """Run all tasks by the gateway and by a single engine. Return whether they agree, and a summary."""
    _write_tasks(directory)
    tokenizer = directory / "tokenizer"
    made = Path(__file__).with_name("tokenizer.py")
    subprocess.run([str(_ENVIRONMENT.python), str(made), str(tokenizer)], check=True, capture_output=True)
    with Fleet() as fleet:
        alone = fleet.mock_engine("both", "--model", MODEL, "--profile", "v0.33")
        alone.wait()
        results = [_answers(each, tokenizer, directory / str(each)) for each in (port, alone.port)]
    if results[0] != results[1]:
        return False, f"the gateway's answers {results[0]} differ from the engine's {results[1]}"
    return True, f"{len(results[0])} answers equal those of a single engine: log-likelihoods, texts and chats"


def _write_tasks(directory: Path) -> None:
    questions = directory / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(question)}\n" for question in _QUESTIONS))
    for name, task in _TASKS.items():
        definition: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(questions)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **task,
        }
        (directory / f"{name}.yaml").write_text(json.dumps(definition))  # JSON is YAML


def _answers(port: int, tokenizer: Path, results: Path) -> list[Any]:
    """Return the answers to the questions, in order."""
    answers = []
    for model, path, tasks in _RUNS:
        is_chat = path.startswith("chat")
        arguments = f"model={MODEL},base_url=http://{HOST}:{port}/v1/{path},num_concurrent=2"
        arguments += "" if is_chat else f",tokenizer={tokenizer}"
        command = [str(_ENVIRONMENT.python), "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
        command += ["--include_path", str(results.parent), "--tasks", *tasks, "--log_samples"]
        command += ["--output_path", str(results / model), *(["--apply_chat_template"] if is_chat else [])]
        environment = {**clean_environment(), **_OFFLINE, "HF_HOME": str(results.parent), "OPENAI_API_KEY": "any"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"lm-eval ended with {done.returncode}: {done.stderr[-2000:]}")
        for file in sorted((results / model).rglob("samples_*.jsonl")):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            answers += [line["resps"] for line in sorted(lines, key=lambda line: int(line["doc_id"]))]
    return answers
