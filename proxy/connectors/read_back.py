"""Lets the prefiller of a conversation's next turn read the KV cache of the previous answer from its decoder.

With `bidirectional_kv_xfer` (vLLM's NixlConnector), a decoder keeps the KV cache of each answer, and names it in the
answer's `kv_transfer_params`: in whole answers, and since vLLM 0.33 in the last chunk of streams (`request_finished` in
vLLM 0.32 `nixl/pull_scheduler.py`). A prefiller that gets these parameters pulls the cache, and frees it there, also if
its own cache has all of it. It does not compare any tokens. So the parameters are sent only if the new prompt begins
with exactly the tokens of the cache. Such a prefiller must have the option, too, or the request would wait forever.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from proxy.common.errors import UpstreamError
from proxy.connectors.legs import EngineLeg
from proxy.wire.openai import ORDINARY_FIELDS, Api
from proxy.wire.python_json import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from proxy.balancer.engines import EngineSetup
    from proxy.balancer.pool import Pool, Pools
    from proxy.balancer.shared.scoreboard import KvPin
    from proxy.common.backend import Backend
    from proxy.connectors.releaser import KvReleaser
    from proxy.dialects.call import Call
    from proxy.settings.live import LiveSettings

# vLLM's `decoder_kv_blocks_ttl` unless configured (nixl/base_scheduler.py).
_KEPT_SECONDS: Final = 480.0
# The prefiller must have read the cache before the decoder frees it.
_MARGIN_SECONDS: Final = 30.0
_TOKENIZE_SECONDS: Final = 5.0
_MAX_ANSWERS: Final = 4096
# Members with which `/tokenize` renders the prompt of a chat (`build_chat_params` of vLLM's TokenizeChatRequest and
# ChatCompletionRequest). With any other member the tokens of the prompt are not certain.
_RENDERED_ALIKE: Final = ORDINARY_FIELDS.difference(("reasoning_effort", "response_format")) | {
    *("return_token_ids", "logprobs", "top_logprobs", "seed", "n", "min_tokens", "priority", "cache_salt"),
    *("stop_token_ids", "include_reasoning", "parallel_tool_calls", "logit_bias", "skip_special_tokens"),
}


class _KeptKv(msgspec.Struct):
    """The members of a decoder's KV parameters without which a prefiller cannot read the cache."""

    do_remote_decode: bool
    remote_block_ids: list[Any]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int


@dataclass(slots=True, eq=False)
class KeptAnswer:
    """The KV cache of one answer, which its decoder keeps."""

    decoder: Backend
    params: Mapping[str, Any]
    """The KV parameters of the decoder, verbatim. They ask a prefiller to read the cache."""
    tokens: int
    """The number of tokens in the cache: the prompt and the answer without its last token."""
    digest: bytes
    """A hash of the ids of these tokens."""
    until: float
    """The time after which the parameters must not be used, in seconds on the monotonic clock."""
    pin: KvPin


class KeptAnswers:
    """The KV caches of answers that decoders keep, as far as one worker knows them.

    They are found by the session of the request, and by the beginning of the prompt.
    """

    def __init__(
        self, pools: Pools, releaser: KvReleaser, live: LiveSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = pools
        self._releaser = releaser
        self._live = live
        self._clock = clock
        self.answers: OrderedDict[object, KeptAnswer] = OrderedDict()
        """The caches that the next turn of a conversation may read, by the name of the conversation."""

    def keep(self, call: Call, decoder: Backend, params: Any, ids: array[int] | None) -> None:
        """Record that a decoder keeps the KV cache of an answer.

        Args:
            call: The call that was answered.
            decoder: The decoder that answered.
            params: Its KV parameters, of any type.
            ids: The token ids of the prompt and the answer; None if they are not known for certain.
        """
        try:
            kept = msgspec.convert(params, _KeptKv)
        except msgspec.ValidationError:
            return
        seconds = self._kept_seconds(decoder)
        pin = self._releaser.pin_answer(decoder, kept.remote_num_tokens, seconds)
        tokens = kept.remote_num_tokens
        if not kept.do_remote_decode or ids is None or not 0 < tokens <= len(ids) or not _is_rendered_alike(call):
            return
        name = next(_names(call, is_stored=True), None)
        if name is None:
            return
        until = self._clock() + seconds - _MARGIN_SECONDS
        self.answers[name] = KeptAnswer(decoder, params, tokens, _digest(ids, tokens), until, pin)
        self.answers.move_to_end(name)
        while len(self.answers) > _MAX_ANSWERS:
            self.answers.popitem(last=False)

    def find(self, call: Call, prefiller: Backend) -> Generator[EngineLeg, Any, KeptAnswer | None]:
        """Return the cache with which the prompt of this call begins, if the prefiller can read it. It is used once.

        A step is a leg to the prefiller that returns the token ids of the prompt.
        """
        kept = self._take(call, prefiller)
        if kept is None:
            return None
        ids = _own_ids(call)
        if ids is None:
            leg = EngineLeg(
                prefiller, "/tokenize", _tokenize_body(call), call.headers, _TOKENIZE_SECONDS, wants_whole_body=True
            )
            try:
                response, body = yield leg
            except UpstreamError:
                return None
            ids = _ids_in(body) if response.status == 200 else None
        if ids is None or len(ids) <= kept.tokens or _digest(ids, kept.tokens) != kept.digest:
            return None
        return kept

    def note_read(self, kept: KeptAnswer) -> None:
        """Record that a prefiller has read a cache, so that the decoder has freed it."""
        self._releaser.unpin_answer(kept.pin)

    def _take(self, call: Call, prefiller: Backend) -> KeptAnswer | None:
        setup = self._setup(self._pools.prefill, prefiller)
        if self._live.settings.kv.read_back == "off" or setup is None or not setup.has_bidirectional_kv:
            return None
        if not _is_rendered_alike(call):
            return None
        answers = self.answers
        name = next((name for name in _names(call, is_stored=False) if name in answers), None)
        if name is None:
            return None
        kept = answers.pop(name)
        is_there = self._clock() < kept.until and kept.decoder in self._pools.decode.eligible_backends()
        return kept if is_there else None

    def _kept_seconds(self, decoder: Backend) -> float:
        setup = self._setup(self._pools.decode, decoder)
        return _KEPT_SECONDS if setup is None or setup.answer_kv_seconds is None else setup.answer_kv_seconds

    @staticmethod
    def _setup(pool: Pool, backend: Backend) -> EngineSetup | None:
        facts = pool.health.health_of(backend).engine_facts
        return None if facts is None else facts.identity.engine_setup


def _names(call: Call, *, is_stored: bool) -> Iterator[object]:
    """Yield the names under which an answer is stored, or under which it may be stored: one, or several."""
    session, keys = call.session_id, call.prefix_keys.keys
    # The last piece of a prompt grows with the next turn. The other ones stay the same.
    for key in keys[-2:-1] if is_stored else reversed(keys):
        yield session, key
    if session is not None:  # of a prompt that is shorter than a piece
        yield session, call.served_model, call.values.get("cache_salt")


def _is_rendered_alike(call: Call) -> bool:
    """Return whether `/tokenize` returns the tokens of this call's prompt, and whether they determine its KV cache."""
    values = call.values
    if call.kv_params or not (call.is_ordinary or _RENDERED_ALIKE.issuperset(values)):
        return False
    if call.api is not Api.CHAT:
        return call.api is Api.COMPLETIONS
    if any(values.get(name) is not None for name in ("reasoning_effort", "response_format")):
        return False
    return values.get("tool_choice") in (None, "auto") and not _has_media(values.get("messages"))


def _has_media(messages: Any) -> bool:
    """Return whether messages have anything but text."""
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _own_ids(call: Call) -> array[int] | None:
    """Return the prompt if it is a list of token ids; None for any other prompt."""
    prompt = call.read_members(("prompt",)).get("prompt") if call.api is Api.COMPLETIONS else None
    return _as_ids(prompt) if isinstance(prompt, list) else None


def _tokenize_body(call: Call) -> bytes:
    names = ("model", "messages", "tools", "chat_template_kwargs") if call.api is Api.CHAT else ("model", "prompt")
    return dumps(call.read_members(names))


def _ids_in(answer: bytes) -> array[int] | None:
    """Return the token ids in an engine's answer at `/tokenize`; None if there are none."""
    try:
        return _as_ids(orjson.loads(answer)["tokens"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None


def _as_ids(values: Any) -> array[int] | None:
    try:
        return array("I", values)
    except (TypeError, OverflowError):
        return None


def _digest(ids: array[int], tokens: int) -> bytes:
    """Return a hash of the first token ids."""
    return blake2b(memoryview(ids)[:tokens], digest_size=16).digest()
