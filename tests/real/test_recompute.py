"""Complete answers although decoders end requests as `recomputed`, like vLLM-Ascend without free KV cache.

The first tests ask a decoder directly, to show such an end on the wire; the others ask the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.real.answers import (
    CHAT,
    COMPLETIONS,
    Answer,
    ask,
    difference,
    events,
    late_piece,
    nearly_equal,
    request,
    tokens_of,
)
from tests.real.cluster import Cluster, total
from tests.real.report import Show

TOKENS = 80
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "What does a proxy send to the prefill engine? " * 3}]},
    COMPLETIONS: {"prompt": "A proxy sends the prompt to a prefill engine and then to a decode engine. " * 2},
}


@pytest.fixture(autouse=True)
def no_order_is_left(resuming: Cluster) -> Iterator[None]:
    """Check that every order was carried out; otherwise nothing was interrupted, and the test has shown nothing."""
    yield
    left = resuming.engines.orders.left()
    resuming.engines.orders.withdraw()
    assert left == []


@pytest.mark.parametrize("resuming", ["auto"], indirect=True)
def test_stream_of_a_decoder_ends_with_its_recompute_notice(resuming: Cluster, show: Show) -> None:
    """The notice is a last chunk without tokens. vLLM 0.32 omits it before the first token."""
    seen = []
    for path, tokens in product((CHAT, COMPLETIONS), (0, 1, 5)):
        resuming.engines.orders.give(tokens)
        body = {**PROMPTS[path], "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "stream": True}
        with request(resuming.decoders[0].port, path, body) as response:
            choices = [choice for chunk in events(response) for choice in chunk["choices"]]
        assert sum(len(choice.get("token_ids") or ()) for choice in choices) == tokens
        ends = [(c["finish_reason"], c["stop_reason"], c["token_ids"]) for c in choices if c["finish_reason"]]
        assert ends == ([("stop", "recomputed", [])] if tokens else [])
        seen.append(f"{tokens} tokens {'a notice' if ends else 'nothing but [DONE]'}")
    show(", ".join(seen))


@pytest.mark.parametrize("resuming", ["auto"], indirect=True)
def test_recompute_notice_contains_the_held_back_text(resuming: Cluster, show: Show) -> None:
    """Without the gateway: an engine holds back text that may begin a stop string until the request ends."""
    resuming.engines.orders.give(9)
    body = {**PROMPTS[COMPLETIONS], "max_tokens": TOKENS, "temperature": 0, "stream": True, "stop": ["never" * 10]}
    with request(resuming.decoders[0].port, COMPLETIONS, body) as response:
        choices = [choice for chunk in events(response) for choice in chunk["choices"]]
    assert [choice["text"] for choice in choices if choice["text"]] == [choices[-1]["text"]]
    assert choices[-1]["stop_reason"] == "recomputed"
    show(repr(choices[-1]["text"]))


@pytest.mark.parametrize("resuming", ["auto"], indirect=True)
def test_whole_answer_of_a_decoder_has_its_recompute_notice(resuming: Cluster) -> None:
    for path, tokens in product((CHAT, COMPLETIONS), (0, 1, 5)):
        resuming.engines.orders.give(tokens)
        choice = ask(resuming.decoders[0].port, path, **PROMPTS[path], max_tokens=TOKENS).choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "recomputed")
        assert len(choice.token_ids) == tokens


@pytest.mark.parametrize("resuming", ["auto"], indirect=True)
def test_engine_repeats_a_prompt_that_ends_inside_a_character(resuming: Cluster, show: Show) -> None:
    """The detokenizer of vLLM 0.32 repeats the prompt's text then, so no answer is resumed inside a character."""
    port = resuming.single.port
    character = tokens_of(port, "\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert len(character) == 2
    text = "The quick brown fox"
    prompt = [*tokens_of(port, text), character[0]]
    answer = ask(port, COMPLETIONS, prompt=prompt, max_tokens=8)
    assert answer.choices[0].text.startswith(text)
    show(repr(answer.choices[0].text))


def test_stream_may_be_recomputed_after_any_token(resuming: Cluster, show: Show) -> None:
    differences = {}
    for path in sorted({path for path, _ in request_kinds(resuming)}):
        alone = ask(resuming.single.port, path, **PROMPTS[path], max_tokens=TOKENS)
        for tokens in range(TOKENS):
            resuming.engines.orders.give(tokens)
            answer = ask(resuming.gateway.port, path, **PROMPTS[path], max_tokens=TOKENS, stream=True)
            if answer != alone:
                differences[path, tokens] = difference(answer, alone)
    assert differences == {}
    show(resumes(resuming))


@pytest.mark.parametrize("tokens", [0, 1, 17, 33, 64, 65, 70, TOKENS - 1])
def test_whole_answer_may_be_recomputed(resuming: Cluster, tokens: int) -> None:
    for path in sorted({path for path, _ in request_kinds(resuming)}):
        ask_interrupted(resuming, path, {"max_tokens": TOKENS}, tokens)


@pytest.mark.parametrize("tokens", [(0, 0), (5, 0), (17, 9), (40, 1, 20)], ids=str)
def test_answer_that_is_recomputed_several_times_is_complete(
    resuming: Cluster, tokens: tuple[int, ...], show: Show
) -> None:
    for path, stream in request_kinds(resuming):
        ask_interrupted(resuming, path, {"max_tokens": TOKENS, "stream": stream}, *tokens)
    show(resumes(resuming))


@pytest.mark.parametrize("before", range(6))
def test_stop_string_is_found_across_the_break(resuming: Cluster, before: int, show: Show) -> None:
    """The decoder ends the request `before` tokens before the one that completes the string.

    Tokens after the string may count: the decoder that goes on holds their text back until the string is complete.
    """
    stops = set()
    for (path, stream), included in product(request_kinds(resuming), (False, True)):
        stop = late_piece(ask(resuming.single.port, path, **PROMPTS[path], max_tokens=TOKENS).choices[0].text, 0.5)
        body: dict[str, Any] = {
            "max_tokens": TOKENS,
            "stop": ["never", stop],
            "include_stop_str_in_output": included,
        }
        stopped = ask(resuming.single.port, path, **PROMPTS[path], **body).choices[0]
        assert stopped.stop_reason == stop
        resuming.engines.orders.give(len(stopped.token_ids) - 1 - before)
        answer = ask(resuming.gateway.port, path, **PROMPTS[path], **body, stream=stream)
        assert not resuming.engines.orders.left()
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (stopped.text, "stop", stop)
        length = len(stopped.token_ids)
        assert choice.token_ids[:length] == stopped.token_ids
        assert 0 <= len(choice.token_ids) - length < max(map(len, body["stop"]))
        assert answer.completion_tokens == len(choice.token_ids)
        stops.add(stop)
    show(", ".join(map(repr, sorted(stops))))


@pytest.mark.parametrize("tokens", [1, 20, 50])
def test_resumed_answer_has_all_its_log_probabilities(resuming: Cluster, tokens: int) -> None:
    for path, stream in request_kinds(resuming):
        wanted = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
        body = {"max_tokens": TOKENS, "stream": stream, **wanted}
        answer, alone = ask_interrupted(resuming, path, body, tokens)
        assert len(answer.choices[0].logprobs) == TOKENS
        for number, (one, other) in enumerate(zip(answer.choices[0].logprobs, alone.choices[0].logprobs, strict=True)):
            assert nearly_equal(one, other), f"{path}, stream {stream}, token {number}: {one} is not {other}"


@pytest.mark.parametrize("tokens", [0, 17])
def test_samples_are_resumed_separately(resuming: Cluster, tokens: int) -> None:
    """Compared with one sample, because vLLM itself refuses greedy requests with n > 1."""
    for path, stream in request_kinds(resuming):
        alone = ask(resuming.single.port, path, **PROMPTS[path], max_tokens=TOKENS)
        resuming.engines.orders.give(tokens, tokens)
        answer = ask(resuming.gateway.port, path, **PROMPTS[path], max_tokens=TOKENS, n=2, stream=stream)
        assert answer.choices == dict.fromkeys(range(2), alone.choices[0])
        assert answer.completion_tokens == 2 * alone.completion_tokens


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("stream", [True, False])
def test_other_options_of_resumed_requests_work(resuming: Cluster, tokens: int, stream: bool) -> None:
    """Options that mean something else for the rest of an answer, or whose results come with its beginning."""
    long: dict[str, Any] = {"max_tokens": TOKENS, "stream": stream}
    text = ask(resuming.single.port, COMPLETIONS, **PROMPTS[COMPLETIONS], **long).choices[0]
    completions: list[dict[str, Any]] = [
        # An engine that is asked for token ids echoes nothing, so such a stream is not watched and can only restart.
        *([] if stream and tokens else [long | {"echo": True}]),
        long | {"return_token_ids": False},
        long | {"min_tokens": 40, "stop_token_ids": text.token_ids[20:]},
        long | {"stop_token_ids": [text.token_ids[60]], "ignore_eos": True},
        long | {"prompt": list(range(20, 120))},
        long | {"prompt": ["Hi", "A proxy sends"]},
        {"stream": stream},  # the engine's default of 16 tokens
    ]
    for body in completions if resuming.chats == "auto" else []:
        ask_interrupted(resuming, COMPLETIONS, body, min(tokens, 15))
    for body in (
        long | {"return_token_ids": False},
        long | {"messages": [{"role": "user", "content": [{"type": "text", "text": "The future of AI is"}]}]},
        {"max_completion_tokens": TOKENS, "max_tokens": 7, "stream": stream},
        long
        | {"messages": [{"role": "assistant", "content": "I am"}], "continue_final_message": True}
        | {"add_generation_prompt": False},
    ):
        ask_interrupted(resuming, CHAT, body, tokens)


def test_resume_is_counted(resuming: Cluster, show: Show) -> None:
    before = total([resuming.gateway], "pdproxy_resumed_tokens_total")
    answer, _ = ask_interrupted(resuming, CHAT, {"max_tokens": TOKENS, "stream": True}, 50)
    again = total([resuming.gateway], "pdproxy_resumed_tokens_total") - before
    assert answer.prompt_tokens < again <= answer.prompt_tokens + 50
    show(f"{answer.prompt_tokens} tokens of the prompt and 50 of the answer, {again:.0f} computed again")


def test_engines_keep_no_state_after_interruptions(resuming: Cluster, show: Show) -> None:
    resuming.wait_until_nothing_is_left()
    show(resumes(resuming))


def request_kinds(cluster: Cluster) -> list[tuple[str, bool]]:
    """Return the paths that this gateway treats differently, each with and without streaming."""
    paths = (CHAT, COMPLETIONS) if cluster.chats == "auto" else (CHAT,)
    return list(product(paths, (True, False)))


def ask_interrupted(cluster: Cluster, path: str, body: dict[str, Any], *after_tokens: int) -> tuple[Answer, Answer]:
    """Ask the gateway while decoders end the request, and the single engine; return both answers.

    `after_tokens`: output tokens of each decoder before its end.
    """
    body = {**PROMPTS[path], **body}
    alone = ask(cluster.single.port, path, **body)
    cluster.engines.orders.give(*after_tokens)
    answer = ask(cluster.gateway.port, path, **body)
    assert answer == alone, f"{difference(answer, alone)}: {path} {body} after {after_tokens}"
    assert not cluster.engines.orders.left(), f"{path} {body} was not interrupted after {after_tokens}"
    return answer, alone


def resumes(cluster: Cluster) -> str:
    """Return the number of answers that this gateway has resumed so far, for `show`."""
    return f"{total([cluster.gateway], 'pdproxy_resumes_total'):.0f} resumes so far"
