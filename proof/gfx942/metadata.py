"""The `.amdgpu_metadata` block: the small subset of YAML that LLVM writes there."""

from __future__ import annotations

import re
from typing import Any


def kernel_metadata(text: str) -> dict[str, dict[str, object]]:
    """Metadata of each kernel by kernel name; keys lose their leading dot. Empty without such a block."""
    block = re.search(r"\.amdgpu_metadata\s*\n---\n(.*?)\n\.\.\.", text, re.S)
    if not block:
        return {}
    lines = [line for line in block[1].splitlines() if line.strip()]
    document, _ = _parse(lines, 0, 0)
    kernels = document.get("amdhsa.kernels", []) if isinstance(document, dict) else []
    return {str(kernel["name"]): kernel for kernel in kernels}


def _parse(lines: list[str], at: int, indent: int) -> tuple[Any, int]:
    if at < len(lines) and lines[at].lstrip().startswith("- "):
        return _parse_list(lines, at, _indent(lines[at]))
    return _parse_map(lines, at, indent)


def _parse_list(lines: list[str], at: int, indent: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while at < len(lines) and _indent(lines[at]) == indent and lines[at].lstrip().startswith("- "):
        content = lines[at].lstrip()[2:].strip()
        if re.match(r"^[.\w]+:(\s|$)", content):
            # A map whose first key stands behind the dash: read it as if the dash were blanks.
            lines[at] = lines[at].replace("-", " ", 1)
            item, at = _parse_map(lines, at, _indent(lines[at]))
        else:
            item, at = _scalar(content), at + 1
        items.append(item)
    return items, at


def _parse_map(lines: list[str], at: int, indent: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    while at < len(lines) and _indent(lines[at]) == indent and not lines[at].lstrip().startswith("- "):
        key, _, value = lines[at].strip().partition(":")
        at += 1
        if value.strip():
            result[key.lstrip(".")] = _scalar(value.strip())
        elif at < len(lines) and (_indent(lines[at]) > indent or lines[at].lstrip().startswith("- ")):
            result[key.lstrip(".")], at = _parse(lines, at, _indent(lines[at]))
        else:
            result[key.lstrip(".")] = None
    return result, at


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _scalar(text: str) -> Any:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False, "[]": []}.get(text, text.strip("'\""))
