"""launch/compose.yaml and the systemd unit start what docker-run.sh starts, with the settings of launch/service.env."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.docker_host import AS_ROOT, LAUNCH, RUN, Host, host

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
UNIT = LAUNCH / "systemd/kimi@.service"
SETTINGS = dict(re.findall(r"^([A-Z_]+)=(.*)$", (LAUNCH / "service.env").read_text(), re.MULTILINE))


def filled(text: str) -> str:
    """Fill in compose's ${NAME:?}."""
    return re.sub(r"\$\{(\w+):\?\}", lambda found: SETTINGS[found[1]], text)


def docker_line(found: Host, *words: str) -> dict[str, list[str]]:
    """Return the options of the docker line, by name, and "words" of the container."""
    line = shlex.split(found.run("--print", *words, **SETTINGS, DEV="/dev").stdout)[2:]
    options: dict[str, list[str]] = {}
    while line[0].startswith("--"):
        option = line.pop(0)
        takes_none = option in ("--init", "--read-only", "--rm")
        options.setdefault(option, []).append("" if takes_none else line.pop(0))
    return options | {"words": line}


@AS_ROOT
def test_compose_starts_what_the_docker_line_starts() -> None:
    (service,) = yaml.safe_load(filled((LAUNCH / "compose.yaml").read_text()))["services"].values()
    for found in host(0, [0]):
        words = ["--set", f"host={SETTINGS['LISTEN']}", "--set", f"port={SETTINGS['PORT']}"]
        line = docker_line(found, "serve", SETTINGS["RECIPE"], *words)
    image, *command = line["words"]
    assert (service["image"], service["command"], [service["user"]]) == (image, command, line["--user"])
    assert service["devices"] == line["--device"] and service["init"] and service["read_only"]
    assert [f"{name}={value}" for name, value in service["ulimits"].items()] == line["--ulimit"]
    assert [service["logging"]["driver"]] == line["--log-driver"]
    for key, option in (("ipc", "--ipc"), ("network_mode", "--network"), ("working_dir", "--workdir")):
        assert [service[key]] == line[option]
    for key, option in (("cap_drop", "--cap-drop"), ("tmpfs", "--tmpfs")):
        assert service[key] == line[option]
    assert {text.replace("seccomp:", "seccomp=") for text in service["security_opt"]} == set(line["--security-opt"])
    variables = {f"{name}={value}" for name, value in service["environment"].items()}
    assert set(line["--env"]) - variables == {f"KIMI_COMMAND={RUN}"} and variables <= set(line["--env"])
    assert service["group_add"] == [SETTINGS["VIDEO_GROUP"], SETTINGS["RENDER_GROUP"]]
    mounts = {f"{one['source']}:{one['target']}{':ro' * one.get('read_only', False)}" for one in service["volumes"]}
    others = [{mount for mount in some if not mount.endswith(":/home/kimi")} for some in (mounts, line["--volume"])]
    assert others[0] == others[1] and len(others[0]) == len(mounts) - 1
    assert f"{SETTINGS['HOME_FOLDER']}:/home/kimi" in mounts
    assert not any(one["bind"]["create_host_path"] for one in service["volumes"])  # Docker would make it as root
    assert int(SETTINGS["OPS_PORT"]) == int(SETTINGS["PORT"]) + 1


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@AS_ROOT
def test_the_unit_starts_and_stops_one_named_container() -> None:
    settings = unit()
    (start,), (stop,) = settings["ExecStart"], settings["ExecStop"]
    command = re.sub(r"\$\{?(\w+)\}?", lambda found: SETTINGS[found[1]], start)
    program, *words = shlex.split(command)
    assert program.endswith("/launch/docker-run.sh") and settings["EnvironmentFile"] == ["/etc/kimi/%i.env"]
    for found in host(0, [0]):
        folders = {name: f"{found.home}/{name.lower()}" for name in ("MODELS", "RUNS", "CONFIG")}
        key = found.home / "key"
        key.write_text("12345678")
        key.chmod(0o600)
        variables = {**SETTINGS, **folders, "API_KEY_FILE": str(key), "NAME": "kimi-agent"}
        done = found.run(*words, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        assert found.started()["options"]["--name"] == ["kimi-agent"] and "--detach" not in found.started()["options"]
        assert found.started()["words"][1:3] == ["serve", "agent"]
    assert settings["Environment"] == ["NAME=kimi-%i"] and stop.endswith(" stop --time 150 kimi-%i")
    assert settings["SuccessExitStatus"] == ["143"] and settings["Restart"] == ["on-failure"]
    assert int(settings["TimeoutStopSec"][0]) > 150
    assert "--force" not in settings["ExecStartPre"][0]  # a service that runs is not ended


@needs_systemd
def test_the_unit_exposes_less_than_half_of_what_systemd_counts(tmp_path: Path) -> None:
    copy = Path(shutil.copy(UNIT, tmp_path))
    words = ["systemd-analyze", "security", "--no-pager", "--offline=true", "--threshold=49", str(copy)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-300:] + result.stderr
    for folder in re.findall(r"^\w+=(/var/lib/\w+)", (LAUNCH / "service.env").read_text(), re.MULTILINE):
        assert folder in unit()["ReadWritePaths"]


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` on a copy whose programs and dependencies exist."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = UNIT.read_text()
    for path in ("/opt/kimi-w4a8-eagle3/launch/docker-run.sh", "/usr/bin/docker"):
        assert path in text
        text = text.replace(path, str(program))
    (tmp_path / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")
    copy = tmp_path / "kimi@agent.service"
    copy.write_text(text)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    complaints = [line for line in result.stderr.splitlines() if str(tmp_path) in line or "kimi@" in line]
    assert not complaints
    if result.returncode:
        pytest.skip(f"systemd-analyze cannot work here: {result.stderr[:200]}")
