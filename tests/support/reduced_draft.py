"""The built-in draft with a reduced vocabulary: fewer rows of its output head, and d2t to say which tokens they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_w4a8_laptop import tiny


def write_reduced_draft(folder: Path, **config: Any) -> Path:
    """Write it to `folder`: all tokens but every eighth. config: fields of its config.json to change."""
    tensors = load_file(tiny.draft_path() / "model.safetensors")
    rows = tensors["lm_head.weight"]
    kept = torch.tensor([token for token in range(len(rows)) if token % 8 != 3])
    tensors |= {"lm_head.weight": rows[kept].contiguous(), "d2t": kept - torch.arange(len(kept))}
    written = json.loads((tiny.draft_path() / "config.json").read_text()) | {"draft_vocab_size": len(kept)} | config
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors")
    return folder
