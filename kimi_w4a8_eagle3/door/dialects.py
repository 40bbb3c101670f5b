"""Fields and turns of other vendors' clients, translated to SGLang's own.

A client sends each turn again with every request, so one refused part would end the conversation. What the model cannot
read becomes one line of text that names it. Only in the user's last turn it is refused (`shape.media_sources`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..gateway.calls import flat_name
from .access import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES, TOKENIZE
from .answers import Refusal
from .shape import MAX_LIST, READ

_FIELDS = {**dict.fromkeys((CHAT, MESSAGES, COUNT_TOKENS, *TOKENIZE), "messages"), RESPONSES: "input"}
_LABELS = ("title", "filename", "name", "file_id")
_WITH_SWITCHES = (CHAT, RESPONSES, *TOKENIZE)
# Types of tools that are a client's own, the first where a tool names none. The server would have to run any other
# (web_search, code_interpreter, ...), or the client runs it by a schema that only the vendor's models know.
_CLIENTS = {
    CHAT: ("function", "custom"),
    RESPONSES: ("function", "custom", "namespace"),
    **dict.fromkeys((MESSAGES, COUNT_TOKENS), ("custom",)),
}
Drop = Callable[[str, str], None]


def translate(body: dict[str, Any], path: str, drop: Drop) -> None:
    """Rewrite the body; call `drop` with what is left out.

    Thinking is switched by `thinking` (Moonshot, Anthropic) and by `enable_thinking` (Alibaba) in the body or in
    chat_template_kwargs. SGLang reads chat_template_kwargs.thinking, which wins where it is sent.
    """
    switch = body.pop("enable_thinking", None)
    if path in _WITH_SWITCHES:
        given = body.pop("thinking", None)
        if isinstance(given, dict):
            given = given.get("type") and given["type"] != "disabled"
        kwargs = body.get("chat_template_kwargs") or {}
        if isinstance(kwargs, dict):
            switches = (kwargs.get("thinking"), kwargs.get("enable_thinking"), given, switch)
            asked = next((value for value in switches if isinstance(value, bool)), None)
            if asked is not None:
                body["chat_template_kwargs"] = {**kwargs, "thinking": asked, "enable_thinking": asked}
    elif path == MESSAGES and isinstance(switch, bool) and not switch:
        body.setdefault("thinking", {"type": "disabled"})
    _rewrite_turns(body, path, drop)
    if path in _CLIENTS:
        body.update(_clients(body, _CLIENTS[path], path, drop))
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":  # SGLang ignores it
            raise Refusal("tool_choice cannot name allowed_tools: send only these tools", param="tool_choice")


def _clients(group: dict[str, Any], kinds: tuple[str, ...], path: str, drop: Drop) -> dict[str, Any]:
    """Return the field `tools` of a body or of a namespace with a client's own tools only."""
    tools = group.get("tools")
    if not isinstance(tools, list) or len(tools) > MAX_LIST:
        return {}
    kept = []
    for tool in tools:
        kind = (tool.get("type") or kinds[0]) if isinstance(tool, dict) else kinds[0]
        if kind in kinds or not isinstance(kind, str):
            kept.append({**tool, **_clients(tool, ("function",), path, drop)} if kind == "namespace" else tool)
        else:
            drop(f"tools_{kind}", path)
    return {"tools": kept}


def _rewrite_turns(body: dict[str, Any], path: str, drop: Drop) -> None:
    turns = body.get(_FIELDS.get(path, ""))
    if not isinstance(turns, list) or len(turns) > MAX_LIST:
        return
    past = len(turns)
    while past and isinstance(turns[past - 1], dict) and turns[past - 1].get("role") == "user":
        past -= 1
    for number, turn in enumerate(turns):
        if isinstance(turn, dict):
            turns[number] = _turn(turn, path, number < past, drop)


def _turn(turn: dict[str, Any], path: str, past: bool, drop: Drop) -> dict[str, Any]:
    if path == RESPONSES:
        turn.pop("phase", None)  # SGLang's own; it splits an answer where the items differ in it
        if isinstance(turn.get("namespace"), str) and isinstance(turn.get("name"), str):
            turn["name"] = flat_name(turn.pop("namespace"), turn["name"])  # as sglang_plugin/http/responses_contract.py
    if "role" not in turn and (line := _line(turn, path, drop)):  # a call that a server, or a tool of OpenAI's, ran
        return {"role": "assistant", "content": line}
    if turn.get("role") == "developer":
        turn["role"] = "system"  # Kimi's template knows no other
    for field in ("content", "output"):
        if isinstance(turn.get(field), list):
            turn[field] = [_part(part, path, past or turn.get("role") != "user", drop) for part in turn[field]]
    return turn


def _part(part: Any, path: str, past: bool, drop: Drop) -> Any:
    if not isinstance(part, dict):
        return part
    source = part.get("source")
    if part.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": f"{source.get('data')}\n"}
    if past and (line := _line(part, path, drop)) is not None:
        if part["type"] == "redacted_thinking":
            return {"type": "thinking", "thinking": line, "signature": ""}
        return {"type": "input_text" if path == RESPONSES else "text", "text": f"{line}\n"}
    if _type(part) == "tool_result":
        content = part.get("content")
        if isinstance(content, list):  # a result inside of a result, which no API has, is left to the checks
            content = [inner if _type(inner) == "tool_result" else _part(inner, path, True, drop) for inner in content]
        part["content"] = _failed(content) if part.get("is_error") is True else content
    return part


def _type(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _line(part: dict[str, Any], path: str, drop: Drop) -> str | None:
    """Return the line that names a part or item, or None for one that is read."""
    kind = _type(part)
    if kind is None or kind in READ:
        return None
    drop(f"past_{kind}", path)
    named = part[kind] if isinstance(part.get(kind), dict) else part  # {"type": "file", "file": {"filename": ...}}
    label = next((f" {named[name]:.200}" for name in _LABELS if isinstance(named.get(name), str)), "")
    return f"[{kind:.60}{label}: this server cannot read it]"


def _failed(content: Any) -> Any:
    """Begin the text of a failed tool with `Error: `: Kimi's format has no field for it."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, list) or "error" in str(parts)[:70].lower():
        return content
    said = parts[0]["text"] if parts and _type(parts[0]) == "text" and "text" in parts[0] else ""
    return [{"type": "text", "text": f"Error: {said}"}, *parts[bool(said) :]]
