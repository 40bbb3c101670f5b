"""Take out of recorded bodies what no test needs: texts of others, and names of a machine and its user."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LONGEST = 160  # characters of a text that is kept
_WORDS = "plain words stand here in place of a longer text. "
_STRUCTURE = {
    "pattern", "enum", "const", "$ref", "$schema", "$id", "required", "encrypted_content", "arguments", "data",
}  # fmt: skip
_SECRETS = (
    (
        re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        "00000000-0000-0000-0000-000000000000",
    ),
    (re.compile(r"[0-9a-f]{64}"), "0" * 64),
    (re.compile(r"/root\b"), "/home/user"),
)


def cleaned(body: Any, folders: Iterable[tuple[Path, str]]) -> Any:
    """Return the body with filler in place of long texts, and with other names for these folders and this machine."""
    names = [(str(folder), name) for folder, name in folders]
    names.append((socket.gethostname(), "host"))

    def text(value: str, key: str) -> str:
        for old, new in names:
            value = value.replace(old, new)
        for pattern, new in _SECRETS:
            value = pattern.sub(new, value)
        if len(value) <= _LONGEST or key in _STRUCTURE or value.startswith("data:"):
            return value
        return (_WORDS * (len(value) // len(_WORDS) + 1))[: len(value)]

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {text(name, "$ref"): walk(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner, key) for inner in value]
        return text(value, key) if isinstance(value, str) else value

    return walk(body, "")
