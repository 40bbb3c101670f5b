"""The check before any weight is loaded: configs, headers and small tensors of a target and its draft.

It finds what would cost a long load, or would load and answer wrongly. Once weights are loaded, each rank compares all
of them with the files (`sglang_plugin/model/load_check.py`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from ..base.files import read_json
from . import target_checks
from .config import ModelConfig, draft_shape, read_model_config
from .draft_checks import check_draft, installed_sglang, vocabulary_note
from .problems import Problem
from .safetensors_header import Checkpoint, read_checkpoint
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
    report.problems += check_draft(draft, checkpoint, target.text, report.tp, installed_sglang())
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
