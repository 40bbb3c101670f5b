"""Edits of Python files through LibCST, which keeps the bytes, comments and layout of everything else."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        visitor = _Defaults(self)
        try:
            cst.parse_module(source).visit(visitor)
        except (cst.ParserSyntaxError, SyntaxError, ValueError):
            return State.UNKNOWN, "not valid Python"
        defaults = set(visitor.found)
        if not defaults:
            return State.UNKNOWN, f"no function has a parameter {self.parameter} with a default"
        found = f"{len(visitor.found)} defaults of {self.parameter}: {', '.join(sorted(defaults))}"
        states = {str(self.old): State.ORIGINAL, str(self.new): State.APPLIED}
        return states.get(defaults.pop(), State.UNKNOWN) if len(defaults) == 1 else State.UNKNOWN, found

    def apply(self, source: bytes) -> bytes:
        """Set every default of the parameter to `new`."""
        return cst.parse_module(source).visit(_Defaults(self)).bytes


@dataclass
class _Defaults(cst.CSTTransformer):
    """Collect the defaults of a parameter, in functions and lambdas alike, and replace those that are integers."""

    edit: ParameterDefault
    found: list[str] = field(default_factory=list)

    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:
        value = updated_node.default
        if updated_node.name.value != self.edit.parameter or value is None:
            return updated_node
        self.found.append(cst.Module([]).code_for_node(value))
        if not isinstance(value, cst.Integer):
            return updated_node
        return updated_node.with_changes(default=value.with_changes(value=str(self.edit.new)))
