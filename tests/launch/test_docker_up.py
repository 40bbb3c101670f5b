"""`launch/docker-run.sh up` beside a fake docker: checks, key, service, and the wait for it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.docker_host import AS_ROOT, LAUNCH, RELATIVE, ROOT, RUN, Host, caller, host, ordinary

from kimi_w4a8_eagle3.recipe.launch import load_recipe

__all__ = ["caller", "ordinary"]  # fixtures


def test_a_service_has_a_key_of_its_user_and_listens_on_the_network(caller: Host) -> None:
    done = caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE)
    assert (done.returncode, done.stderr) == (0, "")
    key = caller.home / "config/api-key"
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, caller.owner)
    assert re.fullmatch(r"[0-9a-f]{64}", key.read_text())
    port = str(caller.port)
    ready = f"http://127.0.0.1:{caller.port + 1}/ready"
    for line in (f"address: http://0.0.0.0:{port}/v1", f"key:     {key}", ready, "0 min: starting\nready\n"):
        assert line in done.stdout
    started = caller.started()
    assert started["words"] == [
        "kimi-w4a8-eagle3",
        *["serve", "agent", "--set", "host=0.0.0.0", "--set", f"port={port}"],
    ]
    assert {"--detach", "--restart"} <= set(started["options"]) and "--rm" not in started["options"]
    mounts = {mount["target"]: mount for mount in started["mounts"]}
    assert mounts["/run/secrets/kimi-api-key"]["source"] == str(key)
    again = caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE)
    assert again.returncode == 1 and "first run: docker stop --time 150 kimi-agent && docker rm" in again.stderr
    before = key.read_text()
    caller.remove("kimi-agent")
    assert caller.run("up", "agent", **RELATIVE).returncode == 0 and key.read_text() == before


def filled(text: str, settings: dict[str, str]) -> str:
    """Fill in compose's ${NAME}, ${NAME:-default} and ${NAME:?message}."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match[1], match[2], match[3]
        assert name in settings or kind == ":-", f"{name} is not set"
        return settings.get(name, rest or "")

    return re.sub(r"\$\{(\w+)(:[-?])?([^}]*)\}", value, text)


MORE_WORDS = ("--set", 'chat-template="./$HOME \\ template"')  # what JSON and compose treat in their own ways


@pytest.mark.parametrize("docker", ["docker", pytest.param("podman", marks=pytest.mark.slow)])
def test_compose_starts_what_the_docker_line_starts(caller: Host, docker: str) -> None:
    template, admin = caller.home / "my template", caller.home / "admin key"
    for file in (template, admin):
        file.write_text("a")
        file.chmod(0o644)
    more = {
        "DOCKER": docker,
        "ADMIN_KEY_FILE": "admin key",
        "DOCKER_ARGS": f"--env A=b --volume {caller.home}:/home/c:ro",
    }
    line = ("agent", "--listen", "0.0.0.0", *MORE_WORDS, "--set", f"chat-template={template}")
    compose = (*line[:3], "--as", "compose", *line[3:])
    done = caller.run("up", *compose, **RELATIVE, **more)
    assert (done.returncode, done.stderr) == (0, "")
    words = json.loads((caller.folder / "state/compose.json").read_text())
    assert words[:1] == ["--env-file"] and words[2:4] == ["--file", str(LAUNCH / "compose.yaml")]
    assert words[4] == "--file" and words[6:] == ["up", "--detach"]
    settings = dict(shlex.split(line)[0].split("=", 1) for line in Path(words[1]).read_text().splitlines())
    (service,) = yaml.safe_load(filled((LAUNCH / "compose.yaml").read_text(), settings))["services"].values()
    (extra,) = json.loads(Path(words[5]).read_text().replace("$$", "$"))["services"].values()
    service |= extra
    caller.remove("kimi-agent")
    assert caller.run("up", *line, **RELATIVE, **more).returncode == 0
    started = caller.started()
    options = started["options"]
    assert service["command"] == started["words"][1:] and [service["user"]] == options["--user"]
    assert {name.split("/")[-1] for name in service["devices"]} == {Path(d).name for d in options["--device"]}
    assert {f"{name}={value}" for name, value in service["ulimits"].items()} == set(options["--ulimit"]) - {"host"}
    assert service.get("userns_mode", "") == "".join(options.get("--userns", []))
    assert service["environment"] == options["--env"]
    assert service["group_add"] == options["--group-add"]
    for key, option in (("ipc", "--ipc"), ("network_mode", "--network"), ("working_dir", "--workdir")):
        assert [service[key]] == options[option]
    for key, option in (("cap_drop", "--cap-drop"), ("security_opt", "--security-opt"), ("tmpfs", "--tmpfs")):
        assert service[key] == options[option]
    mounts = {f"{m['source']}:{m['target']}" + (":ro" if m["read_only"] else "") for m in started["mounts"]}
    assert set(service["volumes"]) == mounts and service["read_only"]


def test_the_lines_of_compose_hold_with_spaces_in_paths(ordinary: Host) -> None:
    done = ordinary.run("up", "agent", "--as", "compose", **{**RELATIVE, "CONFIG": "my config"})
    (stop,) = re.findall(r"^stop:    (.*)$", done.stdout, re.MULTILINE)
    assert shlex.split(stop)[2:4] == ["--env-file", f"{ordinary.home}/my config/kimi-agent.env"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "agnt"], "unknown recipe 'agnt'; did you mean 'agent'?"),
        (["up", "agent", "--set", "max-total-tokens=abc"], "--max-total-tokens abc is not a valid value"),
        (["up", "agent", "--set", "options.replica=2"], "did you mean 'replicas'"),
        (["up", "agent", "--nonsense"], "--nonsense"),
    ],
)
def test_up_makes_nothing_for_what_the_image_refuses(ordinary: Host, words: list[str], message: str) -> None:
    done = ordinary.run(*words, **RELATIVE)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
    assert sorted(path.name for path in ordinary.home.iterdir()) == [".cache"]
    assert [path.name for path in (ordinary.folder / "state").iterdir()] == ["daemon"]


def test_up_ends_with_the_log_of_a_container_that_died(ordinary: Host) -> None:
    done = ordinary.run("up", "agent", **RELATIVE, FAKE_ENGINE="dies")
    assert done.returncode == 1 and "kimi-w4a8: the checkpoint is not here" in done.stderr
    assert "kimi-agent ended before it served" in done.stderr and "\nready\n" not in done.stdout
    assert not (ordinary.folder / "state/kimi-agent").exists()


def test_up_says_what_to_do_when_the_time_is_over(ordinary: Host) -> None:
    program = ordinary.folder / "bin/fake_engine.py"
    program.write_text("def start(port): pass\n")
    done = ordinary.run("up", "agent", **RELATIVE, READY_TIMEOUT="0")
    assert done.returncode == 1 and "still runs. Read its log" in done.stderr
    assert "docker logs --follow kimi-agent" in done.stderr and (ordinary.folder / "state/kimi-agent").exists()


def test_a_port_in_use_is_found_before_anything_is_made(ordinary: Host) -> None:
    with socket.create_server(("127.0.0.1", ordinary.port + 1)):
        done = ordinary.run("up", "agent", **RELATIVE)
    assert done.returncode == 1 and f"port {ordinary.port + 1} is in use" in done.stderr
    assert sorted(path.name for path in ordinary.home.iterdir()) == [".cache"]


@AS_ROOT
def test_systemd_starts_what_the_docker_line_starts() -> None:
    for found in host(0, [0]):
        systemctl = found.folder / "bin/systemctl"
        engine = f"[ $1 = enable ] && '{sys.executable}' {found.folder}/bin/fake_engine.py {found.port + 1}"
        systemctl.write_text(f'#!/bin/sh\necho "$@" >>{found.folder}/systemctl\n{engine}\nexit 0\n')
        systemctl.chmod(0o755)
        admin = found.home / "admin key"
        admin.write_text("a")
        admin.chmod(0o644)
        more = {"DOCKER": "podman", "ADMIN_KEY_FILE": "admin key", "DOCKER_ARGS": "--env A=b"}
        words = ("--set", "tp-size=4")
        done = found.run("up", "agent", "--listen", "0.0.0.0", "--as", "systemd", *words, **RELATIVE, **more)
        assert (done.returncode, done.stderr) == (0, "")
        assert (found.folder / "systemctl").read_text().startswith("daemon-reload\nenable --now kimi@agent\n")
        unit = (found.folder / "etc/systemd/system/kimi@.service").read_text()
        (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        assert "docker.service" not in unit
        lines = (found.folder / "etc/kimi/kimi.env").read_text().splitlines()
        settings = dict(shlex.split(line)[0].split("=", 1) for line in lines)
        assert settings["DOCKER"] == f"{found.folder}/bin/podman"
        command = start.replace("%i", "agent").replace("$ARGUMENTS", settings["ARGUMENTS"])
        words = shlex.split(re.sub(r"\$\{(\w+)\}", lambda match, known=settings: known[match[1]], command))
        assert words[0] == str(RUN) and f'ExecStop="{found.folder}/bin/podman" stop' in unit
        assert found.run(*words[1:], **settings).returncode == 0
        service = found.started()
        found.remove("kimi-agent")
        assert found.run("up", "agent", "--listen", "0.0.0.0", "--set", "tp-size=4", **RELATIVE, **more).returncode == 0
        assert found.started()["mounts"] == service["mounts"]
        assert (
            found.started()["options"]["--env"] == service["options"]["--env"] and "A=b" in service["options"]["--env"]
        )
        assert [word for word in service["words"] if word != "--recipe"] == found.started()["words"]
        undo(found, "## How to undo it", "\n\nOtherwise")
        undo(found, "If root ran", "\n\nIf you set")
        assert not any((found.folder / "etc").rglob("*kimi*"))
        assert (found.folder / "systemctl").read_text().endswith("disable --now kimi@agent\ndaemon-reload\n")


def undo(found: Host, first: str, last: str) -> None:
    """Run the lines of the page between two texts, with the host's folders in place of the machine's."""
    page = (ROOT / "docs/first-hour.md").read_text().partition(first)[2].partition(last)[0]
    lines = "\n".join(re.findall("^    (.*)$", page, re.MULTILINE))
    for folder in ("/etc/", "/var/lib/"):
        lines = lines.replace(f" {folder}", f" {found.folder}{folder}")
    programs = f"{found.folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": programs, "HOME": str(found.home), "FAKE_DOCKER": str(found.folder / "state")}
    subprocess.run(["bash", "-ec", lines], env=environment, cwd=found.home, check=True)


def test_the_lines_that_undo_leave_nothing(ordinary: Host) -> None:
    hub = ordinary.home / ".cache/huggingface/hub"
    assert ordinary.run("up", "agent").returncode == 0
    recipe = load_recipe("agent")
    for checkpoint in recipe.checkpoints:
        (hub / f"models--{checkpoint.repo.replace('/', '--')}").mkdir()
    shutil.copy(ROOT / "Dockerfile", ordinary.home)
    undo(ordinary, "\n\nIn either case", "\n\nIf root ran")
    left = [path for path in ordinary.home.rglob("*") if path.is_file() or path.name.startswith("models--")]
    assert sorted(path.name for path in left) == ["Dockerfile", "token"]
    assert not (ordinary.home / "runs").exists() and not (ordinary.home / ".config/kimi-w4a8-eagle3").exists()
    assert not (ordinary.folder / "state/kimi-agent").exists()
    removed = (ordinary.folder / "state/removed").read_text()
    bases = re.findall(r"^ARG [A-Z]*_IMAGE=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(bases) == 2 and all(name in removed for name in ("kimi-w4a8-eagle3", *bases)) and "prune" in removed
