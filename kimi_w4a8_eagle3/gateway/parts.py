"""Parts of messages that all APIs share: text, pictures, and what only the client's own vendor can read.

A client sends each turn again with every request, so one refused part would end the conversation. What the model cannot
read becomes one line of text that names it. Only in the user's last turn it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .conversation import Call, Content, Message, Picture, Text, Tool
from .errors import Refusal

_LABELS = ("title", "filename", "name", "file_id")
_MEDIA_KEYS = ("url", "image_url", "data", "file_id")
TEMPLATE_SWITCHES = frozenset({"thinking", "enable_thinking", "preserve_thinking", "reasoning_effort"})
Part = Text | Picture
Object = Mapping[str, Any]


def type_of(part: Any) -> str:
    """Return the type of a part or item; raise Refusal for what has none."""
    if not isinstance(part, dict):
        raise Refusal("messages and their parts must be objects")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise Refusal(f"content of type {kind!r:.40} is not supported")
    return kind


def line_for(part: Object) -> str:
    """Return the line that names a part which the model cannot read."""
    kind = str(part.get("type"))
    named = part[kind] if isinstance(part.get(kind), dict) else part  # {"type": "file", "file": {"filename": ...}}
    label = next((f" {named[name]:.200}" for name in _LABELS if isinstance(named.get(name), str)), "")
    return f"[{kind:.60}{label}: this server cannot read it]"


def unreadable(part: Object, past: bool) -> Text:
    """Return the text in place of a part; raise Refusal in the user's last turn."""
    if not past:
        raise Refusal(f"content of type {part.get('type')!r:.40} is not supported")
    return Text(f"{line_for(part)}\n")


def text_of(part: Object, name: str = "text") -> str:
    """Return the text of a part."""
    value = part.get(name)
    if not isinstance(value, str):
        raise Refusal(f"{part.get('type', 'a part')}: {name} must be a text")
    return value


def picture(source: Any) -> Picture:
    """Return a picture that is sent with the request: the server fetches none."""
    if not (isinstance(source, str) and source.startswith("data:") and "," in source):
        raise Refusal("the server fetches no media, neither from the network nor from files; send a data: URL")
    return Picture(source)


def only_source(part: Object, source: Any) -> Any:
    """Return the source; raise Refusal where the part names another place beside it."""
    if isinstance(source, dict):
        addresses = [source[key] for key in _MEDIA_KEYS if isinstance(source.get(key), str)]
        if len(addresses) != 1:
            raise Refusal("the server fetches no media: a picture has one source, a data: URL")
        return addresses[0]
    return source


def without_pictures(messages: list[Message]) -> None:
    """Put a line of text in place of pictures, for a model that reads none; refuse those of the user's last turn."""
    past = last_user_turn([message.role for message in messages])
    for at, message in enumerate(messages):
        if message.pictures and at >= past:
            raise Refusal("this model reads no pictures: send text", param="messages")
        if message.pictures:
            line = Text(line_for({"type": "image"}) + "\n")
            parts: list[Any] = list(message.content)
            message.content = [line if isinstance(part, Picture) else part for part in parts]


def contents(value: Any, read: Callable[[Any], Part | None], name: str = "content") -> Content:
    """Return a content that is a text or a list of parts; `read` returns None for a part without effect."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Refusal(f"{name} must be a text or a list of parts", param="messages")
    return [part for part in map(read, value) if part is not None]


def listed(value: Any, name: str, param: str) -> list[Any]:
    """Return a list that may be missing; raise Refusal for anything else."""
    if value and not isinstance(value, list):
        raise Refusal(f"{name} must be a list", param=param)
    return value or []


def flat(content: Content) -> Content:
    """Return a content of one text as that text."""
    if not isinstance(content, str) and len(content) == 1 and isinstance(content[0], Text):
        return content[0].text
    return content


def last_user_turn(roles: list[str]) -> int:
    """Return where the last turn of the user begins; what stands before is past."""
    at = len(roles)
    while at and roles[at - 1] == "user":
        at -= 1
    return at


def failed(content: Content) -> Content:
    """Begin the text of a failed tool with `Error: `: Kimi's format has no field for it."""
    parts: list[Part] = [Text(content)] if isinstance(content, str) else list(content)
    first = parts[0].text if parts and isinstance(parts[0], Text) else ""
    if "error" in first[:40].lower():
        return content
    return flat([Text(f"Error: {first}"), *parts[1 if first else 0 :]])


def join_turns(messages: list[Message]) -> list[Message]:
    """Return the messages with answers that follow one another as one turn, which they were."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and message.role == last.role == "assistant":
            last.content = _both(last.content, message.content)
            last.thinking = "\n".join(filter(None, (last.thinking, message.thinking)))
            last.calls += message.calls
        else:
            joined.append(message)
    return joined


def _both(first: Content, second: Content) -> Content:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    lists = ([Text(one)] if isinstance(one, str) else one for one in (first, second))
    return [part for parts in lists for part in parts]


def is_clients(tool: Any, place: str, *kinds: str) -> bool:
    """Return False for a tool that the server would have to run, such as a web search; raise Refusal for no object."""
    if not isinstance(tool, dict):
        raise Refusal(f"{place}: Input should be an object", param="tools")
    kind = tool.get("type")
    return kind in (None, *kinds) or not isinstance(kind, str)


def function_tool(function: Any, name: str) -> Tool:
    """Return a declared function; raise Refusal for what is none."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refusal(f"{name} must be an object with a name", param="tools")
    parameters, description = function.get("parameters"), function.get("description")
    if parameters is not None and not isinstance(parameters, dict):
        raise Refusal(f"{name}.parameters must be a JSON schema", param="tools")
    if description is not None and not isinstance(description, str):
        raise Refusal(f"{name}.description must be a text", param="tools")
    return Tool(function["name"], description, parameters, function.get("strict") is True)


def call(given: Any, arguments: Any) -> Call:
    """Return a past call from its id, name and arguments as JSON text or an object."""
    name = given.get("name")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise Refusal("a tool call must have a name, and arguments as a text", param="messages")
    return Call(str(given.get("id") or ""), name, arguments)


def thinking_of(request: Any, effort: Any) -> dict[str, Any]:
    """Return the fields of a conversation that say whether the answer thinks, with which effort and switches.

    Moonshot and Anthropic switch by `thinking`, Alibaba by `enable_thinking`. SGLang's chat_template_kwargs win.
    """
    template, thinking = dict(getattr(request, "chat_template_kwargs", None) or {}), request.thinking
    for name, value in template.items():
        if name not in TEMPLATE_SWITCHES or isinstance(value, dict | list):
            allowed = ", ".join(sorted(TEMPLATE_SWITCHES))
            raise Refusal(f"chat_template_kwargs may hold {allowed}, not {name!r:.60}", param="chat_template_kwargs")
    if isinstance(thinking, dict):
        kind = thinking.get("type")
        thinking = kind != "disabled" if isinstance(kind, str) else None
    asked = (template.pop("thinking", None), template.pop("enable_thinking", None), thinking, request.enable_thinking)
    thinks = next((value for value in asked if isinstance(value, bool)), True)
    effort = template.pop("reasoning_effort", None) or effort
    shown = effort if isinstance(effort, str) else None
    return {"thinking": thinks and effort != "none", "effort": shown, "template": template}
