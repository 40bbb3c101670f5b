"""The exclude list of a quantized draft in the form that vLLM needs: regular expressions instead of module names."""

from __future__ import annotations

import json
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import read_json, write_atomic

# Modules that an FP8 draft leaves unquantized, and patterns that match them under any prefix that vLLM adds.
VLLM_PATTERNS = {"fc": "re:.*fc.*", "lm_head": "re:.*lm_head.*"}


def fix_exclude(directory: Path) -> bool:
    """Rewrite `fc` and `lm_head` in the exclude list of a draft's config.json; return True when it changed.

    Other entries stay. The file is replaced atomically, so a reader sees the old list or the new one. Raises KimiError
    when there is no Quark configuration or its list lacks one of the two.
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
            f"the exclude list lacks {' and '.join(missing)}: they are quantized, or this is not an EAGLE3 draft",
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
