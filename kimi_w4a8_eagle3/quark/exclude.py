"""The exclude list of a quantized draft, as vLLM has to read it: regular expressions instead of module names."""

from __future__ import annotations

import json
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import write_atomic
from .config import read_json

# What an FP8 draft leaves unquantized, and the pattern by which vLLM finds it under whatever prefix it gives the draft.
VLLM_PATTERNS = {"fc": "re:.*fc.*", "lm_head": "re:.*lm_head.*"}


def fix_exclude(directory: Path) -> bool:
    """Rewrite `fc` and `lm_head` in the exclude list of a draft's config.json; True when something was changed.

    Other entries stay. The file is replaced at once, so a reader sees the old list or the new one. Raises KimiError
    when there is no Quark configuration or its list leaves one of the two out.
    """
    path = directory / "config.json"
    config = read_json(path)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "quark":
        raise KimiError("this checkpoint was not quantized by AMD Quark", str(path), 'quantization_config of "quark"')
    old = quantization.get("exclude") or []
    new = [VLLM_PATTERNS.get(name.rpartition(".")[2], name) if not name.startswith("re:") else name for name in old]
    new = list(dict.fromkeys(new))
    missing = [name for name, pattern in VLLM_PATTERNS.items() if pattern not in new]
    if missing:
        raise KimiError(
            f"the exclude list does not name {' and '.join(missing)}: they are quantized, or this is no EAGLE3 draft",
            str(path),
            "fc and lm_head excluded",
            "quantize the draft with `kimi-w4a8 quantize fp8-draft`",
        )
    if new == old:
        return False
    quantization["exclude"] = new
    try:
        write_atomic(path, json.dumps(config, indent=4, ensure_ascii=False) + "\n")
    except OSError as error:
        raise KimiError(f"config.json cannot be replaced: {error.strerror}", str(path), "a writable folder") from error
    return True
