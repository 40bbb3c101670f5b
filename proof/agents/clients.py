"""Start of each client, from clients.toml: its configuration, its command, and the calls of the model.

A client is installed in a folder: with npm in `npm/` (a newer Node in `node22/`), or in the environment `py/` or
`kimi/`. It runs with a home of its own and no other variables of this shell.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.toml import tomllib

from .sessions import MODEL

HERE = Path(__file__).parent
_FILE = tomllib.loads((HERE / "clients.toml").read_text())
PRODUCTS: list[dict[str, Any]] = _FILE["products"]


@dataclass(frozen=True)
class AgentClient:
    """One client in one session. folder: has the clients. url: of the server."""

    name: str
    package: str
    settings: Mapping[str, Any]
    folder: Path
    home: Path
    work: Path
    url: str

    @property
    def whole(self) -> bool:
        """True if one process asks all questions, which are its last arguments."""
        return bool(self.settings.get("whole"))

    def start(self, task: str, again: bool) -> tuple[list[str], dict[str, str]]:
        """Write the files of a session; return command and variables that begin a task, or go on after the last one."""
        for folder in self._filled(self.settings.get("folders", ())):
            Path(folder).mkdir(exist_ok=True)
        for file, text in self._filled(self.settings.get("files", {})).items():
            Path(file).write_text(text)
        if self.name.startswith("ai-sdk"):
            shutil.copy(HERE / "sessions.js", self.folder / "npm")
        more = self.settings.get("again", ()) if again else ()
        filled = self._filled(self.settings["command"])
        words = [word for one in filled for word in (more if one == "{again}" else [one])]
        return [word.replace("{task}", task) for word in words], self._environ()

    def version(self) -> str:
        """Return the output of the client's command for its version."""
        words = self._filled(self.settings["version"])
        said = subprocess.run(words, env=self._environ(), capture_output=True, text=True, timeout=60, check=False)
        return said.stdout.strip()

    def calls(self) -> list[list[Any]]:
        """Return the name and the arguments of each call that the model makes."""
        calls: list[list[Any]] = self._filled(self.settings["calls"])
        return calls

    def _environ(self) -> dict[str, str]:
        path = self._filled("{node}:{npm}:/usr/local/bin:/usr/bin:/bin")
        usual = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}
        return {**usual, **self._filled(self.settings.get("variables", {}))}

    def _filled(self, value: Any) -> Any:
        """Replace the names in braces of clients.toml."""
        if isinstance(value, Mapping):
            return {self._filled(key): self._filled(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._filled(inner) for inner in value]
        if not isinstance(value, str):
            return value
        names = {
            **{name: f"{self.folder}/{name}/bin" for name in ("py", "kimi")},
            "npm": f"{self.folder}/npm/node_modules/.bin",
            "node": f"{self.folder}/node22/node_modules/node/bin",
            **{"home": self.home, "work": self.work, "url": self.url, "here": HERE, "model": MODEL},
            **{"name": self.name.removeprefix("ai-sdk-"), "package": self.package},
        }
        for name, text in names.items():
            value = value.replace(f"{{{name}}}", str(text))
        return value


def settings_of(session: str) -> dict[str, Any]:
    """Return the settings of a session: its own, or those of the libraries."""
    kind = session if session in _FILE["sessions"] else "ai-sdk" if session.startswith("ai-sdk") else "library"
    settings: dict[str, Any] = _FILE["sessions"][kind]
    return {**_FILE["sessions"].get(settings.get("like", ""), {}), **settings}
