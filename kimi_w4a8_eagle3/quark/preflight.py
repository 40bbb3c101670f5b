"""The check before any weight is loaded: configs, headers and small tensors of a target and its draft.

It finds what would cost a long load, or would load and answer wrongly. Once weights are loaded, each rank compares all
of them with the files (`sglang_plugin/model/load_check.py`). A draft that does not fit its target fails only after the
target was loaded, or it loads and none of its tokens is accepted.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import KimiError
from ..base.files import read_json
from . import target_checks
from .config import MHA_DRAFT, MLA_DRAFT, DraftShape, ModelConfig, TextShape, draft_shape, read_model_config
from .safetensors_header import Checkpoint, TensorInfo, read_checkpoint
from .target_checks import Findings, Problem
from .weight_format import INT4, MXFP4

_SHOWN = 5


@dataclass
class PreflightReport:
    """Result of `preflight`: the files it read and the problems it found."""

    model: str
    draft: str | None
    tp: int
    weight_format: str = "unknown"
    shards: int = 0
    tensors: int = 0
    nbytes: int = 0
    small_tensors_read: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise one KimiError that states the only problem, or the first few and the number of the others."""
        if len(self.problems) == 1:
            raise self.problems[0].error()
        if self.problems:
            shown = [f"[{p.name}] {p.message}; expected {p.expected}" for p in self.problems[:_SHOWN]]
            rest = len(self.problems) - len(shown)
            lines = "".join(f"\n  - {line}" for line in shown) + (f"\n  - and {rest} more" if rest else "")
            where = self.model if self.draft is None else f"{self.model}, draft {self.draft}"
            raise KimiError(
                f"the checkpoint has {len(self.problems)} problems:{lines}",
                where,
                "a complete W4A8 checkpoint" + (" and a draft trained for it" if self.draft else ""),
                "`kimi-w4a8 check` lists every problem with file and remedy",
            )

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {"ok": self.ok, **asdict(self)}


def preflight(model_dir: Path | str, draft_dir: Path | str | None = None, tp: int = 1) -> PreflightReport:
    """Check a target, and a draft against it, from configs, safetensors headers and small tensors.

    A bad checkpoint raises nothing: see `problems` and `raise_for_problems` of the report. A target in another format
    than W4A8 is only checked for complete files, finite values, tensor-parallel size and draft.
    """
    started = time.monotonic()
    model_dir = Path(model_dir)
    report = PreflightReport(str(model_dir), str(draft_dir) if draft_dir is not None else None, tp)
    if tp < 1:
        report.problems.append(Problem(f"TP is {tp}", name="tensor-parallel", expected="1 or more"))
        return report
    config = _check_target(model_dir, report)
    if draft_dir is not None and config is not None:
        _check_draft(Path(draft_dir), config, report)
    report.seconds = time.monotonic() - started
    return report


def _check_target(model_dir: Path, report: PreflightReport) -> ModelConfig | None:
    checkpoint = _read_files(model_dir, "files", report)
    if checkpoint is None:
        return None
    report.shards, report.tensors = len(checkpoint.files), len(checkpoint.tensors)
    report.nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    try:
        config = read_model_config(model_dir)
    except KimiError as error:
        report.problems.append(Problem.of("config", error))
        return None
    where = model_dir / "config.json"
    quantization, weights = config.quantization, config.quantization.weight_format if config.quantization else None
    findings = [target_checks.check_tensor_parallel(config.text, report.tp, where, weights or INT4)]
    if quantization is None:
        report.weight_format = "not quantized"
    elif weights is None:
        report.weight_format = f"{quantization.quant_method or 'unnamed quantization'}, not W4A8"
        findings.append(target_checks.refused_format(quantization, where))
    else:
        report.weight_format = {INT4: "Quark W4A8", MXFP4: "Quark MXFP4"}[weights]
        report.notes += target_checks.glob_notes(quantization)
        findings.append(target_checks.check_config(quantization, config.text, weights, where))
        if checkpoint.tensors:  # unreadable headers are reported already
            findings.append(target_checks.check_experts(checkpoint, config.text, weights))
            try:
                findings.append(target_checks.check_excludes(checkpoint, quantization, weights, where))
            except KimiError as error:
                report.problems.append(Problem.of("excludes", replace(error, where=str(where))))
    if config.tower_layers is not None and checkpoint.tensors:
        findings.append(target_checks.check_tower(checkpoint, config.tower_layers))
    report.problems += [problem for found in findings for problem in found.problems()]
    return config


def _check_draft(draft_dir: Path, target: ModelConfig, report: PreflightReport) -> None:
    checkpoint = _read_files(draft_dir, "draft", report)
    if checkpoint is None:
        return
    config = draft_dir / "config.json"
    try:
        draft = draft_shape(read_json(config), config)
    except KimiError as error:
        report.problems.append(Problem.of("draft", error))
        return
    report.problems += check_draft(draft, checkpoint, target.text, report.tp)
    report.notes += vocabulary_note(draft, target.text)


def _read_files(directory: Path, check: str, report: PreflightReport) -> Checkpoint | None:
    """Read headers and small tensors; None without the directory."""
    if not directory.is_dir():
        kind, expected = ("draft", "a local EAGLE3 draft") if check == "draft" else ("model", "a local checkpoint")
        error = KimiError(f"no such {kind} directory", str(directory), expected, "run `kimi-w4a8 fetch`")
        report.problems.append(Problem.of(check, error))
        return None
    checkpoint = read_checkpoint(directory)
    problems, read = target_checks.check_small_tensors(checkpoint)
    report.small_tensors_read += read
    report.problems += [Problem.of(check, error) for error in checkpoint.problems] + problems
    return checkpoint


_MLA_LAYER = (
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_a_proj", "self_attn.q_a_layernorm",
    "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def captured_layers(draft: DraftShape, target: TextShape) -> list[int]:
    """Return the layers of the target whose *incoming* hidden state SGLang captures for this draft.

    Without a list in the draft's `eagle_config` these are 2, the middle and the third last. A list that begins with 1
    is shifted by one, because SGLang reads it as "the output of layer i".
    """
    ids = draft.eagle_config.eagle_aux_hidden_state_layer_ids
    layers = target.num_hidden_layers
    if ids is None:
        return [2, layers // 2, layers - 3]
    return [i + 1 for i in ids] if ids and ids[0] == 1 else list(ids)


def check_draft(draft: DraftShape, checkpoint: Checkpoint, target: TextShape, tp: int) -> list[Problem]:
    """Report everything that would make the draft fail to load, or load and never get a token accepted."""
    findings = Findings("draft", checkpoint.directory / "config.json", "use the draft that was trained for this target")
    if not {MHA_DRAFT, MLA_DRAFT} & set(draft.architectures):
        found = ", ".join(draft.architectures) or "none"
        findings.add(f"draft architecture is {found}", f"{MHA_DRAFT} or {MLA_DRAFT}")
        return findings.problems()
    captured, last = captured_layers(draft, target), target.num_hidden_layers - 1
    if captured != sorted(set(captured)) or not captured or not 0 <= captured[0] <= captured[-1] <= last:
        found = (
            f"captured layers {captured} (eagle_aux_hidden_state_layer_ids) do not fit a target of {last + 1} layers"
        )
        findings.add(found, f"ascending, different layers between 0 and {last}: the target emits each once, in order")
    _check_config(draft, target, tp, findings)
    if checkpoint.tensors and not checkpoint.unread:
        _check_tensors(draft, checkpoint, target, len(captured), findings)
        _check_vocabulary_map(draft, checkpoint, target, findings)
    return findings.problems()


def _check_config(draft: DraftShape, target: TextShape, tp: int, findings: Findings) -> None:
    size, width = draft.draft_vocab_size, draft.target_hidden_size or draft.hidden_size
    if width != target.hidden_size:
        name = "target_hidden_size" if draft.target_hidden_size else "hidden_size"
        findings.add(f"draft {name} is {width}", f"the target's {target.hidden_size}")
    if draft.vocab_size != target.vocab_size:
        findings.add(f"draft vocab_size is {draft.vocab_size}", f"the target's {target.vocab_size}")
    kv_heads = tp if draft.mla else draft.num_key_value_heads or draft.num_attention_heads  # latents are not split
    if draft.num_attention_heads % tp or (kv_heads % tp and tp % kv_heads):
        what = f"TP {tp} does not divide the draft's {draft.num_attention_heads} attention or {kv_heads} KV heads"
        findings.add(what, "a tensor-parallel size that divides both", remedy="choose another --tp")
    if not draft.mla and not draft.names_vocabulary:
        expected = "the rows of its lm_head, or null for the target's lm_head: SGLang reads the field"
        findings.add("draft has no draft_vocab_size", expected, remedy="add it to the draft's config.json")
    if size is not None and size > target.vocab_size:
        findings.add(f"draft_vocab_size is {size}", f"at most the target's {target.vocab_size}")
    elif size is not None and size < target.vocab_size and draft.tie_word_embeddings:
        found = f"draft proposes {size} tokens with tie_word_embeddings: its head would be the target's embedding"
        findings.add(found, f"an lm_head of its own with {size} rows: none would be accepted")


def vocabulary_note(draft: DraftShape, target: TextShape) -> list[str]:
    """Return one sentence about a draft that cannot propose every token of the target, or nothing."""
    size = draft.draft_vocab_size or target.vocab_size
    note = (
        f"the draft proposes {size:,} of the target's {target.vocab_size:,} tokens: text of other tokens gains no "
        "speed, and with --speculative-use-rejection-sampling SGLang ends after loading"
    )
    return [note] if size < target.vocab_size else []


def _check_tensors(
    draft: DraftShape, checkpoint: Checkpoint, target: TextShape, captured: int, findings: Findings
) -> None:
    hidden = draft.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, captured * target.hidden_size),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (target.vocab_size, hidden),
    }
    if draft.fc_norm:
        shapes |= {f"fc_norm.{number}.weight": (target.hidden_size,) for number in range(captured)}
    if draft.draft_vocab_size and not draft.tie_word_embeddings:
        shapes["lm_head.weight"] = (draft.draft_vocab_size, hidden)
    layer = [f"midlayer.{name}.weight" for name in _MLA_LAYER] if draft.mla else []
    for name in (*shapes, *layer):
        tensor = _find(checkpoint, name)
        # The embedding may be absent: SGLang shares the target's.
        if tensor is None and name != "embed_tokens.weight":
            findings.add(f"draft has no {name}", "all weights of its class")
        elif tensor is not None and tensor.shape != shapes.get(name, tensor.shape):
            findings.add(f"draft {name} has shape {list(tensor.shape)}", str(list(shapes[name])), tensor)
    head = _find(checkpoint, "lm_head.weight")
    if head is not None and not draft.draft_vocab_size and draft.names_vocabulary and not draft.mla:
        found = "draft has an lm_head, which SGLang replaces by the target's: its draft_vocab_size is null"
        findings.add(found, f'"draft_vocab_size": {head.shape[0]}', head, "correct its config.json")
    for tensor in checkpoint.tensors.values() if draft.mla else ():
        name = tensor.name.replace("layers.0.", "midlayer.")
        if name not in (*shapes, *layer, "d2t", "t2d", "model.d2t", "model.t2d"):
            asked = " (its config does not enable fc_norm)" if name.startswith("fc_norm.") else ""
            found = f"draft has weights that {MLA_DRAFT} does not load{asked}"
            findings.add(found, "names of the layer, fc, norm and lm_head alone", tensor)
        elif "kv_b_proj" in name and tensor.dtype not in ("BF16", "F16", "F32"):
            found = f"draft's kv_b_proj is {tensor.dtype}"
            findings.add(found, "BF16: SGLang splits it as it is", tensor, "use the BF16 draft")


def _check_vocabulary_map(draft: DraftShape, checkpoint: Checkpoint, target: TextShape, findings: Findings) -> None:
    """Check the map d2t of a smaller vocabulary: `d2t[i] + i` is the target's token for the draft's token i."""
    size = draft.draft_vocab_size or draft.vocab_size
    d2t = _find(checkpoint, "d2t")
    if d2t is None:
        if size != target.vocab_size:
            found = "draft has no vocabulary map d2t"
            findings.add(found, f"d2t: [{size}] offsets into the target's {target.vocab_size} tokens")
        return
    if d2t.shape != (size,) or d2t.dtype not in ("I64", "I32"):
        findings.add(f"vocabulary map d2t is {d2t.dtype} {list(d2t.shape)}", f"I64 [{size}]", d2t)
        return
    dtype = "<i8" if d2t.dtype == "I64" else "<i4"
    tokens = np.fromfile(d2t.file, dtype=dtype, count=size, offset=d2t.start) + np.arange(size)
    outside = int(((tokens < 0) | (tokens >= target.vocab_size)).sum())
    repeated = size - len(np.unique(tokens))
    if outside or repeated:
        counts = f"({outside} of {size} tokens outside, {repeated} repeated)"
        found = f"vocabulary map d2t is not a map into the target's vocabulary {counts}"
        findings.add(found, f"{size} different tokens below {target.vocab_size}", d2t)


def _find(checkpoint: Checkpoint, name: str) -> TensorInfo | None:
    """Return the tensor with this name or with another one that SGLang's loaders accept for it."""
    names = (name, f"model.{name}", name.replace("midlayer.", "layers.0."))
    return next((tensor for known in names if (tensor := checkpoint.tensors.get(known)) is not None), None)
