"""Prove that the tests bite. `make mutants`: small faults in the code that decides, each against its module's tests.

mutmut 3 is not used: it leaves constants of modules and removed statements (a `raise`) alone and knows no sample. A
mutant is one change of the syntax tree. It is imported in a fork of one process that holds pytest and torch, so it
costs its tests alone, which end at the first failure. The Python programs that a test starts import it, too.
"""

from __future__ import annotations

import ast
import importlib
import marshal
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import setitem
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

PACKAGES = ("kimi_w4a8_eagle3", "kimi_w4a8_lab")
TESTS = {
    "moe/contract": ("moe/test_dispatch.py", "moe/test_agreement.py"),
    "moe/reference": ("moe/test_reference.py", "moe/test_agreement.py"),
    "moe/routing": ("moe/triton/test_triton_layout.py",),
    "moe/dispatch": ("moe/test_dispatch.py",),
    "quark/packing": ("quark/test_packing.py",),
    "quark/quantization": ("quark/test_quark_config.py", "quark/test_preflight_target.py"),
    "quark/config": ("quark/test_quark_config.py", "quark/test_preflight_target.py", "quark/test_preflight_draft.py"),
    "quark/preflight": ("quark/test_preflight_target.py", "quark/test_preflight_draft.py"),
    "machine/page_guard": ("machine/test_page_guard.py",),
    "machine/pool": ("machine/test_page_guard.py",),
    "accuracy/judge": ("accuracy/test_eval_judge.py",),
    "accuracy/significance": ("accuracy/test_eval_stats.py",),
    "accuracy/greedy_match": ("accuracy/test_eval_lossless.py",),
    "speed/statistics": ("speed/test_statistics.py",),
    "engine/metrics": ("engine/test_metrics.py",),
    "base/counters": ("engine/test_metrics.py",),
    "ops/window": ("ops/test_window.py",),
    "engine/startup_check": ("engine/test_startup_check.py", "ops/test_canary.py"),
    "engine/watchdog": ("engine/test_watchdog.py",),
    "fleet/identity": ("fleet/test_identity.py",),
    "ops/replica_state": ("ops/test_canary.py", "fleet/test_replica.py"),
    "chat/reader": ("chat/test_reader_bounds.py", "sglang_plugin/test_reader.py"),
    "door/access": ("sglang_plugin/test_door_keys.py", "sglang_plugin/test_door.py"),
    "door/admission": ("door/test_admission.py", "door/test_security_page.py"),
    "door/answers": ("door/test_answers.py", "sglang_plugin/test_door.py", "sglang_plugin/test_door_keys.py"),
    "door/bodies": ("door/test_body_reader.py", "door/test_shares.py", "door/test_security_page.py"),
    "door/computed": ("sglang_plugin/test_door.py",),
    "door/connections": ("door/test_security_page.py", "sglang_plugin/test_door.py"),
    "door/dialects": ("door/test_dialects.py",),
    "door/enforceable": ("door/test_enforceable.py", "sglang_plugin/test_door_bodies.py"),
    "door/fields": ("door/test_fields.py", "sglang_plugin/test_door_bodies.py"),
    "door/large": ("door/test_large.py", "door/test_security_page.py"),
    "door/middleware": ("sglang_plugin/test_door.py", "sglang_plugin/test_door_keys.py", "door/test_large.py"),
    "door/pictures": ("door/test_pictures.py", "door/test_security_page.py"),
    "door/presence": ("sglang_plugin/test_door_keys.py",),
    "door/rules": ("sglang_plugin/test_door_bodies.py",),
    "door/schemas": ("door/test_enforceable.py", "door/test_real_tools.py", "sglang_plugin/test_door_bodies.py"),
    "door/settings": ("door/test_door_settings.py", "sglang_plugin/test_door_keys.py", "moe/test_gates.py"),
    "door/shares": ("door/test_shares.py", "door/test_security_page.py"),
    "door/shape": ("door/test_large.py", "sglang_plugin/test_door_bodies.py"),
    "door/trial": ("door/test_grammar_walk.py", "door/test_trial.py", "door/test_security_page.py"),
}
_HELD = "torch triton hypothesis scipy.stats httpx psutil yaml prometheus_client.parser pydantic.main safetensors.torch"
_HELD += " huggingface_hub.utils huggingface_hub.hf_api"
_PASSED = 77  # not 0, because a mutant may end its process with that
_SLOW = "quark_packer and not as_in_sglang"  # they import Quark and SGLang
_PAIRS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or, Add Sub, Mult Div, LShift RShift, BitAnd BitOr, min max"
_SWAPS = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), reversed(pair.split()))}
_SWAPS |= {"FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult", "BitXor": "BitAnd", "MatMult": "Mult"}


def file_of(module: str) -> Path:
    """Return the file of a module, which one of the packages has."""
    (file,) = (path for package in PACKAGES if (path := Path(package, f"{module}.py")).exists())
    return file


class Mutant(NamedTuple):
    """A change that `make` does to the tree in which it was found."""

    line: int
    what: str
    make: Callable[[], object]


def mutants(node: Any) -> Iterator[Mutant]:
    """Every mutant of a tree, in its order; texts, logging, annotations and decorators are left alone."""

    def change(what: str, field: str, value: object) -> Mutant:
        return Mutant(node.lineno, what, partial(setattr, node, field, value))

    def other(operator: ast.AST) -> Any:
        return getattr(ast, _SWAPS[type(operator).__name__])()

    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        yield change(f"{type(node.op).__name__} swapped", "op", other(node.op))
    elif isinstance(node, ast.Compare):
        for place, held in enumerate(node.ops):
            ops = [*node.ops[:place], other(held), *node.ops[place + 1 :]]
            yield change(f"{type(held).__name__} swapped", "ops", ops)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield change(f"{node.value} becomes {value}", "value", value)
    elif isinstance(node, ast.Name) and node.id in _SWAPS:
        yield change(f"{node.id} becomes {_SWAPS[node.id]}", "id", _SWAPS[node.id])
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not _same_swapped(node):
        yield change("arguments swapped", "args", [node.args[1], node.args[0], *node.args[2:]])
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield change("condition inverted", "test", ast.UnaryOp(ast.Not(), node.test))
    for name, value in [] if isinstance(node, ast.Raise | ast.JoinedStr) else ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for place, child in enumerate(children):
            if name in ("annotation", "returns", "decorator_list") or not isinstance(child, ast.AST) or _silent(child):
                continue
            if isinstance(child, ast.Raise | ast.AugAssign | ast.Expr):
                yield Mutant(child.lineno, "removed", partial(setitem, children, place, ast.Pass()))
            yield from mutants(child)


def _same_swapped(call: ast.Call) -> bool:
    """min(a, b) is min(b, a)."""
    return ast.unparse(call.func) in _SWAPS or ast.unparse(call.args[0]) == ast.unparse(call.args[1])


def _silent(node: ast.AST) -> bool:
    """A docstring, a log line, or what only type checkers read."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node).startswith("logger.")
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


# Python runs this when it starts, where it is on the path.
_SITE = """
import marshal
from importlib.machinery import SourceFileLoader
with open({code!r}, "rb") as file:
    code = marshal.load(file)
original = SourceFileLoader.get_code
SourceFileLoader.get_code = lambda self, name: code if name == {name!r} else original(self, name)
"""


def passes(module: str, tree: ast.Module, limit_s: float, scratch: str) -> bool:
    """True if the module's tests pass in time, in a fork of this process that imports the module from `tree`."""
    pid = os.fork()
    if not pid:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        signal.alarm(int(limit_s))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # theirs cost three times what collecting ours does
        path = str(file_of(module))
        folder = tempfile.mkdtemp(dir=scratch)
        Path(folder, "code").write_bytes(marshal.dumps(compile(ast.fix_missing_locations(tree), path, "exec")))
        program = _SITE.format(code=f"{folder}/code", name=path[:-3].replace("/", "."))
        Path(folder, "sitecustomize.py").write_text(program)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        exec(program, {})  # noqa: S102
        tests = [f"tests/{name}" for name in TESTS[module]]
        options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", f"not {_SLOW}")
        os._exit(_PASSED if pytest.main([*options, *tests]) == 0 else 0)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == _PASSED
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def killed(module: str, sample: int, scratch: str) -> float:
    """The share of a module's mutants that its tests kill; prints the others, and a row of the table."""
    source, started = file_of(module).read_text(), time.monotonic()
    if not passes(module, ast.parse(source), 600, scratch):
        raise SystemExit(f"{module}: without a mutant its tests fail: {' '.join(TESTS[module])}")
    limit_s = 10 + 2 * (time.monotonic() - started)
    places = range(len(list(mutants(ast.parse(source)))))
    chosen = sorted(random.Random(module).sample(places, min(sample or len(places), len(places))))
    alive = 0
    for place in chosen:
        mutant = list(mutants(tree := ast.parse(source)))[place]
        mutant.make()
        if passes(module, tree, limit_s, scratch):
            alive += 1
            print(f"survives: {module}.py:{mutant.line}: {mutant.what}:", source.splitlines()[mutant.line - 1].strip())
    print(f"| `{module}` | {len(chosen) - alive} of {len(chosen)} | {len(places)} |", flush=True)
    return 1 - alive / len(chosen)


def main(modules: list[str] = typer.Argument(None), sample: int = typer.Option(40, help="A module; 0: all.")) -> None:
    """Print what survives, and a table by module; the exit code is 1 when less than 90% of a module's are killed."""
    for name in _HELD.split():
        importlib.import_module(name)
    print("| module | killed | there are |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        shares = [killed(module, sample, scratch) for module in modules or TESTS]
    raise SystemExit(min(shares) < 0.9)


if __name__ == "__main__":
    typer.run(main)
