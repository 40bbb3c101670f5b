"""Fields of other vendors' clients, translated to SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..chat.calls import flat_name
from .access import CHAT, MESSAGES, RESPONSES, TOKENIZE
from .shape import MAX_LIST

_WITH_SWITCHES = (CHAT, RESPONSES, *TOKENIZE)
# Types of tools that are a client's own; the server would have to run any other (web_search, code_interpreter, ...).
_CLIENTS = {CHAT: ("function", "custom"), RESPONSES: ("function", "custom", "namespace")}


def translate(body: dict[str, Any], path: str, drop: Callable[[str, str], None]) -> None:
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
    for item in body["input"] if path == RESPONSES and isinstance(body.get("input"), list) else ():
        if isinstance(item, dict):
            item.pop("phase", None)  # SGLang's own; it splits an answer where the items differ in it
            if isinstance(item.get("namespace"), str) and isinstance(item.get("name"), str):
                item["name"] = flat_name(item.pop("namespace"), item["name"])  # as sglang_plugin/responses_contract.py
    if path in _CLIENTS:
        body.update(_clients(body, _CLIENTS[path], path, drop))


def _clients(
    group: dict[str, Any], kinds: tuple[str, ...], path: str, drop: Callable[[str, str], None]
) -> dict[str, Any]:
    """Return the field `tools` of a body or of a namespace with a client's own tools only."""
    tools = group.get("tools")
    if not isinstance(tools, list) or len(tools) > MAX_LIST:
        return {}
    kept = []
    for tool in tools:
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind in kinds or not isinstance(kind, str):
            kept.append({**tool, **_clients(tool, ("function",), path, drop)} if kind == "namespace" else tool)
        else:
            drop(f"tools_{kind}", path)
    return {"tools": kept}
