"""Edits of Python files through LibCST: everything that is not edited keeps its bytes, comments and layout."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from .state import State


@dataclass(frozen=True)
class ParameterDefault:
    """Changes the default of one parameter from `old` to `new` in every function that has both."""

    parameter: str
    old: int
    new: int

    def inspect(self, source: bytes) -> tuple[State, str]:
        """ORIGINAL when every default is `old`, APPLIED when every one is `new`; anything mixed is not touched."""
        tree = _parsed(source)
        if tree is None:
            return State.UNKNOWN, "not valid Python"
        defaults = [ast.unparse(value) for value in _defaults(tree, self.parameter)]
        if not defaults:
            return State.UNKNOWN, f"no function has a parameter {self.parameter} with a default"
        found = f"{len(defaults)} defaults of {self.parameter}: {', '.join(sorted(set(defaults)))}"
        if set(defaults) == {str(self.old)}:
            return State.ORIGINAL, found
        if set(defaults) == {str(self.new)}:
            return State.APPLIED, found
        return State.UNKNOWN, found

    def apply(self, source: bytes) -> bytes:
        """Set every default of the parameter to `new`."""
        edit = self

        class SetDefault(cst.CSTTransformer):
            def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:
                value = updated_node.default
                if updated_node.name.value != edit.parameter or not isinstance(value, cst.Integer):
                    return updated_node
                return updated_node.with_changes(default=value.with_changes(value=str(edit.new)))

        return cst.parse_module(source).visit(SetDefault()).bytes


@dataclass(frozen=True)
class CallFirst:
    """Makes the named functions of a file call `module.function()` before anything else they do.

    `targets` are qualified names inside the file (`Engine.__init__`, `run_scheduler_process`); each must be defined
    exactly once. `superseded_by`: a module whose import shows that the file calls such a thing by itself.
    """

    module: str
    function: str
    targets: tuple[str, ...]
    superseded_by: str = ""

    def inspect(self, source: bytes) -> tuple[State, str]:
        """ORIGINAL when all targets exist and none makes the call, APPLIED when all do."""
        tree = _parsed(source)
        if tree is None:
            return State.UNKNOWN, "not valid Python"
        if self.superseded_by and _imports(tree, self.superseded_by):
            return State.UPSTREAM, f"the file uses {self.superseded_by} itself"
        definitions = _definitions(tree)
        for target in self.targets:
            if definitions.count(target) != 1:
                return State.UNKNOWN, f"{definitions.count(target)} definitions of {target}, expected one"
        calling = [name for name, body in _bodies(tree) if name in self.targets and self._calls_first(body)]
        if len(calling) == len(self.targets):
            return State.APPLIED, f"{', '.join(calling)} call {self.function} first"
        if calling:
            return State.UNKNOWN, f"only {', '.join(calling)} of {', '.join(self.targets)} call {self.function}"
        return State.ORIGINAL, f"found {', '.join(self.targets)}"

    def apply(self, source: bytes) -> bytes:
        """Insert the import and the call after each target's docstring."""
        edit = self

        class Insert(cst.CSTTransformer):
            def __init__(self) -> None:
                self.scope: list[str] = []

            def visit_ClassDef(self, node: cst.ClassDef) -> None:
                self.scope.append(node.name.value)

            def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
                self.scope.pop()
                return updated_node

            def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
                self.scope.append(node.name.value)

            def leave_FunctionDef(
                self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
            ) -> cst.FunctionDef:
                name = ".".join(self.scope)
                self.scope.pop()
                body = updated_node.body
                if name not in edit.targets or not isinstance(body, cst.IndentedBlock):
                    return updated_node
                at = 1 if original_node.get_docstring() is not None else 0
                lines = [*body.body[:at], *map(cst.parse_statement, edit._statements()), *body.body[at:]]
                return updated_node.with_changes(body=body.with_changes(body=lines))

        return cst.parse_module(source).visit(Insert()).bytes

    def _statements(self) -> list[str]:
        return [f"from {self.module} import {self.function} as _kimi_{self.function}", f"_kimi_{self.function}()"]

    def _calls_first(self, body: Sequence[ast.stmt]) -> bool:
        expected = [ast.dump(ast.parse(line).body[0]) for line in self._statements()]
        start = 1 if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else 0
        return [ast.dump(statement) for statement in body[start : start + 2]] == expected


def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _defaults(tree: ast.Module, parameter: str) -> list[ast.expr]:
    """The defaults of every parameter with this name, in functions and lambdas alike."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.arguments):
            continue
        positional = [*node.posonlyargs, *node.args]
        pairs = list(zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True))
        pairs += [(arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        found += [value for arg, value in pairs if arg.arg == parameter]
    return found


def _bodies(tree: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    """(qualified name, body) of every function, nested ones included."""
    found: list[tuple[str, list[ast.stmt]]] = []

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
                if not isinstance(child, ast.ClassDef):
                    found.append((".".join(inner), child.body))
            visit(child, inner)

    visit(tree, ())
    return found


def _definitions(tree: ast.Module) -> list[str]:
    return [name for name, _ in _bodies(tree)]


def _imports(tree: ast.Module, module: str) -> bool:
    return any(
        (isinstance(node, ast.ImportFrom) and node.module == module)
        or (isinstance(node, ast.Import) and any(alias.name == module for alias in node.names))
        for node in ast.walk(tree)
    )
