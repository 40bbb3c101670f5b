"""The tools whose schemas SGLang compiles into a grammar; the schemas of others are only text for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FREE = (None, "auto", "none")  # choices that force no call; /v1/messages has them as {"type": ...}


def functions(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the declarations in all lists of tools, in the form of any endpoint."""
    flat = _flat(tools)
    inner = [member for tool in flat if isinstance(tool.get("tools"), list) for member in tool["tools"]]
    declared = [tool.get("function", tool) for tool in flat]
    return [function for function in (*declared, *inner) if isinstance(function, Mapping)]


def compiled(tools: Sequence[Any], choice: Any) -> list[Mapping[str, Any]]:
    """Return the declarations whose schemas SGLang compiles with the parser kimi_k2: those of strict tools.

    That parser can make no grammar that forces a call of unusual tools. SGLang then compiles the schemas of all.
    """
    declared = functions(tools)
    forced = (choice.get("type") if isinstance(choice, Mapping) else choice) not in _FREE
    usual = (
        len({str(function.get("name")) for function in declared}) == len(declared)
        and all(isinstance(function.get("parameters") or {}, Mapping) for function in declared)
        and all(tool.get("type") in (None, "function", "custom") for tool in _flat(tools))
    )
    return [function for function in declared if function.get("strict") or (forced and not usual)]


def _flat(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [tool for tool_list in tools for tool in tool_list or () if isinstance(tool, Mapping)]
