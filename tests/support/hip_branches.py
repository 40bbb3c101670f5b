"""Coverage of SGLang's HIP-only lines on the path of recipe `agent`. The figures of docs/virtual-node.md.

    PYTHONPATH=tests python -m support.hip_branches [--save]

Lines count in HIP's own files, and on HIP's side of an `if` that names HIP or AITER, in functions that engines of the
recipe entered on the virtual node while they served each kind of request. A line that did not run is out of reach if
the engines found a condition on the way to it against it each time, and the parts of the condition that decide it read
SETTINGS alone. torch.compile is off, because Dynamo reads the lines of a function and does not run them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST, SGLANG_PINNED

from .sglang_program import NEWEST

FILE = "KIMI_TRACED_LINES"
SAVED = Path(__file__).with_suffix(".json")
OWN = next(path for path in map(Path, sys.path) if (path / "sglang/srt").is_dir()) / "sglang/srt"  # of this process
ROOTS = {SGLANG_PINNED: OWN, SGLANG_NEWEST: NEWEST / "sglang/srt"}
PLACES = (
    "distributed/parallel_state.py", "layers/activation.py", "layers/attention/aiter_backend.py",
    "layers/communicator.py", "layers/dp_attention.py", "layers/layernorm.py", "layers/linear.py",
    "layers/moe/fused_moe_triton/layer.py", "layers/moe/token_dispatcher", "layers/moe/topk.py",
    "layers/quantization/quark", "layers/quantization/unquant.py", "layers/radix_attention.py",
    "layers/rocm_linear_utils.py", "layers/rotary_embedding", "layers/sampler.py", "managers/overlap_utils.py",
    "model_executor/runner", "models/deepseek_common", "models/deepseek_v2.py", "models/kimi_k25.py",
    "models/llama_eagle3.py", "speculative",
)  # fmt: skip
HIP_FILES = re.compile(r"aiter_backend|_rocm\b|rocm_")
NAMES = re.compile(r"\b(_?is_hip|_use_aiter\w*|_has_fused_qk\w*|_?is_gfx\w*)\b")
OTHER = re.compile(r"not \(?(_?is_hip|_use_aiter)\b(?!_)")  # the side without HIP
# What an engine of the recipe decides once, by the function and the part of a condition that reads it.
SETTINGS = {
    "gfx942": r"gfx95|gfx12|_bmm_buf",
    "HIP and AITER": r": (_?is_hip(\(\))?|_use_aiter)$|attention_backend (==|in)|prepare_prefill",
    "BF16 around the experts and in the cache": r"fp8|dtype|quant_format|w(eight)?_scale|gluon|mla_ps_k|vectorized",
    "8 heads of a rank, repeated to 16": r"head_pad|num_head|low_head",
    "no context parallelism": r"dcp|cp_active|q_replicate|mha_one_shot",
    "the architecture of target and draft": (
        r"use_(dsa|mla)|q_lora|sliding|SWAKV|llama_4|swiglu|skip_topk|head_dim|x_pad|fused_set_kv"
        r"|^forward_extend: .*is_(target_verify|draft_extend)"
    ),
    "a variable of SGLang": r": envs\.|_SGLANG_|unified_(attention|verify)|uses_page_table|alt_stream|aiter_fused_mla",
    "an option of SGLang": (
        r"lora_active|deterministic|eplb|deep_gemm|custom_(all|reduce_s)|_fusion|piecewise|pcg_runner|attn_out"
    ),
    "drafts in each decode step, one chain": r"draft_tokens is None|topk > 1|spec_info is None",
    "a graph for each batch of decoding requests": r"max_bs \+ 1|^init_forward_metadata: .*mode|_resolve_v2.*seq_lens",
}
_READS = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.Call, ast.keyword, ast.Tuple, ast.Subscript, ast.UnaryOp,
    ast.BinOp, ast.BoolOp, ast.cmpop, ast.unaryop, ast.operator, ast.boolop, ast.expr_context,
)  # fmt: skip
_Way = tuple[tuple[ast.expr, bool], ...]  # the conditions on the way to a line, and their values
_Line = tuple[ast.FunctionDef, range, _Way]  # the rows of a statement without its body
_Trace = Mapping[str, Any]  # "ran": rows by file, "values": of conditions, and of their parts, that had one value


def files(root: Path) -> list[Path]:
    return [
        file for path in map(root.joinpath, PLACES) for file in ([path] if path.suffix else sorted(path.rglob("*.py")))
    ]


def _statements(body: list[ast.stmt], way: _Way) -> Iterator[tuple[range, _Way]]:
    for node in body:
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(node, name, ())]
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, (ast.FunctionDef, ast.Pass, ast.Global, ast.Raise)):
            continue
        yield range(node.lineno, inner[0].lineno if inner else (node.end_lineno or node.lineno) + 1), way
        if not isinstance(node, ast.If):
            yield from _statements(inner, way)
            continue
        yield from _statements(node.body, (*way, (node.test, True)))
        yield from _statements(node.orelse, (*way, (node.test, False)))
        if isinstance(node.body[-1], ast.Return):
            way = (*way, (node.test, False))


@cache
def lines(path: Path) -> list[_Line]:
    """Return HIP's lines in the functions of a file."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    every = [(function, *line) for function in functions for line in _statements(function.body, ())]
    return [line for line in every if HIP_FILES.search(path.name) or any(map(_of_hip, line[2]))]


def _of_hip(condition: tuple[ast.expr, bool]) -> bool:
    text = ast.unparse(condition[0])
    return bool(NAMES.search(text)) and condition[1] is not bool(OTHER.search(text))


def parts_of(test: ast.expr) -> Iterator[ast.expr]:
    inner = test.values if isinstance(test, ast.BoolOp) else [test.operand] if isinstance(test, ast.UnaryOp) else []
    yield from (part for value in inner for part in parts_of(value)) if inner else (test,)


def _conditions(path: Path) -> dict[int, list[tuple[str, CodeType]]]:
    """Return the conditions on the way to HIP's lines, and their parts, that can be read twice, by row."""
    tests = [(function.name, test) for function, _, way in lines(path) for test, _ in way]
    return {
        test.lineno: [
            (f"{function}: {ast.unparse(part)}", compile(ast.Expression(part), str(path), "eval"))
            for part in (test, *parts_of(test))
            if all(isinstance(node, _READS) for node in ast.walk(part))
        ]
        for function, test in tests
    }


def trace() -> None:
    """Append to FILE what is new of rows and of values of conditions, in this process and in its forks."""
    seen: set[tuple[object, ...]] = set()
    known = {str(path): path for path in files(OWN)}
    conditions = cache(lambda name: _conditions(known[name]))
    out = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115  (as long as the process)

    def note(*words: object) -> None:
        if words not in seen:
            seen.add(words)
            out.write(json.dumps(words) + "\n")

    def line(frame: FrameType, event: str, _: object) -> Any:
        name, row = frame.f_code.co_filename, frame.f_lineno
        if event == "line":
            note(name, row)
            for text, code in conditions(name).get(row, ()):
                try:
                    value = eval(code, frame.f_globals, frame.f_locals)
                except Exception:  # the condition's other parts guard it
                    continue
                if isinstance(value, (bool, int, str, type(None))):
                    note(name, row, text, bool(value))
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in known else None)


def served(release: str) -> _Trace:
    """Serve each kind of request on one GPU and on two, and return what ran."""
    from e2e.test_virtual_node import CHUNKED, NUMPY, QUESTIONS, mixed_answers  # they start SGLang

    from .virtual_servers import virtual_server

    with tempfile.TemporaryDirectory() as name:
        file, newest = Path(name) / "lines", release == SGLANG_NEWEST
        given = {"module": "support.hip_branches", FILE: str(file), "TORCH_COMPILE_DISABLE": "1", **NUMPY}
        for ranks, more in (("tp-size=1", {}), ("tp-size=2", CHUNKED)):
            settings = (ranks, "cuda-graph-bs-decode=[8]", "context-length=32768")  # long enough for agent's launches
            with virtual_server(True, Path(name), *settings, newest=newest, **given, **more) as server:
                mixed_answers(server, QUESTIONS[:1], 8)
        return summed([json.loads(line) for line in file.read_text().splitlines()], ROOTS[release])


def summed(notes: list[list[Any]], root: Path) -> _Trace:
    ran: dict[str, set[int]] = {}
    values: dict[str, set[bool]] = {}
    for name, row, *condition in notes:
        path = str(Path(name).relative_to(root))
        if not condition:
            ran.setdefault(path, set()).add(row)
        elif reason(condition[0]):
            values.setdefault(f"{path}:{row}:{condition[0]}", set()).add(condition[1])
    for path, rows in ran.items():
        rows &= {row for function, *_ in lines(root / path) for row in rows_of(function)}
    once = {key: found.pop() for key, found in sorted(values.items()) if len(found) == 1}
    return {"ran": {path: sorted(rows) for path, rows in sorted(ran.items()) if rows}, "values": once}


def rows_of(function: ast.FunctionDef) -> range:
    return range(function.body[0].lineno, (function.end_lineno or 0) + 1)


def known(test: ast.expr, values: Mapping[str, bool], place: str) -> tuple[bool | None, str]:
    """Return the value that settings give a condition, and the part that decides it; None if they do not."""
    text, function = place + ast.unparse(test), place.split(":")[-2]
    if text in values and all(reason(f"{function}: {ast.unparse(part)}") for part in parts_of(test)):
        return values[text], text
    if isinstance(test, ast.UnaryOp):
        value, part = known(test.operand, values, place)
        return None if value is None else not value, part
    found = [known(value, values, place) for value in test.values] if isinstance(test, ast.BoolOp) else []
    ends = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)
    whole = found[0] if found and all(value is not None for value, _ in found) else (None, "")
    return next((one for one in found if one[0] is ends), whole)


def reason(part: str) -> str:
    """Return the setting that a part of a condition reads, or nothing."""
    return next((why for why, pattern in SETTINGS.items() if re.search(pattern, part)), "")


def coverage(found: _Trace, root: Path) -> dict[str, str]:
    """Return each line as file:row, with "ran", the setting that puts it out of reach, or "missed"."""
    out = {}
    for path, rows in found["ran"].items():
        for function, line, way in lines(root / path):
            places = [f"{path}:{test.lineno}:{function.name}: " for test, _ in way]
            decided = [
                (*known(test, found["values"], place), side) for place, (test, side) in zip(places, way, strict=True)
            ]
            against = next((text for value, text, side in decided if value is (not side)), "")
            name, ran = f"{path}:{line[0]}", not {*line}.isdisjoint(rows)
            assert not (ran and against), f"{name} ran, and {against} says that it cannot"
            if not {*rows_of(function)}.isdisjoint(rows):
                out[name] = "ran" if ran else reason(against.split(":", 2)[-1]) or "missed"
    return out


if __name__ == "__main__":
    if FILE in os.environ:
        from kimi_w4a8_eagle3.sglang_plugin.run_module import run

        trace()
        run(sys.argv[1], sys.argv[2:])
    else:
        every = {release: served(release) for release in ROOTS}
        for release, found in every.items():
            table = coverage(found, ROOTS[release])
            print(
                release, Counter(table.values()), *(line for line, why in table.items() if why == "missed"), sep="\n  "
            )
        if "--save" in sys.argv:
            SAVED.write_text(json.dumps(every) + "\n")
