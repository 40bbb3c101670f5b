"""Start of each client for one task: its configuration, its command, and the words of the model.

The clients are installed in one folder, with npm in `npm/`, a newer Node in `node22/`, the libraries in the virtual
environment `py/`, and kimi-cli and aider in `kimi/` and `aider/` (docs/clients.md has the commands). Each runs with a
home of its own and no other variables of this shell.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sessions import MODEL, SESSIONS

TASK = "Write sums.py that prints 33 + 14, run it, and show it."
_PROGRAM = "print(33 + 14)\n"
Step = Mapping[str, Any]
Started = tuple[list[str], dict[str, str]]  # command, variables


@dataclass(frozen=True)
class SessionPlace:
    """Folders and server of one session. folder: has the clients. url: of the server."""

    folder: Path
    home: Path
    work: Path
    url: str

    def environ(self, **more: str) -> dict[str, str]:
        path = ":".join(map(str, (self.node, self.folder / "npm/node_modules/.bin", "/usr/local/bin:/usr/bin:/bin")))
        return {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", **more}

    @property
    def node(self) -> Path:
        return self.folder / "node22/node_modules/node/bin"

    def npm(self, name: str) -> str:
        return str(self.folder / "npm/node_modules/.bin" / name)


@dataclass(frozen=True)
class AgentClient:
    """One client: how it is started, what it reads on its input, and what the model says."""

    start: Callable[[SessionPlace], Started]
    steps: Callable[[SessionPlace], list[Step]]
    version: Callable[[SessionPlace], list[str]]
    stdin: str = ""
    proves: str = "47"  # what its output or its file holds when the task is done


def task_steps(write: tuple[str, Any], run: tuple[str, Any], show: tuple[str, Any]) -> list[Step]:
    """Return the words of a task of three calls."""
    return [
        {"think": "I write the file.", "text": "I write sums.py.", "calls": [write]},
        {"think": "I run it.", "calls": [run]},
        {"think": "I look at it.", "calls": [show]},
        {"think": "It prints 47.", "text": "sums.py prints 47."},
    ]


def _codex(at: SessionPlace) -> Started:
    (at.home / ".codex").mkdir()
    provider = (
        f'model_providers.local={{name="local",base_url="{at.url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    )
    words = [at.npm("codex"), "exec", "--skip-git-repo-check", "-s", "danger-full-access"]
    return [*words, "-c", "model_provider=local", "-c", provider, "-m", MODEL, TASK], at.environ(OPENAI_API_KEY="any")


def _claude(at: SessionPlace) -> Started:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), MODEL)
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER"), "1")
    patient = {"API_TIMEOUT_MS": str(3600 * 1000)}  # a CPU reads its first prompt for longer than ten minutes
    words = [at.npm("claude"), "-p", TASK, "--permission-mode", "acceptEdits", "--allowedTools", "Bash,Write,Read,Edit"]
    return words, at.environ(ANTHROPIC_BASE_URL=at.url, ANTHROPIC_API_KEY="any", **models, **quiet, **patient)


def _opencode(at: SessionPlace) -> Started:
    model = {"name": MODEL, "tool_call": True, "reasoning": True, "limit": {"context": 131072, "output": 4096}}
    options = {"baseURL": f"{at.url}/v1", "apiKey": "any"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": {MODEL: model}}
    config = {"provider": {"local": provider}, "permission": {"*": "allow"}}
    (at.work / "opencode.json").write_text(json.dumps(config))
    quiet = dict.fromkeys(("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH"), "1")
    return [at.npm("opencode"), "run", "-m", f"local/{MODEL}", TASK], at.environ(**quiet)


def _qwen(at: SessionPlace) -> Started:
    variables = at.environ(OPENAI_BASE_URL=f"{at.url}/v1", OPENAI_API_KEY="any", OPENAI_MODEL=MODEL)
    return [at.npm("qwen"), "-y", "-p", TASK, "--auth-type", "openai"], variables


def _kimi(at: SessionPlace) -> Started:
    (at.home / ".kimi").mkdir()
    provider = f'[providers.local]\ntype = "kimi"\nbase_url = "{at.url}/v1"\napi_key = "any"\n'
    model = (
        f'[models.k]\nprovider = "local"\nmodel = "{MODEL}"\nmax_context_size = 131072\ncapabilities = ["thinking"]\n'
    )
    (at.home / ".kimi/config.toml").write_text(f'default_model = "k"\n{provider}{model}')
    return [str(at.folder / "kimi/bin/kimi"), "--print", "-y", "-p", TASK], at.environ()


def _cline(at: SessionPlace) -> Started:
    variables = at.environ()
    words = [at.npm("cline"), "auth", "-p", "openai", "-k", "any", "-m", MODEL, "-b", f"{at.url}/v1"]
    subprocess.run(
        words, env=variables, cwd=at.work, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True
    )
    return [at.npm("cline"), TASK], variables


def _aider(at: SessionPlace) -> Started:
    words = [
        str(at.folder / "aider/bin/aider"),
        "--model",
        f"openai/{MODEL}",
        "--no-git",
        "--yes-always",
        "--no-pretty",
    ]
    words += ["--no-show-model-warnings", "--no-check-update", "--analytics-disable", "sums.py"]
    return words, at.environ(OPENAI_API_BASE=f"{at.url}/v1", OPENAI_API_KEY="any", LITELLM_LOCAL_MODEL_COST_MAP="True")


def _edits(at: SessionPlace) -> list[Step]:
    edits = [f"sums.py\n```\nprint(33 + {number})\n```\n" for number in (13, 14)]
    return [
        {"think": "I write it.", "text": edits[0]},
        {"think": "Now 14.", "text": edits[1]},
        {"text": "It prints 47."},
    ]


def _library(name: str) -> AgentClient:
    search = "lookup" if name == "smolagents" else "search"
    steps: list[Step] = [
        {"think": "I look for Mia first.", "text": "I search.", "calls": [(search, {"name": "Mia"})]},
        {"think": "Now Tom.", "calls": [(search, {"name": "Tom"})]},
        {"think": "I add 33 and 14.", "calls": [("add", {"a": 33, "b": 14})]},
        {"think": "The sum is 47.", "text": "They have 47 apples."},
        {"text": "You are welcome."},
    ]
    if name == "smolagents":
        steps[2] = {"think": "It is 47.", "calls": [("final_answer", {"answer": "47"})]}
    program = str(Path(__file__).with_name("sessions.py"))
    library = next(part for part in ("openai-agents", "pydantic-ai", "langchain", name.split("-")[0]) if part in name)
    package = {"pydantic-ai": "pydantic-ai-slim", "langchain": "langchain-openai"}.get(library, library)
    version = f"import importlib.metadata as m; print('{package}', m.version('{package}'))"
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return AgentClient(
        lambda at: ([str(at.folder / "py/bin/python"), program, name, at.url], at.environ(**quiet)),
        lambda at: steps,
        lambda at: [str(at.folder / "py/bin/python"), "-c", version],
        proves="",
    )


def _of_files(write: str, run: str, show: str, path: str, **more: Any) -> Callable[[SessionPlace], list[Step]]:
    def steps(at: SessionPlace) -> list[Step]:
        file = str(at.work / "sums.py")
        command = {"command": "python3 sums.py", **more}
        return task_steps((write, {path: file, "content": _PROGRAM}), (run, command), (show, {path: file}))

    return steps


def _codex_steps(at: SessionPlace) -> list[Step]:
    commands = (f"echo '{_PROGRAM.strip()}' > sums.py", "python3 sums.py", "cat sums.py")
    write, run, show = (("exec_command", {"cmd": command}) for command in commands)
    return task_steps(write, run, show)


def _codex_group_steps(at: SessionPlace) -> list[Step]:
    """Call two tools of a namespace, which the model sees as functions of one name each."""
    agent = "01980000-0000-7000-8000-000000000000"
    close, resume = ("multi_agent_v1__close_agent", {"target": agent}), ("multi_agent_v1__resume_agent", {"id": agent})
    return [
        {"think": "I close it.", "calls": [close]},
        {"think": "Is it there?", "calls": [resume]},
        {"think": "It is gone.", "text": "47 is not open."},
    ]


def _cline_steps(at: SessionPlace) -> list[Step]:
    file = str(at.work / "sums.py")
    write, run = ("editor", {"path": file, "new_text": _PROGRAM}), ("run_commands", {"commands": ["python3 sums.py"]})
    return task_steps(write, run, ("read_files", {"files": [{"path": file}]}))


def _npm_version(name: str) -> Callable[[SessionPlace], list[str]]:
    return lambda at: [at.npm(name), "--version"]


CLIENTS: dict[str, AgentClient] = {
    "codex": AgentClient(_codex, _codex_steps, _npm_version("codex")),
    "codex-namespace": AgentClient(_codex, _codex_group_steps, _npm_version("codex")),
    "claude-code": AgentClient(
        _claude, _of_files("Write", "Bash", "Read", "file_path", description="Run it"), _npm_version("claude")
    ),
    "opencode": AgentClient(
        _opencode, _of_files("write", "bash", "read", "filePath", description="Run it"), _npm_version("opencode")
    ),
    "qwen-code": AgentClient(
        _qwen,
        _of_files("write_file", "run_shell_command", "read_file", "file_path", is_background=False),
        _npm_version("qwen"),
    ),
    "kimi-cli": AgentClient(
        _kimi,
        _of_files("WriteFile", "Shell", "ReadFile", "path"),
        lambda at: [str(at.folder / "kimi/bin/kimi"), "--version"],
    ),
    "cline": AgentClient(_cline, _cline_steps, _npm_version("cline")),
    "aider": AgentClient(
        _aider,
        _edits,
        lambda at: [str(at.folder / "aider/bin/aider"), "--version"],
        "Write sums.py that prints 33 + 13.\nNow 33 + 14.\nWhat does it print?\n/exit\n",
    ),
    **{name: _library(name) for name in SESSIONS},
}
