"""Let an MLA draft share the target's weights without a CUDA device.

SGLang's class for MLA drafts synchronizes with CUDA after it has taken the weights. Its class for Llama drafts takes
them in the same way and synchronizes with the platform's own device.
"""

from __future__ import annotations

from typing import Any

import torch

_CLASS = "sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM"
EMBED, EMBED_AND_HEAD = f"{_CLASS}.set_embed", f"{_CLASS}.set_embed_and_head"


def set_embed(draft: Any, embed: torch.Tensor) -> None:
    """REPLACE hook: share the target's embedding."""
    from sglang.srt.models.llama import LlamaForCausalLM  # SGLang's import order: hooks load before what they change

    LlamaForCausalLM.set_embed(draft, embed)


def set_embed_and_head(draft: Any, embed: torch.Tensor, head: torch.Tensor) -> None:
    """REPLACE hook: share the target's embedding and lm_head."""
    from sglang.srt.models.llama import LlamaForCausalLM  # SGLang's import order: hooks load before what they change

    LlamaForCausalLM.set_embed_and_head(draft, embed, head)
