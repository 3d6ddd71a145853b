"""A body of the Responses API as that of a chat completion, without anything that would have to be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.dialects.requests import object_in
from proxy.dialects.responses.items import conversation
from proxy.dialects.responses.refusals import refuse
from proxy.dialects.responses.tools import function_name, tools_of
from proxy.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.dialects.responses.tools import Tool

# What both APIs call the same, and what engines add to this one themselves.
_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "parallel_tool_calls", "prompt_cache_key", "user", "seed"),
    *("stop", "chat_template_kwargs", "cache_salt", "vllm_xargs", "kv_transfer_params", "priority", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "thinking_token_budget"),
)
_STATE: Final = {
    "previous_response_id": "responses are not kept here: send the whole conversation as input, with store false",
    "conversation": "conversations are not kept here: send the whole conversation as input",
    "background": "nothing is answered in the background here: leave it out, and stream",
    "prompt": "prompts are not kept here: send their text as instructions and input",
}


def chat_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The chat. Raises BadRequest for what is no request, and for what only OpenAI's own service can do."""
    for name, words in _STATE.items():
        if values.get(name):
            raise BadRequest(words, param=name)
    if "message.output_text.logprobs" in (values.get("include") or ()) or values.get("top_logprobs"):
        raise BadRequest("log probabilities are told by /v1/chat/completions only", param="top_logprobs")
    chat: dict[str, Any] = {name: values[name] for name in _SAME if values.get(name) is not None}
    chat["messages"] = conversation(values.get("instructions"), values.get("input"))
    limit = values.get("max_output_tokens")
    if limit is not None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequest("max_output_tokens must be a positive whole number", param="max_output_tokens")
        chat["max_tokens"] = chat["max_completion_tokens"] = limit
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if _is_begun(values["input"]) and chat["messages"][-1].get("content"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(values)
    chat |= _format(values)
    chat |= _reasoning(values)
    return chat


def _is_begun(given: Any) -> bool:
    """The last item is an answer that is not complete, such as one that was cut off, which the model is to go on with
    (vLLM `should_continue_final_message`).
    """
    last = given[-1] if isinstance(given, list) and given else {}
    is_answer = last.get("type", "message") == "message" and last.get("role") == "assistant"
    return is_answer and last.get("status") in ("in_progress", "incomplete")


def _tools(values: Mapping[str, Any]) -> dict[str, Any]:
    functions = [tool.function() for tool in tools_of(values)]
    if not functions:
        return {}
    choice = values.get("tool_choice")
    if not isinstance(choice, dict):
        return {"tools": functions, "tool_choice": "auto" if choice is None else choice}
    match choice.get("type"):
        case "function" | "custom":
            return {"tools": functions, "tool_choice": {"type": "function", "function": {"name": _chosen(choice)}}}
        case "allowed_tools":
            allowed = {_chosen(tool) for tool in choice.get("tools") or () if isinstance(tool, dict)}
            left = [tool for tool in functions if tool["function"]["name"] in allowed]
            return {"tools": left, "tool_choice": choice.get("mode", "auto")} if left else {}
        case kind:
            raise refuse("tools", kind, "tool_choice")


def _chosen(choice: Mapping[str, Any]) -> str:
    name = choice.get("name")
    if not isinstance(name, str):
        raise BadRequest("tool_choice must have the name of the tool", param="tool_choice")
    return function_name(name, choice.get("namespace"))


# How it is to be answered


def _format(values: Mapping[str, Any]) -> dict[str, Any]:
    form = object_in(values, "text").get("format")
    match form:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema", "schema": dict(schema)}:
            named = {key: form[key] for key in ("description", "strict") if form.get(key) is not None}
            told = {"name": form.get("name") or "output", "schema": schema, **named}
            return {"response_format": {"type": "json_schema", "json_schema": told}}
    raise BadRequest("text.format must be text, json_object, or json_schema with its schema", param="text")


def _reasoning(values: Mapping[str, Any]) -> dict[str, Any]:
    effort = object_in(values, "reasoning").get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


_ECHOED: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "user"),
)
_ECHOED_DEFAULTS: Final[Mapping[str, Any]] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


class Asked:
    """What is kept of a request for its response."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.echo: Mapping[str, Any] = {
            **{name: _ECHOED_DEFAULTS.get(name) if values.get(name) is None else values[name] for name in _ECHOED},
            "background": False,
            "previous_response_id": None,
            "store": False,
        }
        """Members that a response repeats."""
        self.tools: Mapping[str, Tool] = {tool.function_name: tool for tool in tools_of(values)}
        """By the names that the model knows."""
        self.wants_sealed = "reasoning.encrypted_content" in (values.get("include") or ())
        """The client gives reasoning back only as something that it cannot read."""

    def is_custom(self, function: str) -> bool:
        """Whether the tool takes text instead of JSON."""
        tool = self.tools.get(function)
        return tool is not None and tool.is_custom
