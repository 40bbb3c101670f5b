"""Which of SGLang's HIP-only branches on the path of recipe `agent` ran on the virtual node. The table of the page.

    PYTHONPATH=tests python -m support.hip_branches

A branch is the body of an `if` whose condition names HIP or AITER, in a function that an engine with two ranks entered
while it served each kind of request. Its lines are counted, and those that did not run are listed with the reason.
torch.compile is off here, because Dynamo reads the lines of a function and does not run them.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST, SGLANG_PINNED

from .sglang_program import NEWEST

FILE = "KIMI_TRACED_LINES"
NAMES = re.compile(r"\b(_?is_hip|_use_aiter\w*|_has_fused_qk\w*|_is_gfx\w*|is_gfx\w*)\b")
PARTS = {
    "model": ("models/deepseek_v2.py", "models/deepseek_common", "models/kimi_k25.py", "models/llama_eagle3.py"),
    "attention": ("layers/attention/aiter_backend.py", "layers/radix_attention.py", "layers/rocm_linear_utils.py"),
    "MoE": ("layers/moe/topk.py", "layers/moe/fused_moe_triton/layer.py", "layers/moe/token_dispatcher"),
    "communicator": ("layers/communicator.py", "layers/dp_attention.py", "distributed/parallel_state.py"),
    "quark": ("layers/quantization/quark", "layers/quantization/unquant.py"),
    "layers and steps": (
        "layers/layernorm.py", "layers/activation.py", "layers/rotary_embedding", "layers/sampler.py",
        "layers/linear.py", "speculative", "managers/overlap_utils.py", "model_executor/runner",
    ),
}  # fmt: skip
# Why a branch did not run, by its condition. The first that matches counts.
REASONS = {
    r"gfx95|gfx12|mxfp4|fp4": "not on gfx942",
    r"custom_all_gather": "AITER's all-gather has no stand-in",
    r"SGLANG_OPT_|radix4|grouped_gate|rmsnorm_pad|set_kv_buffer_arg": "a kernel that the recipe does not turn on",
    r"logical_to_physical|w_scale|out_dtype=|gating_output\.to": "another checkpoint's type or place of experts",
    r"shape\[0\] == 0": "an empty batch",
    r"pynccl_comm\.broadcast": "SGLang's RCCL communicator is off outside of a capture",
    r"pcg_runner": "HIP has no prefill graphs",
    r"fp8|quant_method|kv_cache_dtype|per_token|ptpc|\bscale": "FP8: the recipe has BF16 around its experts",
    r"dcp|context_parallel|attn_cp|_cp_": "context parallelism is off",
    r"deterministic": "deterministic inference is off",
    r"allreduce_fusion|fused_ar|ar_rms": "the fused all-reduce is off",
    r"dsa|nsa|v4|index": "another model's attention",
    r"shared_experts|num_fused": "the recipe does not fuse shared experts",
    r"lora|capturer|sliding|sink|enc_dec|mrope|logit_cap": "a feature that the recipe does not have",
}


class Branch(NamedTuple):
    condition: str
    function: str
    lines: frozenset[int]
    around: frozenset[int]  # of the function


def branches(path: Path) -> Iterator[Branch]:
    """Yield the HIP side of each such `if` in a function of a file."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        around = frozenset(one.lineno for one in ast.walk(function) if isinstance(one, ast.stmt)) - {function.lineno}
        for node in ast.walk(function):
            if isinstance(node, ast.If) and NAMES.search(condition := ast.unparse(node.test)):
                other = re.search(r"not \(?(_?is_hip|_use_aiter)\b(?!_)", condition)
                body = node.orelse if other else node.body
                lines = frozenset(one.lineno for part in body for one in ast.walk(part) if isinstance(one, ast.stmt))
                if lines:
                    yield Branch(condition, function.name, lines, around)


def files(root: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for part, names in PARTS.items():
        paths = [root / "sglang/srt" / name for name in names]
        found[part] = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return {part: [path for path in paths if path.exists()] for part, paths in found.items()}


def trace(root: Path) -> None:
    """Append each line of these files to FILE when it runs first, in this process and in its forks."""
    seen: set[tuple[str, int]] = set()
    known = {str(path) for paths in files(root).values() for path in paths}
    out = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115  (as long as the process)

    def line(frame: FrameType, event: str, _: object) -> Any:
        key = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and key not in seen:
            seen.add(key)
            out.write(f"{key[0]}:{key[1]}\n")
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in known else None)


def lines_of(newest: bool, root: Path) -> dict[str, set[int]]:
    """Serve each kind of request with drafts and without, and return the lines that ran by file."""
    from e2e.test_virtual_node import CHUNKED, NUMPY, QUESTIONS, mixed_answers  # they start SGLang

    from .virtual_servers import virtual_server

    ran: dict[str, set[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "lines"
        given = {"module": "support.hip_branches", FILE: str(file), "TORCH_COMPILE_DISABLE": "1", **NUMPY, **CHUNKED}
        for speculate, settings in ((True, ()), (False, ("disable-custom-all-reduce=false",))):
            more = ("tp-size=2", "cuda-graph-bs-decode=[8]", *settings)
            with virtual_server(speculate, Path(name), *more, newest=newest, **given) as server:
                mixed_answers(server, QUESTIONS[:1], 8)
        for text in set(file.read_text().split()):
            path, number = text.rsplit(":", 1)
            ran.setdefault(path, set()).add(int(number))
    return ran


def report(newest: bool) -> None:
    root = NEWEST if newest else Path(next(path for path in sys.path if (Path(path) / "sglang/srt").is_dir()))
    ran = lines_of(newest, root)
    print(f"\nSGLang {SGLANG_NEWEST if newest else SGLANG_PINNED}\n")
    print("| part | lines | ran | did not, for a reason | did not |\n|---|---|---|---|---|")
    missed: dict[tuple[str, str], set[int]] = {}
    for part, paths in files(root).items():
        every, done, excused = set[tuple[str, int]](), set[tuple[str, int]](), set[tuple[str, int]]()
        for path in paths:
            known, source = ran.get(str(path), set()), path.read_text().splitlines()
            for branch in branches(path):
                if not branch.around & known:
                    continue
                left = branch.lines - known
                every |= {(path.name, number) for number in branch.lines}
                done |= {(path.name, number) for number in branch.lines & known}
                if left:
                    text = f"{branch.condition} {' '.join(source[min(left) - 1 : max(left)])}"
                    why = next((why for pattern, why in REASONS.items() if re.search(pattern, text, re.I)), "")
                    excused |= {(path.name, number) for number in left} if why else set()
                    place = f"{path.name} {branch.function}: {branch.condition}"
                    missed.setdefault((why, place), set()).update(left)
        if every:
            excused -= done
            print(f"| {part} | {len(every)} | {len(done)} | {len(excused)} | {len(every - done - excused)} |")
    for (why, place), numbers in sorted(missed.items()):
        print(f"  {why or 'NO REASON'}: {place[:150]} ({len(numbers)})")


if __name__ == "__main__":
    if FILE in os.environ and len(sys.argv) > 1:
        from kimi_w4a8_eagle3.sglang_plugin.run_module import run

        trace(next(Path(path) for path in sys.path if (Path(path) / "sglang/srt").is_dir()))
        run(sys.argv[1], sys.argv[2:])
    else:
        for newest in (False, True):
            report(newest)
