"""Injects faults: decides which requests fail, and how.

A rule names an action and the requests to which it applies. The rules that apply to one request are its `Plan`. A test
adds rules by `engine.faults.add("reset_after_tokens", tokens=3, times=1)` or by `POST /_mock/faults`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final

FAULT_ACTIONS: Final[dict[str, str]] = {
    "refuse_status": "answer `status` with `body` (an OpenAI-style error unless given)",
    "retired": "answer 503 on every path but the health check, as a rank that left a group of elastic EP (vLLM 0.33)",
    "scaling": "the same, as a rank of a group that is being scaled",
    "paused": "answer 503 to generations, as after POST /pause",
    "slow_headers": "wait `seconds`, then go on",
    "hang_before_headers": "never answer",
    "hang_after_headers": "answer 200 and headers, then nothing",
    "reset_before_headers": "reset the connection instead of answering",
    "close_reused": "close a connection that has served before instead of answering",
    "reset_after_headers": "answer 200 and headers, then reset the connection",
    "reset_after_tokens": "stream `tokens` tokens, then reset the connection",
    "stall_after_tokens": "stream `tokens` tokens, then send nothing more",
    "end_without_finish": "stream `tokens` tokens, then end without finish_reason (with `[DONE]` if `done`)",
    "error_event": "stream `tokens` tokens, then an error event and `[DONE]`",
    "retract": "after `tokens` tokens, error 503 for lack of KV memory, as SGLang reports it without a backup",
    "exhaust_host_pool": "after `tokens` tokens, error 500 for lack of host memory for a backup, as SGLang reports it",
    "recompute": "after `tokens` tokens end with stop_reason 'recomputed', the last `merged` of them in that chunk",
    "abort": "after `tokens` tokens end with finish_reason 'abort', as an engine does that is stopped or paused",
    "drop_token_ids": "answer without token ids, whatever `return_token_ids` says",
    "ignore_prompt_ids": "render a chat's messages although `kv_transfer_params` gives its prompt as ids",
    "slow_load": "the transfer of KV takes `seconds` longer",
    "load_failure": "the KV cannot be loaded",
    "corrupt_kv": "the KV that was fetched is that of another prompt",
    "other_tokenizer": "the prompt has one token more than other engines make of it",
    "ignore_leaving": "do not notice that the client has left; only an abort by name ends the request",
    "missing_kv_params": "answer a prefill without kv_transfer_params, pinning and sending nothing",
    "lost_response": "pin the KV of a prefill, or exchange the role, then reset the connection",
    "truncated_json": "close in the middle of a non-streamed body",
    "invalid_json": "answer 200 with a body that is not JSON",
    "split_bytes": "write the stream in pieces of `size` bytes",
    "coalesce": "write `size` events at a time",
    "crlf": "end the lines of the stream with CRLF",
    "comments": "put an SSE comment before every event",
    "kill": "after `tokens` tokens (0: before headers) the process exits, or the in-process engine is killed",
}


class UnknownFaultAction(ValueError):
    """A fault rule named an action or a field that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of failure, and the conditions under which it happens. All conditions must hold.

    Path and request ID must contain the given text, and the request's member `user` must have the given value. Of the
    matching requests, every n-th fails, with this probability, up to this number of times.
    """

    action: str
    path: str = "/v1/"
    request_id: str = ""
    user: str = ""
    every: int = 1
    skip: int = 0
    probability: float = 1.0
    times: int | None = None
    status: int = 503
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    merged: int = 0
    size: int = 1
    done: bool = False


class Plan:
    """The rules that apply to one request, at most one per action."""

    __slots__ = ("_rules",)

    def __init__(self, rules: dict[str, Rule] | None = None) -> None:
        self._rules = rules or {}

    def get(self, action: str) -> Rule | None:
        return self._rules.get(action)

    def __contains__(self, action: str) -> bool:
        return action in self._rules

    def has_any(self, *actions: str) -> bool:
        return any(action in self._rules for action in actions)

    def __len__(self) -> int:
        return len(self._rules)


class Faults:
    """The fault rules of one engine. Counts how often each rule matched and how often it caused a failure."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._rules: list[Rule] = []
        self._match_counts: list[int] = []
        self._fired_counts: list[int] = []

    def add(self, action: str, **fields: Any) -> Rule:
        if action not in FAULT_ACTIONS:
            raise UnknownFaultAction(f"unknown fault {action!r}; known are {', '.join(sorted(FAULT_ACTIONS))}")
        try:
            rule = Rule(action=action, **fields)
        except TypeError as error:
            raise UnknownFaultAction(str(error)) from None
        self._rules.append(rule)
        self._match_counts.append(0)
        self._fired_counts.append(0)
        return rule

    def clear(self) -> None:
        self._rules.clear()
        self._match_counts.clear()
        self._fired_counts.clear()

    def has(self, action: str) -> bool:
        """Return whether there is a rule with this action.

        For actions that affect all requests until they are cleared.
        """
        return any(rule.action == action for rule in self._rules)

    def plan(self, path: str, request_id: str, user: object = None) -> Plan:
        """Return the rules that apply to this request. Counts the request for `every`, `skip` and `times`."""
        if not self._rules:
            return _NO_FAULTS
        rules: dict[str, Rule] = {}
        for index, rule in enumerate(self._rules):
            if rule.action not in rules and self._rule_fires(index, rule, path, request_id, user):
                rules[rule.action] = rule
        return Plan(rules)

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"action": rule.action, "path": rule.path, "matched": matched, "fired": fired, "times": rule.times}
            for rule, matched, fired in zip(self._rules, self._match_counts, self._fired_counts, strict=True)
        ]

    def _rule_fires(self, index: int, rule: Rule, path: str, request_id: str, user: object) -> bool:
        if rule.path not in path or rule.request_id not in request_id or (rule.user and rule.user != user):
            return False
        self._match_counts[index] += 1
        count = self._match_counts[index] - rule.skip
        if count <= 0 or count % rule.every or (rule.times is not None and self._fired_counts[index] >= rule.times):
            return False
        if rule.probability < 1.0 and self._random.random() >= rule.probability:
            return False
        self._fired_counts[index] += 1
        return True


_NO_FAULTS: Final = Plan()
