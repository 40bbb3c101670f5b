"""launch/docker-run.sh beside a `docker` that treats names and users as Docker does (`fake_docker.py`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import pytest
from support.docker_host import AS_ROOT, RELATIVE, ROOT, RUN, Host, caller, host, ordinary

__all__ = ["caller", "ordinary"]  # fixtures


def docker_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN, *arguments], env={**os.environ, **environment}, capture_output=True, text=True)


def lines_of(page: str) -> list[list[str]]:
    lines = re.findall(r"^    launch/docker-run\.sh (.*?)(?:  +#.*)?$", (ROOT / page).read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_the_lines_of_the_pages_work_with_relative_names(caller: Host) -> None:
    lines = lines_of("README.md")
    assert [words[0] for words in lines] == ["doctor", "fetch", "trust", "trust", "accept", "up"]
    assert [words for words in lines if words not in lines_of("docs/first-hour.md")] == [["doctor"]]
    others = [words for words in lines_of("docs/mi325x.md") if words not in lines]
    assert others == [["plan", "agent", "--gpu", "mi325x"]]
    for words in (*lines, *others, ["serve", "agent"]):
        done = caller.run(*words, **RELATIVE)
        assert (done.returncode, done.stderr) == (0, ""), words
        started = caller.started()
        assert started["options"]["--user"] == [f"{caller.owner}:{caller.groups[0] or caller.owner}"]
        for mount in started["mounts"]:
            assert not mount["named"], mount
            assert caller.can("r" if mount["read_only"] else "w", mount["source"]), (words, mount)
    (home,) = caller.home.glob("out/home-0123456789ab")
    assert home.stat().st_uid == caller.owner


def test_rootless_podman_keeps_the_callers_ids_and_groups(ordinary: Host) -> None:
    assert ordinary.run("serve", "agent", **RELATIVE, DOCKER="podman").returncode == 0
    options = ordinary.started()["options"]
    assert options["--userns"] == ["keep-id"] and options["--group-add"] == ["keep-groups"]
    assert options["--ulimit"] == ["host"] and "label=disable" in options["--security-opt"]


@AS_ROOT
def test_podman_of_root_runs_as_the_images_user() -> None:
    for found in host(0, [0]):
        assert found.run("serve", "agent", **RELATIVE, DOCKER="podman").returncode == 0
        options = found.started()["options"]
        assert "--userns" not in options and options["--user"] == ["10001:10001"]
        assert options["--group-add"] == ["4444", "4445"]


def test_of_the_cache_only_the_hub_is_mounted_and_the_token_only_for_fetch(ordinary: Host) -> None:
    cache = ordinary.home / ".cache/huggingface"
    for command in (["serve", "agent"], ["bench", "con2"], ["accept"], ["fetch", "-r", "agent"]):
        assert ordinary.run(*command).returncode == 0
        sources = {mount["source"] for mount in ordinary.started()["mounts"] if mount["source"].startswith(str(cache))}
        assert sources == {f"{cache}/hub"} | ({f"{cache}/token"} if command[0] == "fetch" else set())


def test_files_that_arguments_name_get_in_under_the_hosts_path(ordinary: Host) -> None:
    prompts, folder = ordinary.home / "prompts.jsonl", ordinary.home / "my model"
    prompts.write_text("{}")
    (folder / "bench").mkdir(parents=True)
    earlier = ordinary.home / "out/20261123T000000Z-bench"
    words = [
        "bench",
        "chat",
        "--prompts-file",
        "prompts.jsonl",
        "--model=my model",
        "--baseline",
        "out/earlier",
        "bench",
    ]
    for path in (ordinary.home / "bench", earlier.with_name("earlier")):
        path.mkdir(parents=True)
        if os.geteuid() == 0:
            for made in (path, path.parent):
                os.chown(made, ordinary.uid, ordinary.groups[0])
    done = ordinary.run(*words, **RELATIVE)
    assert (done.returncode, done.stderr) == (0, "")
    started = ordinary.started()
    inside_words = ["bench", "chat", "--prompts-file", str(prompts), f"--model={folder}", "--baseline"]
    assert started["words"][1:] == [*inside_words, str(earlier.with_name("earlier")), "bench"]
    mounted = {mount["source"]: mount for mount in started["mounts"]}
    for path in (prompts, folder):
        assert mounted[str(path)]["target"] == str(path) and mounted[str(path)]["read_only"]
    assert str(earlier.with_name("earlier")) not in mounted
    assert started["options"]["--workdir"] == [f"{ordinary.home}/out"]
    assert f"KIMI_RUNS={ordinary.home}/out" in started["options"]["--env"]


@AS_ROOT
def test_what_lies_below_root_has_another_path_inside() -> None:
    """The container's user cannot enter the image's /root."""
    words = shlex.split(docker_run("--print", "serve", RUNS="/root/runs", MODELS="/root/m").stdout)
    assert {"/root/m/hub:/host/root/m/hub:ro", "/root/runs:/host/root/runs", "HF_HOME=/host/root/m"} <= set(words)


@AS_ROOT
def test_a_key_that_only_root_can_read_is_found_before_the_start() -> None:
    for found in host(0, [0]):
        key = found.home / "key"
        missing = found.run("serve", "agent", **RELATIVE, API_KEY_FILE="key")
        assert missing.returncode == 1 and f"there is no file {key}" in missing.stderr
        subprocess.run(["sh", "-c", missing.stderr.rpartition("first run: ")[2]], check=True)
        assert found.run("serve", "agent", **RELATIVE, API_KEY_FILE="key").returncode == 0
        os.chown(key, 0, 0)
        refused = found.run("serve", "agent", **RELATIVE, API_KEY_FILE="key")
        assert refused.returncode == 1 and f"chown 10001:10001 {key}" in refused.stderr


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["up"], {}, "up needs a recipe"),
        (["up", "agent", "--as", "runit"], {}, "--as runit is unknown"),
        (["up", "agent", "--listen"], {}, "--listen needs a value"),
        (["up", "agent", "--as", "systemd", "--set", "a=b c"], {}, "takes no argument with a space: a=b c"),
        (["up", "agent", "--as", "compose"], {"DOCKER_ARGS": "--gpus all"}, "and --volume A:B, not --gpus"),
        (["up", "agent", "--as", "compose"], {"DOCKER_ARGS": "--env"}, "and --volume A:B, not --env"),
        (["up", "agent", "--set", "port=abc"], {}, "its ports from PORT"),
        (["up", "agent"], {"READY_TIMEOUT": "soon"}, "READY_TIMEOUT=soon"),
        (["serve", "agent"], {"PORT": "abc"}, "PORT=abc is not a number"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    ordinary: Host, words: list[str], settings: dict[str, str], message: str
) -> None:
    done = ordinary.run(*words, **RELATIVE, **settings)
    assert done.returncode == 2 and message in done.stderr
    assert sorted(path.name for path in ordinary.home.iterdir()) == [".cache"]


@AS_ROOT
def test_whatever_is_missing_comes_in_one_message_with_one_command(ordinary: Host) -> None:
    """The command is run as it stands, and then the second try works."""
    data, key = ordinary.folder / "data of all", ordinary.folder / "key"
    data.mkdir(0o700)
    key.write_text("k")
    key.chmod(0o600)
    settings = {"MODELS": f"{data}/models", "RUNS": f"{data}/runs", "API_KEY_FILE": str(key)}
    first = ordinary.run("fetch", "--recipe", "eagle3-opt", **settings)
    assert first.returncode == 1 and not list(data.iterdir())
    reasons, command = first.stderr.rpartition("docker-run.sh: first run: ")[::2]
    assert reasons.count("docker-run.sh: ") == 2 and str(key) in reasons and "data\\ of\\ all/models" in reasons
    sudo = ordinary.folder / "bin/sudo"
    sudo.write_text('#!/bin/sh\nexec "$@"\n')
    sudo.chmod(0o755)
    data.chmod(0o755)
    subprocess.run(["sh", "-c", command], env={"PATH": f"{sudo.parent}:/usr/bin:/bin"}, check=True)
    second = ordinary.run("fetch", "--recipe", "eagle3-opt", **settings)
    assert (second.returncode, second.stderr) == (0, "")


def test_without_the_driver_nothing_is_started(ordinary: Host) -> None:
    result = ordinary.run("doctor", DEV=f"{ordinary.folder}/none")
    assert result.returncode == 1 and "kfd is missing" in result.stderr
    assert re.search(r"first run: (sudo )?modprobe amdgpu", result.stderr)
    assert sorted(path.name for path in ordinary.home.iterdir()) == [".cache"]


@pytest.mark.parametrize(
    ("says", "command"),
    [
        (
            "permission denied while trying to connect to the Docker daemon socket",
            "sudo usermod --append --groups docker",
        ),
        ("Error response from daemon: No such image: kimi-w4a8-eagle3:latest", "docker build -t kimi-w4a8-eagle3"),
    ],
)
def test_what_docker_refuses_has_a_command(ordinary: Host, says: str, command: str) -> None:
    program = ordinary.folder / "bin/docker"
    program.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit 1\n')
    result = ordinary.run("serve")
    assert result.returncode == 1 and f"first run: {command}" in result.stderr
