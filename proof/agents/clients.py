"""Start of each client for one task, from clients.toml: its configuration, its command, and the words of the model.

The clients are installed in one folder, with npm in `npm/`, a newer Node in `node22/`, the libraries in the virtual
environment `py/`, and kimi-cli and aider in `kimi/` and `aider/` (docs/perf/clients.md has the commands). Each runs
with a home of its own and no other variables of this shell.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.toml import tomllib

from .sessions import MODEL, SESSIONS

TASK = "Write sums.py that prints 33 + 14, run it, and show it."
HERE = Path(__file__).parent
_FILE = tomllib.loads((HERE / "clients.toml").read_text())
_PACKAGES = {"pydantic-ai": "pydantic-ai-slim", "langchain": "langchain-openai", "openai-agents": "openai-agents"}
Step = Mapping[str, Any]
Started = tuple[list[str], dict[str, str]]  # command, variables


@dataclass(frozen=True)
class SessionPlace:
    """Folders and server of one session. folder: has the clients. url: of the server."""

    folder: Path
    home: Path
    work: Path
    url: str

    def names(self) -> dict[str, str]:
        """Return what stands for the names in braces in clients.toml."""
        programs = {name: f"{self.folder}/{name}/bin" for name in ("py", "kimi", "aider")}
        programs |= {
            "npm": f"{self.folder}/npm/node_modules/.bin",
            "node": f"{self.folder}/node22/node_modules/node/bin",
        }
        return {**programs, "home": str(self.home), "work": str(self.work), "url": self.url, "here": str(HERE)}


@dataclass(frozen=True)
class AgentClient:
    """One client. whole: one process asks all questions, which are its last arguments.

    proves: what its output holds when the task is done.
    """

    name: str
    command: list[str]
    version_command: list[str]
    settings: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        return bool(self.settings.get("whole"))

    @property
    def proves(self) -> str:
        return str(self.settings.get("proves", "47"))

    def start(self, at: SessionPlace, task: str, again: bool) -> Started:
        """Write the files of a session, and return how a task begins, or how the next one goes on with it."""
        for folder in self._filled(self.settings.get("folders", ()), at):
            Path(folder).mkdir(exist_ok=True)
        for file, text in self._filled(self.settings.get("files", {}), at).items():
            Path(file).write_text(text)
        if self.name.startswith("ai-sdk"):
            shutil.copy(HERE / "sessions.js", at.folder / "npm")
        if setup := self._filled(self.settings.get("setup", ()), at):
            subprocess.run(
                setup, env=self.environ(at), cwd=at.work, stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
                check=True,
            )  # fmt: skip
        more = self.settings.get("again", ()) if again else ()
        words = [word for one in self._filled(self.command, at) for word in (more if one == "{again}" else [one])]
        return [word.replace("{task}", task) for word in words], self.environ(at)

    def environ(self, at: SessionPlace) -> dict[str, str]:
        names = at.names()
        path = f"{names['node']}:{names['npm']}:/usr/local/bin:/usr/bin:/bin"
        usual = {"HOME": names["home"], "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**usual, **self._filled(self.settings.get("variables", {}), at)}

    def version(self, at: SessionPlace) -> str:
        """Return what the client says of its version."""
        words = self._filled(self.version_command, at)
        return subprocess.run(
            words, env=self.environ(at), capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()

    def steps(self, at: SessionPlace) -> list[Step]:
        """Return the words of the model: a call a step, then its answers."""
        calls = [{"think": "I do it.", "calls": [call]} for call in self._filled(self.settings.get("calls", ()), at)]
        return [*calls, *({"think": "It is 47.", "text": text} for text in self.settings.get("texts", ["It is 47."]))]

    def _filled(self, value: Any, at: SessionPlace) -> Any:
        if isinstance(value, Mapping):
            return {self._filled(key, at): self._filled(inner, at) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._filled(inner, at) for inner in value]
        if isinstance(value, str):
            library = next((known for known in _PACKAGES if self.name.startswith(known)), self.name.split("-")[0])
            more = {"name": self.name.removeprefix("ai-sdk-"), "package": _PACKAGES.get(library, library)}
            for name, text in {**at.names(), **more, "model": MODEL}.items():
                value = value.replace(f"{{{name}}}", text)
        return value


def _client(name: str) -> AgentClient:
    kind = name if name in _FILE["sessions"] else "ai-sdk" if name.startswith("ai-sdk") else "library"
    settings = _FILE["sessions"][kind]
    while like := settings.get("like"):
        settings = {**_FILE["sessions"][like], **{key: value for key, value in settings.items() if key != "like"}}
    return AgentClient(name, settings["command"], settings["version"], settings)


PRODUCTS: list[dict[str, Any]] = _FILE["products"]
_NAMES = {*_FILE["sessions"], *SESSIONS, *(session for product in PRODUCTS for session in product["sessions"])}
CLIENTS: dict[str, AgentClient] = {name: _client(name) for name in sorted(_NAMES - {"library", "ai-sdk"})}
