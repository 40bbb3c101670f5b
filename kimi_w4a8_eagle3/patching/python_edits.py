"""Edits of Python files through LibCST, which keeps the bytes, comments and layout of everything else."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst

from .edit_state import State


@dataclass(frozen=True)
class ParameterDefault:
    """Change the default of one parameter from `old` to `new` in every function that has both."""

    parameter: str
    old: int
    new: int

    def inspect(self, source: bytes) -> tuple[State, str]:
        """Return ORIGINAL when every default is `old`, APPLIED when every one is `new`; a mix is UNKNOWN."""
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


def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _defaults(tree: ast.Module, parameter: str) -> list[ast.expr]:
    """Return the defaults of every parameter with this name, in functions and lambdas alike."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.arguments):
            continue
        positional = [*node.posonlyargs, *node.args]
        pairs = list(zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True))
        pairs += [(arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        found += [value for arg, value in pairs if arg.arg == parameter]
    return found
