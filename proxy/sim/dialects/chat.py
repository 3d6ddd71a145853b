"""Chat answers: role, content, reasoning and tool-call messages, whole and in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from proxy.sim.dialects.answers import Answer, event, fingerprint, usage
from proxy.sim.model.logprobs import Speller, chat_logprobs
from proxy.sim.model.parser import KimiParser, Phase, parse_whole, start_phase
from proxy.sim.model.tokenizer import MARKERS, SECTION_BEGIN, THINK_END

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from proxy.sim.model.ask import Ask
    from proxy.sim.model.sequence import Delta, Sequence
    from proxy.sim.options import Options


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, ask: Ask, options: Options, answer_id: str) -> None:
        super().__init__(ask, options, answer_id)
        self._started = False
        is_engine = options.profile.has_parser_engine
        start = start_phase(ask.phase_prompt or ask.prompts[0])
        self._parsers = [
            KimiParser(start, reads_tools=ask.calls_tools, is_engine=is_engine)
            for _ in range(ask.samples if ask.is_parsed else 0)
        ]
        self._spellers = [Speller() for _ in range(ask.samples if ask.logprobs is not None else 0)]
        self._thinks = [start is Phase.REASONING and ask.is_thinking] * ask.samples
        self._reasoning_tokens = [0] * ask.samples
        # Without a parser there is no reasoning to hide; the older parsers show it in streams all the same.
        has_parser = bool(options.reasoning_parser or options.tool_call_parser)
        self._hides_reasoning = is_engine and has_parser and not ask.include_reasoning
        head = orjson.dumps(self.head(self.chunk_kind))[:-1]
        self._plain_start = b"data: " + head + b',"choices":[{"index":0,"delta":{"content":'
        no_params = b',"kv_transfer_params":null' if options.profile.streams_kv_params else b""
        self._plain_end = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]%b}\n\n' % no_params
        self._is_plain = not (ask.continuous_usage or ask.return_token_ids or self._parsers or ask.logprobs is not None)

    def events(self, delta: Delta) -> list[bytes]:
        events = [] if self._started else self._role_chunks()
        self._started = True
        if self._is_swallowed(delta) or delta.finish_reason == "error" or delta.fault:
            return events
        self.sent_tokens[delta.index] += len(delta.token_ids)
        self._count_reasoning(delta)
        if self._is_plain and delta.finish_reason is None and delta.index == 0:
            return [*events, self._plain_start + orjson.dumps(delta.text) + self._plain_end]
        message = self._message(delta)
        if message is None:
            if delta.finish_reason is None and not (self._shows_token_ids() or self._shows_logprobs()):
                return events
            message = {}
        return [*events, self._chunk(self._choice(delta, message), delta.index)]

    def _role_chunks(self) -> list[bytes]:
        chunks = []
        for index in range(self.ask.samples):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self.head(self.chunk_kind) | {"choices": [choice]}
            if self.ask.continuous_usage:
                chunk["usage"] = usage(self.prompt_tokens, 0) | self.completion_details(index)
            chunk["prompt_token_ids"] = self.ask.prompts[0] if self.ask.return_token_ids else None
            if self.options.profile.has_prompt_text:
                chunk["prompt_text"] = None
            chunks.append(event(chunk))
        return chunks

    def _message(self, delta: Delta) -> dict[str, Any] | None:
        if not self._parsers:
            return {"content": delta.text}
        message = self._parsers[delta.index].feed(delta.text, finished=delta.finish_reason is not None)
        if message and self._hides_reasoning:
            message.pop("reasoning", None)
        if message and self.ask.one_call and "tool_calls" in message:
            # A list that is empty then is told all the same (vLLM `maybe_filter_parallel_tool_calls`).
            message["tool_calls"] = [call for call in message["tool_calls"] if call["index"] == 0]
        return message or None

    def _shows_token_ids(self) -> bool:
        return self.ask.return_token_ids and not self._hides_reasoning

    def _shows_logprobs(self) -> bool:
        return self.ask.logprobs is not None and not self._hides_reasoning

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.ask.logprobs is None or self._hides_reasoning:
            return None
        return chat_logprobs(delta.token_ids, self.ask.logprobs, self._spellers[delta.index])

    def _count_reasoning(self, delta: Delta) -> None:
        if not self._thinks[delta.index]:
            return
        for token in delta.token_ids:
            if token in (THINK_END, SECTION_BEGIN):
                self._thinks[delta.index] = False
                return
            self._reasoning_tokens[delta.index] += token not in MARKERS

    def completion_details(self, index: int | None = None) -> dict[str, Any]:
        if not self.options.profile.counts_reasoning:
            return {}
        if not self.options.reasoning_parser:
            return {"completion_tokens_details": None}
        tokens = sum(self._reasoning_tokens) if index is None else self._reasoning_tokens[index]
        return {"completion_tokens_details": {"reasoning_tokens": tokens}}

    def _choice(self, delta: Delta, message: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": delta.index, "delta": message}
        choice |= {"logprobs": self._logprobs(delta), "finish_reason": None}
        if delta.finish_reason is not None:
            called = bool(self._parsers) and self._parsers[delta.index].called_tools
            is_changed = delta.finish_reason == "stop" or not self.options.profile.keeps_length_finish
            calls_tools = called and not self.ask.names_tool and is_changed
            choice["finish_reason"] = "tool_calls" if calls_tools else delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = delta.token_ids if self._shows_token_ids() else None
        return choice

    def whole(
        self, sequences: Seq[Sequence], texts: Seq[Delta], cached_tokens: int, kv_params: dict[str, Any] | None
    ) -> dict[str, Any]:
        choices = [self._whole_choice(delta) for delta in texts]
        return self.head(self.kind) | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": fingerprint(self.options),
            "usage": self._whole_usage(sequences, cached_tokens),
            "prompt_logprobs": self.prompt_logprobs(self.ask.prompts[0]),
            "prompt_token_ids": self.ask.prompts[0] if self.ask.return_token_ids else None,
            **({"prompt_text": None} if self.options.profile.has_prompt_text else {}),
            "kv_transfer_params": self.own_kv_params() if kv_params is None else kv_params,
            **({"metrics": None} if self.options.profile.has_routed_experts else {}),
        }

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": delta.text, "reasoning": None}
        calls_tools = False
        self._thinks[delta.index] = self.ask.is_thinking
        self._count_reasoning(delta)
        if self._parsers:
            fields, calls_tools = parse_whole(
                delta.text,
                is_thinking=self.ask.is_thinking,
                reads_tools=self.ask.calls_tools,
                is_engine=self.options.profile.has_parser_engine,
            )
            if not self.ask.include_reasoning:
                fields["reasoning"] = None
            if self.ask.one_call and "tool_calls" in fields:
                fields["tool_calls"] = fields["tool_calls"][:1]
        message = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None} | fields
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": "tool_calls" if calls_tools and not self.ask.names_tool else delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._shows_token_ids() else None,
            **({"routed_experts": None} if self.options.profile.has_routed_experts else {}),
        }
