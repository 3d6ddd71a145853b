"""Writes answers of the OpenAI API in the form of vLLM: chats, completions and their log probabilities.

The order of the fields and the explicit nulls follow vLLM's response models dumped with `exclude_unset`: a field that a
handler sets is written even if it is null.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from proxy.sim.model.parser import Phase, SimulatedKimiParser, parse_complete_text, start_phase
from proxy.sim.model.request import Delta, GenerationRequest, TokenSequence
from proxy.sim.model.tokenizer import MARKERS, SECTION_BEGIN, THINK_END, Detokenizer, decode_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.sim.options import Options


DONE = b"data: [DONE]\n\n"


def make_event(payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def make_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


def make_fingerprint(options: Options) -> str | None:
    return f"vllm-{options.profile.version}-sim" if options.profile.has_fingerprint else None


class DeltaCollector:
    """Merges the deltas of an answer that is not streamed into one delta for each choice."""

    def __init__(self, choices: int) -> None:
        self.deltas = [Delta(index, "", []) for index in range(choices)]

    def on_delta(self, delta: Delta) -> None:
        self.deltas[delta.index].merge(delta)


class Answer:
    """The base of chat and completion answers: the head of every body and chunk, and the token counts."""

    kind = ""
    chunk_kind = ""

    def __init__(self, ask: GenerationRequest, options: Options, answer_id: str) -> None:
        self.ask = ask
        self.options = options
        self.answer_id = answer_id
        self.created = int(time.time())
        self.kept_params: dict[str, Any] | None = None
        """The parameters of the decoder's own KV cache, known at the end of the answer; None if it keeps none."""
        self.sent_tokens = [0] * (len(ask.prompts) * ask.samples)
        self.prompt_tokens = sum(map(len, ask.prompts))

    def chunk_head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.ask.model}

    @property
    def unknown_tokens(self) -> int:
        """Return the number of tokens at the beginning of each prompt without log probabilities.

        They are the first token, and all tokens that were not computed here.
        """
        if self.options.profile.is_sglang:
            is_foreign = self.options.role == "decode"
        else:
            is_foreign = bool(self.ask.kv_params.get("do_remote_prefill"))
        return self.prompt_tokens if is_foreign else 1

    def prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None] | None:
        top = self.ask.prompt_logprobs
        return None if top is None else prompt_logprobs(prompt, top, unknown=min(self.unknown_tokens, len(prompt)))

    def events(self, delta: Delta) -> list[bytes]:
        raise NotImplementedError

    def whole(
        self,
        sequences: Sequence[TokenSequence],
        texts: Sequence[Delta],
        cached_tokens: int,
        kv_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        raise NotImplementedError

    def completion_details(self, index: int | None = None) -> dict[str, Any]:
        """Return the usage details for the tokens of one choice or of all choices; empty in versions that have none."""
        return {}

    def closing(self, cached_tokens: int) -> list[bytes]:
        """Return the events after the last choice: the usage if requested, then the end mark."""
        if not self.ask.include_usage:
            return [DONE]
        counts = make_usage(self.prompt_tokens, sum(self.sent_tokens), self._reported_cached_tokens(cached_tokens))
        counts |= {name: details for name, details in self.completion_details().items() if details is not None}
        chunk = self.chunk_head(self.chunk_kind) | {"choices": [], "usage": counts}
        if name := make_fingerprint(self.options):
            chunk["system_fingerprint"] = name
        return [make_event(chunk), DONE]

    def _reported_cached_tokens(self, cached_tokens: int) -> int | None:
        return cached_tokens if self.options.prompt_tokens_details else None

    def _whole_usage(self, sequences: Sequence[TokenSequence], cached_tokens: int) -> dict[str, Any]:
        tokens = sum(len(sequence.output) for sequence in sequences)
        counts = make_usage(self.prompt_tokens, tokens, self._reported_cached_tokens(cached_tokens))
        counts.setdefault("prompt_tokens_details", None)
        return counts | self.completion_details()

    def _is_swallowed_delta(self, delta: Delta) -> bool:
        """Return whether a chunk is not sent, because it has no text or tokens and precedes the first token."""
        if delta.text or delta.token_ids or self.sent_tokens[delta.index]:
            return False
        return delta.finish_reason is None or self.options.profile.swallows_empty_finish

    def _chunk(self, choice: dict[str, Any], index: int) -> bytes:
        chunk: dict[str, Any] = self.chunk_head(self.chunk_kind) | {"choices": [choice]}
        if self.ask.continuous_usage:
            prompt = self.ask.prompts[index // self.ask.samples]
            chunk["usage"] = make_usage(len(prompt), self.sent_tokens[index]) | self.completion_details(index)
        elif self.options.profile.explicit_nulls and not self.ask.is_chat:
            chunk["usage"] = None
        name = make_fingerprint(self.options)
        if name and choice["finish_reason"] and not self.ask.include_usage:
            chunk["system_fingerprint"] = name
        if self.options.profile.streams_kv_params:
            chunk["kv_transfer_params"] = self.kept_params if choice["finish_reason"] else None
        return make_event(chunk)


class TokenSpeller:
    """Returns the texts of one choice's tokens.

    A token within a character has no text, and the last token of the character has all of it (vLLM
    `v1/engine/logprobs.py`).
    """

    def __init__(self) -> None:
        self._detokenizer = Detokenizer(keep_markers=True)

    def spell_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self._detokenizer.feed(token) for token in token_ids]


def make_chat_logprobs(token_ids: Sequence[int], top: int, speller: TokenSpeller) -> dict[str, Any]:
    return {
        "content": [
            _logprob_entry(token, text, 0) | {"top_logprobs": _alternative_tokens(token, text, top)}
            for token, text in zip(token_ids, speller.spell_tokens(token_ids), strict=True)
        ]
    }


def make_completion_logprobs(
    token_ids: Sequence[int], top: int, text_offset: int, speller: TokenSpeller, *, unknown: int = 0
) -> dict[str, Any]:
    """Return the logprobs of a completion.

    `unknown`: number of tokens at the beginning without a value, such as the first token of a prompt.
    """
    tokens = speller.spell_tokens(token_ids)
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    known = list(zip(token_ids, tokens, strict=True))[unknown:]
    alternatives = [_alternative_tokens(token, text, top + 1) for token, text in known]
    return {
        "text_offset": offsets,
        "token_logprobs": [None] * unknown + [_made_up_logprob(token, 0) for token, _ in known],
        "tokens": tokens,
        "top_logprobs": [None] * unknown
        + [{entry["token"]: entry["logprob"] for entry in entries} for entries in alternatives],
    }


def prompt_logprobs(prompt: Sequence[int], top: int, *, unknown: int) -> list[dict[str, Any] | None]:
    """Return the logprobs of the prompt by token id, as in vLLM. `unknown` as in completion_logprobs."""
    told: list[dict[str, Any] | None] = [None] * unknown
    for token in prompt[unknown:]:
        ranked = {token: 0} | {(token + rank) % 256: rank for rank in range(1, top)}
        told.append(
            {
                str(rival): {
                    "logprob": _made_up_logprob(token, rank),
                    "rank": rank + 1,
                    "decoded_token": decode_tokens([rival]),
                }
                for rival, rank in ranked.items()
            }
        )
    return told


def _alternative_tokens(token: int, text: str, count: int) -> list[dict[str, Any]]:
    """Return the sampled token, and alternatives whose text is printable."""
    rivals = [_logprob_entry(token, decode_tokens([97 + (token + rank) % 26]), rank) for rank in range(1, count)]
    return [_logprob_entry(token, text, 0), *rivals][:count]


def _made_up_logprob(token: int, rank: int) -> float:
    return -(token * 37 % 97 + 1) / 1000 - rank


def _logprob_entry(token: int, text: str, rank: int) -> dict[str, Any]:
    return {"token": text, "logprob": _made_up_logprob(token, rank), "bytes": list(text.encode())}


def make_native_logprobs(token_ids: Sequence[int]) -> list[list[Any]]:
    """Return SGLang's triples of logprob, ID and text. The text is null, because it was not requested."""
    return [[_made_up_logprob(token, 0), token, None] for token in token_ids]


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, ask: GenerationRequest, options: Options, answer_id: str) -> None:
        super().__init__(ask, options, answer_id)
        self._started = False
        is_engine = options.profile.has_parser_engine
        start = start_phase(ask.phase_prompt or ask.prompts[0])
        self._parsers = [
            SimulatedKimiParser(start, reads_tools=ask.calls_tools, is_engine=is_engine)
            for _ in range(ask.samples if ask.is_parsed else 0)
        ]
        self._spellers = [TokenSpeller() for _ in range(ask.samples if ask.logprobs is not None else 0)]
        self._is_thinking = [start is Phase.REASONING and ask.is_thinking] * ask.samples
        self._reasoning_tokens = [0] * ask.samples
        # Without a parser there is no reasoning to hide; the older parsers show it in streams all the same.
        has_parser = bool(options.reasoning_parser or options.tool_call_parser)
        self._hides_reasoning = is_engine and has_parser and not ask.include_reasoning
        head = orjson.dumps(self.chunk_head(self.chunk_kind))[:-1]
        self._plain_start = b"data: " + head + b',"choices":[{"index":0,"delta":{"content":'
        no_params = b',"kv_transfer_params":null' if options.profile.streams_kv_params else b""
        self._plain_end = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]%b}\n\n' % no_params
        self._is_plain = not (ask.continuous_usage or ask.return_token_ids or self._parsers or ask.logprobs is not None)

    def events(self, delta: Delta) -> list[bytes]:
        events = [] if self._started else self._role_chunks()
        self._started = True
        if self._is_swallowed_delta(delta) or delta.finish_reason == "error" or delta.fault:
            return events
        self.sent_tokens[delta.index] += len(delta.token_ids)
        self._count_reasoning(delta)
        if self._is_plain and delta.finish_reason is None and delta.index == 0:
            return [*events, self._plain_start + orjson.dumps(delta.text) + self._plain_end]
        message = self._parse_message(delta)
        if message is None:
            if delta.finish_reason is None and not (self._shows_token_ids() or self._shows_logprobs()):
                return events
            message = {}
        return [*events, self._chunk(self._chunk_choice(delta, message), delta.index)]

    def _role_chunks(self) -> list[bytes]:
        chunks = []
        for index in range(self.ask.samples):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self.chunk_head(self.chunk_kind) | {"choices": [choice]}
            if self.ask.continuous_usage:
                chunk["usage"] = make_usage(self.prompt_tokens, 0) | self.completion_details(index)
            chunk["prompt_token_ids"] = self.ask.prompts[0] if self.ask.return_token_ids else None
            if self.options.profile.has_prompt_text:
                chunk["prompt_text"] = None
            chunks.append(make_event(chunk))
        return chunks

    def _parse_message(self, delta: Delta) -> dict[str, Any] | None:
        if not self._parsers:
            return {"content": delta.text}
        message = self._parsers[delta.index].parse_text(delta.text, finished=delta.finish_reason is not None)
        if message and self._hides_reasoning:
            message.pop("reasoning", None)
        if message and self.ask.one_call and "tool_calls" in message:
            # vLLM reports the list even if it is empty then (`maybe_filter_parallel_tool_calls`).
            message["tool_calls"] = [call for call in message["tool_calls"] if call["index"] == 0]
        return message or None

    def _shows_token_ids(self) -> bool:
        return self.ask.return_token_ids and not self._hides_reasoning

    def _shows_logprobs(self) -> bool:
        return self.ask.logprobs is not None and not self._hides_reasoning

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.ask.logprobs is None or self._hides_reasoning:
            return None
        return make_chat_logprobs(delta.token_ids, self.ask.logprobs, self._spellers[delta.index])

    def _count_reasoning(self, delta: Delta) -> None:
        if not self._is_thinking[delta.index]:
            return
        for token in delta.token_ids:
            if token in (THINK_END, SECTION_BEGIN):
                self._is_thinking[delta.index] = False
                return
            self._reasoning_tokens[delta.index] += token not in MARKERS

    def completion_details(self, index: int | None = None) -> dict[str, Any]:
        if not self.options.profile.counts_reasoning:
            return {}
        if not self.options.reasoning_parser:
            return {"completion_tokens_details": None}
        tokens = sum(self._reasoning_tokens) if index is None else self._reasoning_tokens[index]
        return {"completion_tokens_details": {"reasoning_tokens": tokens}}

    def _chunk_choice(self, delta: Delta, message: dict[str, Any]) -> dict[str, Any]:
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
        self,
        sequences: Sequence[TokenSequence],
        texts: Sequence[Delta],
        cached_tokens: int,
        kv_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        choices = [self._whole_choice(delta) for delta in texts]
        return self.chunk_head(self.kind) | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": make_fingerprint(self.options),
            "usage": self._whole_usage(sequences, cached_tokens),
            "prompt_logprobs": self.prompt_logprobs(self.ask.prompts[0]),
            "prompt_token_ids": self.ask.prompts[0] if self.ask.return_token_ids else None,
            **({"prompt_text": None} if self.options.profile.has_prompt_text else {}),
            "kv_transfer_params": self.kept_params if kv_params is None else kv_params,
            **({"ec_transfer_params": self._encoded_media()} if self.options.ec_role else {}),
            **({"metrics": None} if self.options.profile.has_routed_experts else {}),
        }

    def _encoded_media(self) -> dict[str, Any] | None:
        """Return the `ec_transfer_params` of an encoder: the places of encoded media by hash, or the transfers."""
        if self.options.ec_role != "producer":
            return None
        if self.options.ec_connector == "ECMooncakeConnector":
            items = self.ask.ec_params.get("ec_items") or [{} for _ in self.ask.media]
            return {"ec_items": [{"mm_hash": name, **item} for name, item in zip(self.ask.media, items, strict=True)]}
        place = {"peer_host": "127.0.0.1", "peer_port": 5601, "size_bytes": 4096, "shape": [64, 32], "metadata": {}}
        return {name: place | {"item_indices": [index]} for index, name in enumerate(self.ask.media)}

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": delta.text, "reasoning": None}
        calls_tools = False
        self._is_thinking[delta.index] = self.ask.is_thinking
        self._count_reasoning(delta)
        if self._parsers:
            fields, calls_tools = parse_complete_text(
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


class CompletionAnswer(Answer):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, ask: GenerationRequest, options: Options, answer_id: str) -> None:
        super().__init__(ask, options, answer_id)
        self._has_begun = [False] * len(self.sent_tokens)
        self._text_offsets = [0] * len(self.sent_tokens)
        self._spellers = [TokenSpeller() for _ in self.sent_tokens] if ask.logprobs is not None else []

    def events(self, delta: Delta) -> list[bytes]:
        if self._is_swallowed_delta(delta) or delta.finish_reason == "error" or delta.fault:
            return []
        choice = self._chunk_choice(delta)
        self.sent_tokens[delta.index] += len(delta.token_ids)
        return [self._chunk(choice, delta.index)]

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        is_first = not self._has_begun[delta.index]
        self._has_begun[delta.index] = True
        prompt = self.ask.prompts[delta.index // self.ask.samples]
        echoed = prompt if self.ask.echo and is_first else []
        logprobs = None if self.ask.logprobs is None else self._logprobs(delta, self.ask.logprobs, echoed)
        return {
            "index": delta.index,
            "text": decode_tokens(echoed, keep_markers=True) + ("" if self.ask.echo_only else delta.text),
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": prompt if self.ask.return_token_ids and is_first else None,
            "token_ids": delta.token_ids if self.ask.return_token_ids else None,
        }

    def _logprobs(self, delta: Delta, top: int, echoed: list[int]) -> dict[str, Any]:
        index = delta.index
        shown = echoed + ([] if self.ask.echo_only else delta.token_ids)
        unknown = min(self.unknown_tokens, len(echoed))
        offset, speller = self._text_offsets[index], self._spellers[index]
        logprobs = make_completion_logprobs(shown, top, offset, speller, unknown=unknown)
        if echoed:
            self._text_offsets[index] += len(decode_tokens(echoed, keep_markers=True))
        if self.options.profile.offsets_follow_tokens:
            self._text_offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        else:
            # Text held back for stop strings lags the tokens, so offsets of two chunks may overlap.
            self._text_offsets[index] += len(delta.text)
        return logprobs

    def whole(
        self,
        sequences: Sequence[TokenSequence],
        texts: Sequence[Delta],
        cached_tokens: int,
        kv_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        choices = []
        for delta in texts:
            choice = self._chunk_choice(delta)
            token_ids, prompt_ids = choice.pop("token_ids"), choice.pop("prompt_token_ids")
            told = self.prompt_logprobs(self.ask.prompts[delta.index // self.ask.samples])
            choice |= {"token_ids": token_ids, "prompt_logprobs": told, "prompt_token_ids": prompt_ids}
            if self.options.profile.has_routed_experts:
                choice["routed_experts"] = None
            choices.append(choice)
        return self.chunk_head(self.kind) | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": make_fingerprint(self.options),
            "usage": self._whole_usage(sequences, cached_tokens),
            "kv_transfer_params": self.kept_params if kv_params is None else kv_params,
            **({"metrics": None} if self.options.profile.has_routed_experts else {}),
        }
