"""Whether the model that a server's command names is one of this package's: of any other, SGLang stays as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..quark.quantization import weight_format

_MODEL, _REVISION = ("--model-path", "--model"), ("--revision",)
_HUB_S = 10.0


def is_foreign(words: Sequence[str]) -> bool:
    """Return True if these arguments of a server name a model that is neither Kimi's nor in a format of our kernels.

    False where the model cannot be told, as in a program that calls SGLang's `Engine`: SGLANG_PLUGINS chooses there.
    """
    path = _value(words, _MODEL)
    config = None if path is None else _config(path, _value(words, _REVISION))
    if config is None:
        return False
    if str(config.get("model_type", "")).startswith("kimi"):
        return False
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    stored = [part["quantization_config"] for part in parts if isinstance(part.get("quantization_config"), dict)]
    return not any(map(weight_format, stored))


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of the last of these options, as argparse does."""
    found = None
    for word, following in zip(words, [*words, None][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else following
    return found


def _config(path: str, revision: str | None) -> Mapping[str, Any] | None:
    """Return config.json of a folder or of a repository on the Hub, whose file SGLang reads next; None without one."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        # start-up: folders need no Hub
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

        with suppress(Exception):  # of either HTTP library; SGLang reports what it cannot load
            cached = try_to_load_from_cache(path, "config.json", revision=revision)
            if not isinstance(cached, str):  # asked once, because a download repeats for minutes
                get_hf_file_metadata(hf_hub_url(path, "config.json", revision=revision), timeout=_HUB_S)
                cached = hf_hub_download(path, "config.json", revision=revision)
            file = Path(cached)
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        return content if isinstance(content, dict) else None
    return None
