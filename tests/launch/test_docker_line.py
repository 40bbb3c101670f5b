"""The command line that `launch/docker-run.sh --print` shows."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.docker_host import RUN, own_groups
from support.repository import ROOT

from kimi_w4a8_eagle3.base.errors import KimiError, on_host


def docker_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RUN, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_the_docker_line_has_what_eight_gpus_need() -> None:
    result = docker_run(
        "--print", "serve", "--recipe", "eagle3-opt", MODELS="/data/models", RUNS="/data/my runs", NAME="k"
    )
    words = shlex.split(result.stdout)
    pairs = set(itertools.pairwise(words))
    assert words[:2] == ["docker", "run"]
    for pair in [
        ("--device", "/dev/kfd"),
        ("--device", "/dev/dri"),
        ("--ipc", "host"),
        ("--ulimit", "memlock=-1"),
        ("--volume", "/data/models/hub:/data/models/hub:ro"),
        ("--volume", "/data/my runs:/data/my runs"),
        ("--name", "k"),
    ]:
        assert pair in pairs
    assert words[-4:] == ["kimi-w4a8-eagle3", "serve", "--recipe", "eagle3-opt"]


def test_nothing_of_the_image_can_be_written_and_no_capability_is_left() -> None:
    words = shlex.split(docker_run("--print", "serve", CONFIG="/c").stdout)
    pairs = set(itertools.pairwise(words))
    assert "--read-only" in words and "--cap-add" not in words
    assert {("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges:true"), ("--volume", "/c:/c:ro")} <= pairs
    (tmpfs,) = [after for word, after in pairs if word == "--tmpfs"]
    assert tmpfs.startswith("/tmp:") and "exec" in tmpfs.split(":")[1].split(",")  # docker's default is noexec


def inside(volume: str) -> str:
    """`HOST:INSIDE[:ro]` -> `INSIDE[:ro]`."""
    return volume.partition(":")[2]


def test_the_check_of_the_read_only_root_has_the_containers_writable_places() -> None:
    folders = {"MODELS": "/models", "RUNS": "/runs", "CONFIG": "/trust"}
    words = shlex.split(docker_run("--print", "serve", **folders).stdout)
    volumes = {inside(after).replace("/hub", "") for word, after in itertools.pairwise(words) if word == "--volume"}
    script = (ROOT / "launch/check-readonly.sh").read_text()
    for volume in volumes:
        target, _, mode = volume.partition(":")
        bind = "--ro-bind" if mode == "ro" else "--bind"
        assert re.search(rf'(?<![\w-]){bind} "\$base/\w+" {target}\s', script), volume
    written = set(re.findall(r'(?<![\w-])--bind "\$base/\w+" (\S+)', script))
    assert written == {volume for volume in volumes if not volume.endswith(":ro")}


def test_fetch_and_trust_may_write_what_serve_only_reads_and_need_no_gpu() -> None:
    for command in ("fetch", "trust"):
        words = shlex.split(docker_run("--print", command, MODELS="/m", CONFIG="/c").stdout)
        assert "/m/hub:/m/hub" in words and "/c:/c" in words and "--device" not in words


def test_keys_come_as_files() -> None:
    words = shlex.split(docker_run("--print", "serve", API_KEY_FILE="/k/api", ADMIN_KEY_FILE="/k/admin").stdout)
    pairs = set(itertools.pairwise(words))
    for host, inside, name in [
        ("/k/api", "/run/secrets/kimi-api-key", "KIMI_API_KEY_FILE"),
        ("/k/admin", "/run/secrets/kimi-admin-key", "KIMI_ADMIN_KEY_FILE"),
    ]:
        assert {("--volume", f"{host}:{inside}:ro"), ("--env", f"{name}={inside}")} <= pairs
    assert "KIMI_API_KEY_FILE" not in docker_run("--print", "serve").stdout


def test_groups_are_those_of_the_device_nodes_and_of_an_ordinary_caller() -> None:
    words = shlex.split(docker_run("--print", "doctor").stdout)
    groups = [int(after) for word, after in itertools.pairwise(words) if word == "--group-add"]
    nodes = [Path("/dev/kfd"), *Path("/dev/dri").glob("renderD*")]
    expected = {node.stat().st_gid for node in nodes if node.exists()}
    if os.geteuid() != 0:  # root's container runs as the image's user
        expected |= own_groups()
    assert groups == sorted(expected)


def test_the_token_is_passed_by_name_only() -> None:
    result = docker_run("--print", "fetch", HF_TOKEN="hf_secret")
    assert "--env HF_TOKEN " in result.stdout
    assert "hf_secret" not in result.stdout + result.stderr


def test_only_fetch_is_given_the_token() -> None:
    for command in ("serve", "route", "bench", "doctor", "trust"):
        assert "HF_TOKEN" not in docker_run("--print", command, HF_TOKEN="hf_secret").stdout
    assert "HF_TOKEN" not in (ROOT / "launch/compose.yaml").read_text()


def test_no_command_is_an_error() -> None:
    assert docker_run().returncode == 2
    assert docker_run("--print").returncode == 2


def test_a_message_in_the_container_names_the_hosts_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(docker_run("--print", "serve", "agent").stdout)
    (variable,) = [word for word in words if word.startswith("KIMI_COMMAND=")]
    monkeypatch.setenv(*variable.split("=", 1))
    message = str(KimiError("it is not here", remedy="kimi-w4a8 fetch -r agent, or `kimi-w4a8 trust`"))
    assert f"to do:    {RUN} fetch -r agent, or `{RUN} trust`" in message
    monkeypatch.delenv("KIMI_COMMAND")
    assert on_host("kimi-w4a8 fetch") == "kimi-w4a8 fetch"
