"""SGLang's load generator, which also records the prompt length of each turn of a conversation.

The generator counts cached tokens per turn, but a prompt that contains an earlier answer has no known length. The
server reports that length in the usage of each turn, which `note` reads.
"""

from __future__ import annotations

from typing import Any

from sglang.benchmark import serving

_count_cached = serving._extract_cache_from_sglext


def note(data: dict[str, Any], output: Any) -> None:
    """Take the cached tokens from a piece of the stream as SGLang does, and the prompt's length."""
    _count_cached(data, output)
    if usage := data.get("usage"):
        output.prompt_len = usage["prompt_tokens"]


if __name__ == "__main__":
    serving._extract_cache_from_sglext = note
    serving.cli_main()
