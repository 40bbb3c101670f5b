"""The multi-turn tasks of the Berkeley Function Calling Leaderboard, by its own package `bfcl-eval`.

The package brings the tasks, the tools' implementations and the checker, and needs no network. Its metadata asks for
about 150 other packages, a second torch among them. The multi-turn part imports only mpmath, so it is installed
without them and belongs to no extra. Written for bfcl-eval 2026.3.23.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.next_step import pip_install

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_EVAL = "bfcl_eval.eval_checker.multi_turn_eval"
_RUN = "kimi_w4a8"  # part of the names under which the harness keeps the tools' states
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_MORE_TOOLS = "I have updated some more functions you can choose from. What about now?"  # as the harness asks


@dataclass(frozen=True)
class AgentTask:
    """One conversation. turns: the user's messages by turn. tools: the declared ones by turn."""

    name: str
    turns: Sequence[Sequence[dict[str, Any]]]
    tools: Sequence[Sequence[dict[str, Any]]]
    entry: dict[str, Any]
    truth: Sequence[Sequence[str]]


class Bfcl:
    """The installed harness. Raises KimiError if it is missing."""

    def __init__(self) -> None:
        spec = find_spec("bfcl_eval")
        if spec is None or spec.origin is None:
            raise KimiError(
                "bfcl-eval is not installed",
                expected="its tasks and its checker; no extra has it, because it would install a second torch",
                remedy=f"{pip_install('--no-deps', 'bfcl-eval==2026.3.23')} && {pip_install('mpmath')}",
            )
        self._data = Path(spec.origin).parent / "data"
        # optional: bfcl-eval
        self._execute = import_module(f"{_EVAL}.multi_turn_utils").execute_multi_turn_func_call
        self._check = import_module(f"{_EVAL}.multi_turn_checker").multi_turn_checker
        backends = import_module("bfcl_eval.constants.executable_backend_config")
        self._documents: dict[str, str] = backends.MULTI_TURN_FUNC_DOC_FILE_MAPPING

    def tasks(self, category: str, limit: int | None) -> list[AgentTask]:
        """Return the first tasks of a category."""
        name = f"BFCL_v4_multi_turn_{category}.json"
        entries, truths = _rows(self._data / name), _rows(self._data / "possible_answer" / name)
        return [self._task(*pair) for pair in list(zip(entries, truths, strict=True))[:limit]]

    def execute(self, task: AgentTask, calls: Sequence[str]) -> list[str]:
        """Run the calls on the task's own state, and return what each answers."""
        entry = task.entry
        about = entry["initial_config"], entry["involved_classes"], _RUN, task.name, "long_context" in task.name
        results, _ = self._execute(list(calls), *about)
        return [str(result) for result in results]

    def problem(self, task: AgentTask, calls: Sequence[Sequence[Sequence[str]]]) -> str:
        """Return what is wrong with the calls, by turn and step; empty if the task is solved."""
        found = self._check([list(map(list, turn)) for turn in calls], task.truth, task.entry, "", _RUN)
        return "" if found["valid"] else str(found.get("error_type") or "wrong")

    def _task(self, entry: dict[str, Any], truth: dict[str, Any]) -> AgentTask:
        files = [self._data / "multi_turn_func_doc" / self._documents[name] for name in entry["involved_classes"]]
        documents = [row for file in files for row in _rows(file)]
        later = {int(turn): names for turn, names in (entry.get("missed_function") or {}).items()}
        absent = set(entry.get("excluded_function") or ())
        turns, tools = [], []
        for number, said in enumerate(entry["question"]):
            waiting = {name for turn, names in later.items() if turn > number for name in names}
            tools.append([_tool(row) for row in documents if row["name"] not in absent | waiting])
            turns.append(said or [{"role": "user", "content": _MORE_TOOLS}])
        return AgentTask(entry["id"], turns, tools, entry, truth["ground_truth"])


def written(name: str, arguments: dict[str, Any]) -> str:
    """Write a call as the harness reads it. Its names are identifiers, and its values are literals."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _tool(row: dict[str, Any]) -> dict[str, Any]:
    about = {"name": row["name"], "description": row["description"], "parameters": _schema(row["parameters"])}
    return {"type": "function", "function": about}


def _schema(found: Any) -> Any:
    """Return a JSON schema of the harness's types."""
    if isinstance(found, list):
        return [_schema(one) for one in found]
    if not isinstance(found, dict):
        return found
    made = {key: _schema(value) for key, value in found.items()}
    if isinstance(kind := made.get("type"), str):
        made["type"] = _TYPES.get(kind, kind)
    return made


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
