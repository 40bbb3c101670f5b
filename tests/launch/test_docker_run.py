"""launch/docker-run.sh: its line, and what a `docker` does that treats names and users as Docker (`fake_docker.py`)."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.docker_host import AS_ROOT, RELATIVE, ROOT, RUN, Host, caller, host, ordinary, own_groups

from kimi_w4a8_eagle3.base.errors import KimiError, on_host

__all__ = ["caller", "ordinary"]  # fixtures


def docker_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN, *arguments], env={**os.environ, **environment}, capture_output=True, text=True)


def printed(*words: str, **environment: str) -> tuple[list[str], set[tuple[str, str]]]:
    """Words of the docker line that --print shows, and each with the one after it."""
    found = shlex.split(docker_run("--print", *words, **environment).stdout)
    return found, set(itertools.pairwise(found))


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
    words = ["bench", "chat", "--prompts-file", "prompts.jsonl", "--model=my model"]
    words += ["--baseline", "out/earlier", "bench"]
    links = ["out/link", "out/outside"]  # `draft switch` exchanges a link, so it must get the link's own name
    for path in (ordinary.home / "bench", earlier.with_name("earlier")):
        path.mkdir(parents=True)
        if os.geteuid() == 0:
            for made in (path, path.parent):
                os.chown(made, ordinary.uid, ordinary.groups[0])
    (ordinary.home / "out/link").symlink_to("earlier")
    (ordinary.home / "out/outside").symlink_to("../bench")
    done = ordinary.run(*words, *links, **RELATIVE)
    assert (done.returncode, done.stderr) == (0, "")
    started = ordinary.started()
    inside_words = ["bench", "chat", "--prompts-file", str(prompts), f"--model={folder}", "--baseline"]
    expected = [str(earlier.with_name("earlier")), "bench", *(str(ordinary.home / link) for link in links)]
    assert started["words"][1:] == [*inside_words, *expected]
    mounted = {mount["source"]: mount for mount in started["mounts"]}
    for path in (prompts, folder, ordinary.home / "bench"):
        assert mounted[str(path)]["target"] == str(path) and mounted[str(path)]["read_only"]
    assert str(earlier.with_name("earlier")) not in mounted
    assert started["options"]["--workdir"] == [f"{ordinary.home}/out"]
    assert f"KIMI_RUNS={ordinary.home}/out" in started["options"]["--env"]


@AS_ROOT
def test_what_lies_below_root_has_another_path_inside() -> None:
    """The container's user cannot enter the image's /root."""
    words, _ = printed("serve", RUNS="/root/runs", MODELS="/root/m")
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


def test_the_docker_line_has_what_eight_gpus_need() -> None:
    words, pairs = printed("serve", "--recipe", "eagle3-opt", MODELS="/data/models", RUNS="/data/my runs", NAME="k")
    assert words[:2] == ["docker", "run"] and words[-4:] == ["kimi-w4a8-eagle3", "serve", "--recipe", "eagle3-opt"]
    assert {("--device", "/dev/kfd"), ("--device", "/dev/dri"), ("--ipc", "host"), ("--ulimit", "memlock=-1")} <= pairs
    folders = "/data/models/hub:/data/models/hub:ro", "/data/my runs:/data/my runs"
    assert {*(("--volume", folder) for folder in folders), ("--name", "k")} <= pairs


def test_nothing_of_the_image_can_be_written_and_no_capability_is_left() -> None:
    words, pairs = printed("serve", CONFIG="/c")
    assert "--read-only" in words and "--cap-add" not in words
    assert {("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges:true"), ("--volume", "/c:/c:ro")} <= pairs
    (tmpfs,) = [after for word, after in pairs if word == "--tmpfs"]
    assert tmpfs.startswith("/tmp:") and "exec" in tmpfs.split(":")[1].split(",")  # docker's default is noexec


def test_the_check_of_the_read_only_root_has_the_containers_writable_places() -> None:
    _, pairs = printed("serve", MODELS="/models", RUNS="/runs", CONFIG="/trust")
    volumes = {after.partition(":")[2].replace("/hub", "") for word, after in pairs if word == "--volume"}
    script = (ROOT / "launch/check-readonly.sh").read_text()
    for volume in volumes:
        target, _, mode = volume.partition(":")
        bind = "--ro-bind" if mode == "ro" else "--bind"
        assert re.search(rf'(?<![\w-]){bind} "\$base/\w+" {target}\s', script), volume
    written = set(re.findall(r'(?<![\w-])--bind "\$base/\w+" (\S+)', script))
    assert written == {volume for volume in volumes if not volume.endswith(":ro")}


def test_fetch_and_trust_may_write_what_serve_only_reads_and_need_no_gpu() -> None:
    for command in ("fetch", "trust"):
        words, _ = printed(command, MODELS="/m", CONFIG="/c")
        assert "/m/hub:/m/hub" in words and "/c:/c" in words and "--device" not in words


def test_keys_come_as_files() -> None:
    _, pairs = printed("serve", API_KEY_FILE="/k/api", ADMIN_KEY_FILE="/k/admin")
    for kind in ("api", "admin"):
        inside, name = f"/run/secrets/kimi-{kind}-key", f"KIMI_{kind.upper()}_KEY_FILE"
        assert {("--volume", f"/k/{kind}:{inside}:ro"), ("--env", f"{name}={inside}")} <= pairs
    assert "KIMI_API_KEY_FILE" not in docker_run("--print", "serve").stdout


def test_groups_are_those_of_the_device_nodes_and_of_an_ordinary_caller() -> None:
    words, _ = printed("doctor")
    groups = [int(after) for word, after in itertools.pairwise(words) if word == "--group-add"]
    nodes = [Path("/dev/kfd"), *Path("/dev/dri").glob("renderD*")]
    expected = {node.stat().st_gid for node in nodes if node.exists()}
    if os.geteuid() != 0:  # root's container runs as the image's user
        expected |= own_groups()
    assert groups == sorted(expected)


def test_only_fetch_is_given_the_token_and_by_name() -> None:
    fetched = docker_run("--print", "fetch", HF_TOKEN="hf_secret")
    assert "--env HF_TOKEN " in fetched.stdout and "hf_secret" not in fetched.stdout + fetched.stderr
    for command in ("serve", "route", "bench", "doctor", "trust"):
        assert "HF_TOKEN" not in docker_run("--print", command, HF_TOKEN="hf_secret").stdout
    assert "HF_TOKEN" not in (ROOT / "launch/compose.yaml").read_text()


def test_no_command_is_an_error() -> None:
    assert docker_run().returncode == 2
    assert docker_run("--print").returncode == 2


def test_a_message_in_the_container_names_the_hosts_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words, _ = printed("serve", "agent")
    (variable,) = [word for word in words if word.startswith("KIMI_COMMAND=")]
    monkeypatch.setenv(*variable.split("=", 1))
    message = str(KimiError("it is not here", remedy="kimi-w4a8 fetch -r agent, or `kimi-w4a8 trust`"))
    assert f"to do:    {RUN} fetch -r agent, or `{RUN} trust`" in message
    monkeypatch.delenv("KIMI_COMMAND")
    assert on_host("kimi-w4a8 fetch") == "kimi-w4a8 fetch"
