#!/usr/bin/env python3
"""A `docker` that refuses what Docker refuses: options, names, mounts, and commands on the wrong state of a container.

What runs in a container (dry runs, `kimi-w4a8 ready`, an engine's ops endpoint) runs in the test, which is its daemon.
FAKE_ENGINE=dies: the engine of a container ends at once.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER"])
IMAGES = {"kimi-w4a8-eagle3", "kimi-w4a8-eagle3:NEW"}
WITH_VALUE = {
    "run": {
        "--user", "--tmpfs", "--cap-drop", "--security-opt", "--ipc", "--network", "--volume", "--workdir", "--env",
        "--restart", "--stop-timeout", "--group-add", "--ulimit", "--device", "--name", "--label",
        "--log-driver",
    },
    "stop": {"--time"}, "rm": set(), "logs": {"--tail"}, "exec": set(),
    "image": {"--format"}, "container": {"--format"},
}  # fmt: skip
FLAGS = {
    "run": {"--init", "--read-only", "--detach", "--rm", "--interactive", "--tty"},
    "rm": {"--volumes", "--force"}, "logs": {"--follow"}, "image": {"--force"},
}  # fmt: skip


def ask(question: dict[str, object]) -> None:
    """Let the test run something, and end with its exit code if that is not 0."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.connect(str(STATE / "daemon"))
        daemon.sendall(json.dumps(question).encode() + b"\n")
        code, out, errors = json.loads(daemon.makefile().readline())
    sys.stdout.write(out)
    sys.stderr.write(errors)
    if code:
        sys.exit(code)


def options(command: str, words: list[str]) -> dict[str, list[str]]:
    """Take the options from the front of the words."""
    found: dict[str, list[str]] = {}
    while words and words[0].startswith("--"):
        option = words.pop(0)
        if option not in WITH_VALUE[command] | FLAGS.get(command, set()):
            sys.exit(f"unknown flag: {option}")
        found.setdefault(option, []).append(words.pop(0) if option in WITH_VALUE[command] else "")
    return found


def mount(text: str) -> dict[str, object]:
    """Split a bind mount; a name is that of a volume, and Docker makes a missing folder, as root."""
    source, target, *mode = text.split(":")
    if not (source.startswith("/") and target.startswith("/") and mode in ([], ["ro"])):
        sys.exit(f"docker: invalid volume specification: '{text}'")
    if not Path(source).exists():
        sys.exit(f"docker: {source} is not there: Docker would make an empty folder of root")
    return {"source": source, "target": target, "read_only": mode == ["ro"]}


def run(given: dict[str, list[str]], words: list[str]) -> None:
    if {"--rm", "--restart"} <= set(given):
        sys.exit("docker: Conflicting options: --restart and --rm.")
    targets = [volume.split(":")[1] for volume in given.get("--volume", [])]
    targets += [tmpfs.split(":")[0] for tmpfs in given.get("--tmpfs", [])]
    if len(targets) != len(set(targets)):
        sys.exit("docker: Error response from daemon: Duplicate mount point")
    for device in given.get("--device", []):
        if not Path(device).exists():
            sys.exit(f'docker: Error response from daemon: error gathering device information: no such file "{device}"')
    mounts = [mount(text) for text in given.pop("--volume", [])]
    image, *command = words
    if image not in IMAGES:
        sys.exit(f"docker: Unable to find image '{image}' locally")
    if "--dry-run" in command:
        return ask({"command": command})
    if command[:1] == ["prepare"]:
        (STATE / "prepared.json").write_text(json.dumps({"options": given, "mounts": mounts, "words": words}))
        return ask({"command": command})
    dies = os.environ.get("FAKE_ENGINE") == "dies"
    for name in given.get("--name", []):
        if (STATE / name).exists():
            sys.exit(f'docker: Conflict. The container name "/{name}" is already in use')
        (label,) = given.get("--label", ["port=0"])
        (STATE / name).write_text(f"{'exited' if dies else 'running'} 0 {label.partition('=')[2]}")
    (STATE / "run.json").write_text(json.dumps({"options": given, "mounts": mounts, "words": words}))
    print("0123456789abcdef")
    if "--detach" in given and not dies:
        ask({"engine": {"name": given["--name"][0], "env": given["--env"], "mounts": mounts, "command": command}})


def main(command: str, words: list[str]) -> None:
    inner = words.pop(0) if command in ("image", "container", "builder") else ""
    if (command, inner) in {("image", "rm"), ("builder", "prune")}:
        with (STATE / "removed").open("a") as file:
            print(command, inner, *words, file=file)
        return
    if command not in WITH_VALUE or inner not in ("", "inspect"):
        sys.exit(f"docker: '{command} {inner}' is not a docker command.")
    given = options(command, words)
    if command == "run":
        return run(given, words)
    if command == "image":
        if words[0] not in IMAGES:
            sys.exit(f"Error response from daemon: No such image: {words[0]}")
        return print("sha256:0123456789abcdef")
    name, state = words[0], STATE / words[0]
    if not state.exists():
        sys.exit(f"Error response from daemon: No such container: {name}")
    status = state.read_text()
    if command == "container":
        (form,) = given["--format"]
        state_, restarts, port = status.split()
        values = {".State.Status": state_, ".RestartCount": restarts, ".Config.Labels.port": port}
        print(re.sub(r"{{(.*?)}}", lambda found: values[found[1]], form))
    elif command == "logs":
        print("kimi-w4a8: the checkpoint is not here", file=sys.stderr)
    elif command == "exec":
        if not status.startswith("running"):
            sys.exit(f"Error response from daemon: container {name} is not running")
        ask({"command": words[2:]})
    elif command == "stop":
        ask({"stop": name})
        state.write_text(f"exited 0 {status.split()[-1]}")
    elif command == "rm":
        if status.startswith("running") and "--force" not in given:
            sys.exit(f'Error response from daemon: cannot remove container "/{name}": container is running')
        ask({"stop": name})
        state.unlink()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
