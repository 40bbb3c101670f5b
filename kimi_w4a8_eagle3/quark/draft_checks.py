"""Checks of an EAGLE3 draft against its target: sizes, vocabulary map and the hidden states it is fed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .config import DraftShape, TextShape
from .findings import Findings, Problem
from .safetensors_header import Checkpoint, TensorInfo

# Draft classes that SGLang's EAGLE3 worker feeds with captured hidden states of a DeepSeek-style target.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
_OTHER_DRAFT = "use the draft that was trained for this target"


def captured_layers(draft: DraftShape, target: TextShape) -> list[int]:
    """Layers of the target whose *incoming* hidden state SGLang captures for this draft.

    Without a list in the draft's `eagle_config` these are 2, the middle and the third last; a list that begins with 1
    is shifted by one (SGLang reads it as "the output of layer i").
    """
    ids = draft.eagle_config.eagle_aux_hidden_state_layer_ids
    layers = target.num_hidden_layers
    if ids is None:
        return [2, layers // 2, layers - 3]
    return [i + 1 for i in ids] if ids and ids[0] == 1 else list(ids)


def check_draft(draft: DraftShape, checkpoint: Checkpoint, target: TextShape, tp: int) -> list[Problem]:
    """Everything that would make the draft fail to load, or load and accept nothing."""
    findings = Findings("draft")
    config = checkpoint.directory / "config.json"
    if not set(draft.architectures) & set(ARCHITECTURES):
        found = ", ".join(draft.architectures) or "none"
        findings.add(f"draft architecture is {found}", config, " or ".join(ARCHITECTURES), _OTHER_DRAFT)
        return findings.problems()
    layers = captured_layers(draft, target)
    _check_captured(layers, target, config, findings)
    _check_sizes(draft, target, tp, config, findings)
    _check_tensors(draft, checkpoint, target, len(layers), findings)
    _check_vocabulary_map(draft, checkpoint, target, findings)
    return findings.problems()


def _check_captured(layers: list[int], target: TextShape, config: Path, findings: Findings) -> None:
    last = target.num_hidden_layers - 1
    if layers != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] <= last:
        findings.add(
            f"captured layers {layers} (eagle_aux_hidden_state_layer_ids) do not fit a target of {last + 1} layers",
            config,
            f"ascending, different layers between 0 and {last}: the target emits each once and in layer order",
            _OTHER_DRAFT,
        )


def _check_sizes(draft: DraftShape, target: TextShape, tp: int, config: Path, findings: Findings) -> None:
    hidden = draft.target_hidden_size or draft.hidden_size
    if hidden != target.hidden_size:
        name = "target_hidden_size" if draft.target_hidden_size else "hidden_size"
        findings.add(f"draft {name} is {hidden}", config, f"the target's {target.hidden_size}", _OTHER_DRAFT)
    if draft.vocab_size != target.vocab_size:
        expected = f"the target's {target.vocab_size}"
        findings.add(f"draft vocab_size is {draft.vocab_size}", config, expected, _OTHER_DRAFT)
    if draft.draft_vocab_size and draft.draft_vocab_size > target.vocab_size:
        expected = f"at most the target's {target.vocab_size}"
        findings.add(f"draft_vocab_size is {draft.draft_vocab_size}", config, expected, _OTHER_DRAFT)
    kv_heads = draft.num_key_value_heads or draft.num_attention_heads
    if draft.num_attention_heads % tp or (kv_heads % tp and tp % kv_heads):
        findings.add(
            f"TP {tp} does not divide the draft's {draft.num_attention_heads} attention or {kv_heads} KV heads",
            config,
            "a tensor-parallel size that divides both",
            "choose another --tp",
        )


def _check_tensors(
    draft: DraftShape, checkpoint: Checkpoint, target: TextShape, num_captured: int, findings: Findings
) -> None:
    hidden = draft.hidden_size
    shapes = {
        "fc.weight": (hidden, num_captured * target.hidden_size),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (target.vocab_size, hidden),
    }
    if draft.draft_vocab_size and not draft.tie_word_embeddings:
        shapes["lm_head.weight"] = (draft.draft_vocab_size, hidden)
    for name, shape in shapes.items():
        tensor = _find(checkpoint, name)
        if tensor is not None and tensor.shape != shape:
            findings.add(
                f"draft {name} has shape {list(tensor.shape)}", tensor.file, str(list(shape)), _OTHER_DRAFT, tensor.name
            )
        # The embedding may be absent: SGLang shares the target's.
        if tensor is None and name != "embed_tokens.weight" and checkpoint.tensors and not checkpoint.unread:
            findings.add(f"draft has no {name}", checkpoint.directory, f"shape {list(shape)}", _OTHER_DRAFT)


def _check_vocabulary_map(draft: DraftShape, checkpoint: Checkpoint, target: TextShape, findings: Findings) -> None:
    """`d2t[i] + i` is the target's token for the draft's token i: needed when the draft's vocabulary is smaller."""
    size = draft.draft_vocab_size or draft.vocab_size
    d2t = _find(checkpoint, "d2t")
    if d2t is None:
        if size != target.vocab_size and checkpoint.tensors and not checkpoint.unread:
            expected = f"d2t: [{size}] offsets into the target's {target.vocab_size} tokens"
            findings.add("draft has no vocabulary map d2t", checkpoint.directory, expected, _OTHER_DRAFT)
        return
    if d2t.shape != (size,) or d2t.dtype not in ("I64", "I32"):
        found = f"vocabulary map d2t is {d2t.dtype} {list(d2t.shape)}"
        findings.add(found, d2t.file, f"I64 [{size}]", _OTHER_DRAFT, d2t.name)
        return
    dtype = "<i8" if d2t.dtype == "I64" else "<i4"
    tokens = np.fromfile(d2t.file, dtype=dtype, count=size, offset=d2t.start) + np.arange(size)
    outside = int(((tokens < 0) | (tokens >= target.vocab_size)).sum())
    if outside or len(np.unique(tokens)) != size:
        findings.add(
            f"vocabulary map d2t is not a map into the target's vocabulary ({outside} of {size} tokens outside, "
            f"{size - len(np.unique(tokens))} repeated)",
            d2t.file,
            f"{size} different tokens below {target.vocab_size}",
            _OTHER_DRAFT,
            d2t.name,
        )


def _find(checkpoint: Checkpoint, name: str) -> TensorInfo | None:
    return checkpoint.tensors.get(name) or checkpoint.tensors.get(f"model.{name}")
