"""A body of the Responses API as that of a chat completion, without anything that would have to be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import LeftOut, kind_name
from proxy.dialects.requests import at_least_one, object_in, objects
from proxy.dialects.responses.items import conversation
from proxy.dialects.responses.tools import SEARCH, ToolKind, function_name, tools_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.dialects.responses.tools import Tool

# What both APIs call the same, and what engines add to this one themselves.
_SAME: Final = (
    *("model", "stream", "temperature", "top_p", "top_k", "parallel_tool_calls", "prompt_cache_key", "user", "seed"),
    *("stop", "chat_template_kwargs", "cache_salt", "vllm_xargs", "kv_transfer_params", "priority", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "thinking_token_budget"),
)
_CALLED: Final = ("function", "custom", "tool_search")
"""The types of tools that a tool_choice can name."""
_STATE: Final = {
    "previous_response_id": "responses are not kept here: send the whole conversation as input, with store false",
    "conversation": "conversations are not kept here: send the whole conversation as input",
    "background": "nothing is answered in the background here: leave it out, and stream",
    "prompt": "prompts are not kept here: send their text as instructions and input",
}


def chat_of(values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """The body of the chat that asks for the same. Raises BadRequest.

    Tools, items and content that only OpenAI's own service can serve are added to `left_out`. A request that needs a
    response or conversation that is kept there is refused: without it the model would answer another question.
    """
    for name, words in _STATE.items():
        if values.get(name):
            raise BadRequest(words, param=name)
    if "message.output_text.logprobs" in _included(values) or values.get("top_logprobs"):
        raise BadRequest("log probabilities are told by /v1/chat/completions only", param="top_logprobs")
    chat: dict[str, Any] = {name: values[name] for name in _SAME if values.get(name) is not None}
    chat["messages"] = conversation(values.get("instructions"), values.get("input"), left_out)
    if values.get("max_output_tokens") is not None:
        chat["max_tokens"] = chat["max_completion_tokens"] = at_least_one(values, "max_output_tokens")
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if _is_begun(values["input"]) and chat["messages"][-1].get("content"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(values, left_out)
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


def _included(values: Mapping[str, Any]) -> list[Any]:
    include = values.get("include")
    if include is not None and not isinstance(include, list):
        raise BadRequest("include must be a list of texts", param="include")
    return include or []


def _tools(values: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    functions = [tool.function() for tool in tools_of(values, left_out)]
    choice = values.get("tool_choice")
    if choice is not None and not isinstance(choice, str | dict):
        raise BadRequest("tool_choice must be a text or an object", param="tool_choice")
    if isinstance(choice, dict):
        functions, choice = _chosen_of(choice, functions)
    if functions:
        return {"tools": functions, "tool_choice": "auto" if choice is None else choice}
    if choice == "required" and values.get("tools"):
        raise _not_served(next(iter(objects(values["tools"], "tools"))).get("type"))
    return {}


def _chosen_of(choice: Mapping[str, Any], functions: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    """The functions that the model may call, and how it may call them."""
    match choice.get("type"):
        case "tool_search" if not any(function["function"]["name"] == SEARCH for function in functions):
            raise _not_served("tool_search")
        case "function" | "custom" | "tool_search":
            return functions, {"type": "function", "function": {"name": _chosen(choice)}}
        case "allowed_tools":
            tools = objects(choice.get("tools") or [], "tool_choice")
            allowed = {_chosen(tool) for tool in tools if tool.get("type") in _CALLED}
            left = [tool for tool in functions if tool["function"]["name"] in allowed]
            mode = choice.get("mode") or "auto"
            if mode == "required" and tools and not left:
                raise _not_served(tools[0].get("type"))
            return left, mode
        case kind:
            raise _not_served(kind)


def _chosen(choice: Mapping[str, Any]) -> str:
    if choice.get("type") == "tool_search":
        return SEARCH
    name = choice.get("name")
    if not isinstance(name, str):
        raise BadRequest("tool_choice must have the name of the tool", param="tool_choice")
    return function_name(name, choice.get("namespace"))


def _not_served(kind: object) -> BadRequest:
    return BadRequest(
        f"tool_choice demands a tool of type {kind_name(kind)}, which no engine here can serve: "
        "use functions or custom tools, which the client runs",
        param="tool_choice",
    )


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


class KeptRequest:
    """The members of a request that its response needs."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.echo: Mapping[str, Any] = {
            **{name: _ECHOED_DEFAULTS.get(name) if values.get(name) is None else values[name] for name in _ECHOED},
            "background": False,
            "previous_response_id": None,
            "store": False,
        }
        """Members that a response repeats."""
        self.tools: Mapping[str, Tool] = {tool.function_name: tool for tool in tools_of(values, LeftOut())}
        """The tools, by the names that the model knows."""
        self.wants_sealed = "reasoning.encrypted_content" in _included(values)
        """The client gives reasoning back only as something that it cannot read."""

    def kind_of(self, function: str) -> ToolKind:
        """How the client is told of calls of a function; as of a function, if it is not known."""
        tool = self.tools.get(function)
        return ToolKind.FUNCTION if tool is None else tool.kind
