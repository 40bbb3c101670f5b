#!/usr/bin/env python3
"""A `docker` that treats names, folders and users as Docker does.

It passes the image's dry runs to the test, which is its daemon, and writes the rest down.

FAKE_ENGINE=dies: the engine of a container ends at once.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path

import fake_engine

STATE = Path(os.environ["FAKE_DOCKER"])
WITH_VALUE = {
    "--user", "--tmpfs", "--cap-drop", "--security-opt", "--ipc", "--network", "--volume", "--workdir", "--env",
    "--restart", "--stop-timeout", "--userns", "--group-add", "--ulimit", "--device", "--name",
}  # fmt: skip
FLAGS = {"--init", "--read-only", "--detach", "--rm", "--interactive", "--tty"}
DIES = os.environ.get("FAKE_ENGINE") == "dies"


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
        if option not in WITH_VALUE | FLAGS:
            sys.exit(f"unknown flag: {option}")
        options.setdefault(option, []).append(words.pop(0) if option in WITH_VALUE else "")
    if {"--rm", "--restart"} <= set(options):
        sys.exit("docker: Conflicting options: --restart and --rm.")
    targets = [volume.split(":")[1] for volume in options.get("--volume", [])]
    targets += [tmpfs.split(":")[0] for tmpfs in options.get("--tmpfs", [])]
    if len(targets) != len(set(targets)):
        sys.exit("docker: Error response from daemon: Duplicate mount point")
    mounts = [mount(text) for text in options.pop("--volume", [])]
    if "--dry-run" in words:
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(str(STATE / "daemon"))
            daemon.sendall(json.dumps(words[1:]).encode() + b"\n")
            code, message = json.loads(daemon.makefile().readline())
        sys.stderr.write(message)
        sys.exit(code)
    for name in options.get("--name", []):
        if (STATE / name).exists():
            sys.exit(f'docker: Conflict. The container name "/{name}" is already in use')
        (STATE / name).write_text("exited 0" if DIES else "running 0")
    (STATE / "run.json").write_text(json.dumps({"options": options, "mounts": mounts, "words": words}))
    print("0123456789abcdef")
    if "--detach" in options and not DIES:
        (url,) = [env for env in options["--env"] if env.startswith("HEALTHCHECK_URL=")]
        fake_engine.start(int(url.split(":")[-1].split("/")[0]))


def compose(words: list[str]) -> None:
    (STATE / "compose.json").write_text(json.dumps(words))
    if "up" in words:
        lines = Path(words[words.index("--env-file") + 1]).read_text().splitlines()
        settings = dict(shlex.split(line)[0].split("=", 1) for line in lines)
        (STATE / settings["NAME"]).write_text("running 0")
        fake_engine.start(int(settings["OPS_PORT"]))


if __name__ == "__main__":
    command, words = sys.argv[1], sys.argv[2:]
    if command == "--version":
        print(f"{Path(sys.argv[0]).name} version 5")
    elif command == "image" and words[0] == "inspect":
        print("sha256:0123456789abcdef")
    elif (command, words[0]) in {("image", "rm"), ("builder", "prune")}:
        with (STATE / "removed").open("a") as file:
            print(command, *words, file=file)
    elif command == "container":
        if not (STATE / words[-1]).exists():
            sys.exit(f"Error response from daemon: No such container: {words[-1]}")
        print((STATE / words[-1]).read_text() if "--format" in words else "[{}]")
    elif command == "run":
        run(words)
    elif command == "compose":
        compose(words)
    elif command == "logs":
        print("kimi-w4a8: the checkpoint is not here", file=sys.stderr)
    elif command == "rm":
        (STATE / words[-1]).unlink(missing_ok="--force" in words)
    elif command == "stop":
        pass
    else:
        sys.exit(f"docker: '{command}' is not a docker command.")
