"""The packages of this repository: the only table to change when a folder moves, and how their code is read."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from support.repository import ROOT, tracked

CODE = (".py", ".jinja", ".sh", ".html", ".js", ".css", ".hip", ".cu", ".c", ".cpp")
NATIVE = (".c", ".cpp")  # in no sum of lines


@dataclass(frozen=True)
class Package:
    """The row of a package: its imports and its size.

    imports: packages of ours. sglang, flydsl, torch: folders that may import these, torch at the top of a module.
    plan: lines of all code, blank ones included. today: lines of 2026-11-26 and up to 750, while over the plan.
    untyped: annotations that are a plain `Any`.
    """

    imports: frozenset[str]
    plan: int
    today: int = 0
    untyped: int = 0
    sglang: tuple[str, ...] = ()
    flydsl: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """Lines that the package may have: its plan and 5 %."""
        return max(self.plan * 105 // 100, self.today)


SERVING, LAB, LAPTOP = "kimi_w4a8_eagle3", "kimi_w4a8_lab", "kimi_w4a8_laptop"
SHIPPED = (SERVING, LAB, LAPTOP)
ALL = frozenset({*SHIPPED, "launch", "proof", "tests"})
PACKAGES = {
    SERVING: Package(
        frozenset(), plan=21_500, today=23_720, untyped=150,
        sglang=("sglang_plugin/",), flydsl=("moe/flydsl/",), torch=("moe/", "quark/", "sampling/", "sglang_plugin/"),
    ),
    LAB: Package(
        frozenset({SERVING}), plan=10_500, today=14_143, untyped=50,
        sglang=("with_sglang/",),
        torch=("draft/", "kernels/", "predict/simulate.py", "predict/traffic.py", "quantize/", "with_sglang/"),
    ),
    LAPTOP: Package(frozenset({SERVING, LAB}), plan=4_200, untyped=50, sglang=("",), torch=("",)),
    "launch": Package(ALL, plan=1_800, today=1_932, untyped=25, torch=("docker/",)),
    "proof": Package(ALL, plan=50_000, today=59_578, untyped=125, sglang=("",), flydsl=("",), torch=("",)),
    "tests": Package(ALL, plan=0, untyped=300, sglang=("",), flydsl=("",), torch=("",)),  # shares the lines of proof
}  # fmt: skip
BACKENDS = {"flydsl", "moe", "triton"}  # folders with the same parts by the same names
SHARED = {"tests": "proof"}  # a package whose lines count with another one's
ENGINE = ("sglang_plugin/__init__.py", "sglang_plugin/run_module.py")  # what an engine process starts with
ENGINE_LINES = (9_500, 10_826)  # of ours that they import: the plan, and the most for now

SOURCES = {
    name: (ROOT / name).read_text()
    for name in tracked()
    if name.startswith(tuple(f"{package}/" for package in PACKAGES)) and name.endswith(CODE)
}


class Import(NamedTuple):
    target: str  # absolute, dotted; "?" for a name that is computed
    at_import: bool  # while the module itself is imported


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    gc.disable()  # it would look at millions of nodes again and again
    try:
        return tuple(ast.walk(ast.parse(text)))
    finally:
        gc.enable()


def package(path: str) -> Package:
    return PACKAGES[path.split("/")[0]]


def below(path: str) -> str:
    """Path inside of the package."""
    return path.partition("/")[2]


def module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def ancestors(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


@cache
def imports(path: str, text: str) -> frozenset[Import]:
    """Imports of a file: by statement, by `importlib`, by `__import__` and other names given to these, as a text that
    is executed, and what is taken from `sys.modules`."""
    home, constants = path.split("/")[:-1], dict[str, str]()
    loaders = {"import_module", "__import__", "run_module", "resolve_name"}
    for node in nodes(text):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(str(value))):
                constants[name] = value
            case ast.Assign(targets=[ast.Name(name)], value=ast.Attribute(attr=loader) | ast.Name(loader)):
                loaders |= {name} if loader in loaders else set()
            case ast.ImportFrom(names=names):
                loaders |= {alias.asname or alias.name for alias in names if alias.name in loaders}
    late = set[int]()
    for node in nodes(text):  # outer ones first
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if id(node) not in late and (typing or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))):
            late |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in nodes(text):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = home[: len(home) - node.level + 1] if node.level else []
            targets = [".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("sys.modules"):
            targets = [name for name in [spelled(node.slice, constants)] if name != "?"]
        elif isinstance(node, ast.Call):
            targets = [absolute(spelled(name, constants), home) for name in loaded_by(node, loaders)]
        found |= {Import(target, id(node) not in late) for target in targets}
    return frozenset(found)


def loaded_by(call: ast.Call, loaders: set[str]) -> list[ast.expr]:
    """Return the arguments of a call that name what it imports."""
    function, given = ast.unparse(call.func), [*call.args, *(keyword.value for keyword in call.keywords)]
    if function.split(".")[-1] in loaders or function.endswith("sys.modules.get"):
        return given[:1]
    if function in ("exec", "eval") or function.split(".")[-1] in ("module_from_spec", "load_module"):
        return [ast.Name("?")]
    if any(ast.unparse(part).split(".")[-1] in loaders for part in given):  # partial(import_module, ...), map(...)
        return [*(part for part in given if isinstance(part, ast.Constant)), ast.Name("?")]
    named = function == "getattr" and {ast.literal_eval(part) for part in given if isinstance(part, ast.Constant)}
    return [ast.Name("?")] if named and named & loaders else []


def absolute(name: str, home: list[str]) -> str:
    """Return an imported name without leading dots; "?" where nothing but dots is known."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    return ".".join([*home[: len(home) - dots + 1], name[dots:]]) if name[dots:] else "?"


def spelled(argument: ast.expr, constants: dict[str, str]) -> str:
    """Return the text of an argument as far as it is known here, "?" where it starts with a computed value."""
    match argument:
        case ast.Constant(str(value)):
            return value
        case ast.Name(name):
            return constants.get(name, "?")
        case ast.JoinedStr(values=[ast.FormattedValue(value=value), *rest] | [ast.Constant() as value, *rest]):
            return spelled(value, constants) + "".join(part.value for part in rest if isinstance(part, ast.Constant))
    return "?"
