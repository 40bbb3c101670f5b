"""Requests of real clients and tools of real MCP servers, recorded on 2026-11-23 (docs/perf/answers.md)."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("agents")


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of `requests` ({session, path, body}) or `mcp_tools` ({server, tools})."""
    with lzma.open(FOLDER / f"{name}.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]
