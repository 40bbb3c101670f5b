"""Requests of /v1/responses: OpenAI's API of items, with Codex's groups of tools. Nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from . import parts
from .calls import flat_name
from .chat import check_results, choice_of
from .conversation import Call, Conversation, Message, Text, Tool, ToolChoice
from .errors import Refusal
from .formats import format_of
from .requests import ResponsesRequest, sampling_of
from .sealed import Seal

PATH = "/v1/responses"
_NOT_STORED = "this server stores no responses: send the whole conversation each time"
_NO_REFERENCES = (
    "this server stores no items, so an item_reference has none: send the items themselves. The AI SDK sends them with "
    "providerOptions: {openai: {store: false}}"
)
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
INPUT = "input"  # the parameter of a custom tool, whose input is any text
_CUSTOM = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class Declared:
    """A tool of the request by the name that the model sees. namespace: the group that it stands in."""

    name: str
    namespace: str = ""
    custom: bool = False


def conversation_of(request: ResponsesRequest, seal: Seal) -> tuple[Conversation, dict[str, Declared]]:
    """Return the conversation that a request asks to continue, and its tools by the names that the model sees."""
    if request.previous_response_id is not None:
        raise Refusal(_NOT_STORED, param="previous_response_id")
    tools, declared = _tools(request.tools or [])
    effort = (request.reasoning or {}).get("effort")
    shown = _LOGPROBS in request.include
    if request.top_logprobs and not shown:
        raise Refusal(f'top_logprobs needs "include": ["{_LOGPROBS}"]', param="top_logprobs")
    return Conversation(
        messages=_messages(request, seal),
        sampling=sampling_of(request, request.max_output_tokens, request.stop),
        tools=tools,
        choice=_choice(request.tool_choice, declared),
        parallel=request.parallel_tool_calls and request.max_tool_calls != 1,
        **parts.thinking_of(request, effort),
        format=format_of((request.text or {}).get("format"), "text.format"),
        logprobs=(request.top_logprobs or 0) if shown else None,
        cache_salt=request.cache_salt,
    ), declared


def _tools(given: list[Any]) -> tuple[list[Tool], dict[str, Declared]]:
    tools: list[Tool] = []
    declared: dict[str, Declared] = {}

    def add(tool: Tool, of: Declared) -> None:
        if tool.name not in declared:
            tools.append(tool)
            declared[tool.name] = of

    groups = []
    for number, tool in enumerate(given):
        parts.is_clients(tool, place := f"tools.{number}")
        if not isinstance(kind := tool.get("type") or "function", str):
            raise Refusal(f"{place}.type must be a text", param="tools")
        if kind == "function":
            add(made := parts.function_tool(tool, place), Declared(made.name))
        elif kind == "custom":
            made = parts.function_tool({**tool, "parameters": _CUSTOM, "description": _custom_description(tool)}, place)
            add(made, Declared(made.name, custom=True))
        elif kind == "namespace" and isinstance(tool.get("name"), str):
            groups.append((tool["name"], parts.listed(tool.get("tools"), f"{place}.tools", "tools"), place))
    for namespace, members, place in groups:
        for member in members:
            if isinstance(member, dict) and member.get("name") and (member.get("type") or "function") == "function":
                made = parts.function_tool(member, place)
                shown = flat_name(namespace, made.name)
                add(Tool(shown, made.description, made.parameters, made.strict), Declared(made.name, namespace))
    return tools, declared


def _custom_description(tool: dict[str, Any]) -> str | None:
    described, format_ = tool.get("description"), tool.get("format")
    said = [described] if described and isinstance(described, str) else []
    if isinstance(format_, dict) and format_.get("type") == "grammar":
        syntax = format_.get("syntax") or "lark"
        said.append(f"The input must follow this {syntax} grammar:\n{format_.get('definition')}")
    return "\n\n".join(said) or None


def _choice(given: str | dict[str, Any] | None, declared: dict[str, Declared]) -> ToolChoice:
    """Return the choice. A member of a group is named with its namespace, or by a name that no other tool has."""

    def shown(choice: dict[str, Any], name: str) -> str:
        if choice.get("namespace"):
            return flat_name(str(choice["namespace"]), name)
        members = [flat for flat, of in declared.items() if of.name == name]
        return name if name in declared or len(members) != 1 else members[0]

    return choice_of(given, list(declared), shown)


def _messages(request: ResponsesRequest, seal: Seal) -> list[Message]:
    messages = [Message("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, Message("user", request.input)]
    if not request.input:
        raise Refusal("there is no message to answer", param="input")
    roles = [str(item.get("role") or item.get("type")) if isinstance(item, dict) else "" for item in request.input]
    past = parts.last_user_turn(roles)
    for at, item in enumerate(request.input):
        if (message := _item(item, at < past, seal)) is not None:
            messages.append(message)
    messages = parts.join_turns(messages)
    check_results(messages)
    return messages


def _item(item: Any, past: bool, seal: Seal) -> Message | None:
    """Return an item as a message, or None for one without effect."""
    if not isinstance(item, dict):
        raise Refusal("messages and their parts must be objects", param="input")
    kind = item.get("type") if "type" in item else "message"
    match kind:
        case "message" if str(item.get("role")) in _ROLES:
            role = _ROLES[item["role"]]
            content = parts.contents(item.get("content"), lambda part: _part(part, past or role != "user"))
            return Message(role, parts.flat(content))  # type: ignore[arg-type]  # of _ROLES
        case "function_call":
            name = item.get("name")
            if isinstance(item.get("namespace"), str) and isinstance(name, str):
                name = flat_name(item["namespace"], name)
            arguments = item.get("arguments")
            arguments = orjson.dumps(arguments).decode() if isinstance(arguments, dict) else arguments
            given = {"id": item.get("call_id") or item.get("id"), "name": name}
            return Message("assistant", calls=[parts.call(given, arguments or "{}")])
        case "custom_tool_call":
            made = orjson.dumps({INPUT: item.get("input") or ""}).decode()
            return Message("assistant", calls=[Call(str(item.get("call_id")), str(item.get("name")), made)])
        case "function_call_output" | "custom_tool_call_output":
            content = parts.contents(item.get("output"), lambda part: _part(part, True), "output")
            if not isinstance(content, str) and all(isinstance(part, Text) for part in content):
                content = "".join(part.text for part in content if isinstance(part, Text))
            return Message("tool", content, call_id=str(item.get("call_id") or ""))
        case "reasoning":
            texts = _texts(item.get("summary")) or _texts(item.get("content"))
            thinking = "\n".join(texts) or seal.open(item.get("encrypted_content")) or ""
            return Message("assistant", thinking=thinking) if thinking else None
        case "item_reference":
            raise Refusal(_NO_REFERENCES, param="input")
    if not isinstance(kind, str) or "role" in item or kind == "message":
        raise Refusal(f"content of type {item.get('type')!r:.40} is not supported", param="input")
    return Message("assistant", parts.line_for(item))  # a call that a server, or a tool of OpenAI's, ran


def _texts(given: Any) -> list[str]:
    return [
        part["text"]
        for part in (given if isinstance(given, list) else ())
        if isinstance(part, dict) and isinstance(part.get("text"), str) and part["text"]
    ]


def _part(part: Any, past: bool) -> parts.Part | None:
    match parts.type_of(part):
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return Text(parts.text_of(part))
        case "refusal":
            return Text(parts.text_of(part, "refusal"))
        case "input_image" | "image_url":
            if isinstance(part.get("content"), (dict, list)):
                raise Refusal("a picture holds no other parts", param="input")
            return parts.picture(parts.only_source(part, part.get("image_url")))
        case "item_reference":
            raise Refusal(_NO_REFERENCES, param="input")
    return parts.unreadable(part, past)
