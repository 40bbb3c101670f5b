#!/usr/bin/env python3
"""A `docker` that treats names, folders and users as Docker does, and starts nothing. It writes what it was given."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER"])
WITH_VALUE = {
    "--user", "--tmpfs", "--cap-drop", "--security-opt", "--ipc", "--network", "--volume", "--workdir", "--env",
    "--restart", "--stop-timeout", "--userns", "--group-add", "--ulimit", "--device", "--name",
}  # fmt: skip


def mount(text: str) -> dict[str, object]:
    """A name without a slash in front is that of a volume; a folder that is not there is made, as root."""
    source, target, *mode = text.split(":")
    named = not source.startswith("/")
    if not named and not Path(source).exists():
        sys.exit(f"docker: {source} is not there: Docker would make an empty folder of root")
    return {"source": source, "target": target, "named": named, "read_only": mode == ["ro"]}


def run(words: list[str]) -> None:
    options: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        options.setdefault(option, []).append(words.pop(0) if option in WITH_VALUE else "")
    for name in options.get("--name", []):
        if (STATE / name).exists():
            sys.exit(f'docker: Conflict. The container name "/{name}" is already in use')
        (STATE / name).touch()
    mounts = [mount(text) for text in options.pop("--volume")]
    (STATE / "run.json").write_text(json.dumps({"options": options, "mounts": mounts, "words": words}))
    print("0123456789abcdef")


if __name__ == "__main__":
    command, words = sys.argv[1], sys.argv[2:]
    if command == "--version":
        print(f"{Path(sys.argv[0]).name} version 5")
    elif command == "image":
        print("sha256:0123456789abcdef")
    elif command == "container":
        sys.exit(0 if (STATE / words[-1]).exists() else 1)
    elif command == "run":
        run(words)
    else:
        (STATE / f"{command}.json").write_text(json.dumps(words))
