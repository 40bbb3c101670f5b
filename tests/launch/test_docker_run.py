"""launch/docker-run.sh beside a `docker` that treats names and users as Docker does (`fake_docker.py`)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
RUN = LAUNCH / "docker-run.sh"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def own_groups() -> set[int]:
    return {os.getgid(), os.getegid(), *os.getgroups()}


def docker_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN, *arguments], env={**os.environ, **environment}, capture_output=True, text=True)


@dataclass
class Host:
    """A machine with two nodes, a fake docker, and a caller who is not root unless `uid` is 0."""

    folder: Path
    uid: int
    groups: list[int]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def owner(self) -> int:
        """The user in the container."""
        return self.uid or 10001

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        usual = {"PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(self.home)}
        usual |= {"DEV": f"{self.folder}/dev", "ETC": f"{self.folder}/etc", "FAKE_DOCKER": f"{self.folder}/state"}
        root = os.geteuid() == 0
        return subprocess.run(
            [LAUNCH / "docker-run.sh", *command],
            env={**usual, **environment},
            cwd=self.home,
            user=self.uid if root else None,
            group=self.groups[0] if root else None,
            extra_groups=self.groups[1:] if root else None,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def started(self) -> dict[str, Any]:
        """Return the last arguments of the fake docker: options, mounts, words."""
        answer: dict[str, Any] = json.loads((self.folder / "state/run.json").read_text())
        return answer

    def can(self, how: str, path: str) -> bool:
        """True if the container's user has this right to a mounted file or folder; those above it do not matter."""
        found, bit = Path(path).stat(), {"r": 4, "w": 2}[how]
        shift = 6 if found.st_uid == self.owner else 3 if found.st_gid in (self.owner, *self.groups[1:]) else 0
        return bool(found.st_mode >> shift & bit)


def host(uid: int, groups: list[int]) -> Iterator[Host]:
    """Make a machine whose home and cache are 0700, as `hf auth login` makes them, without a checkout beside them."""
    root = os.geteuid() == 0
    umask = os.umask(0o022)  # the other user reads the nodes, also where the umask of the tests is 077
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their owner only
        folder = Path(name)
        folder.chmod(0o755)
        found = Host(folder, uid, groups)
        for path in ("dev/dri", "bin", "state", "etc", "home/.cache/huggingface"):
            (folder / path).mkdir(parents=True)
        (folder / "state").chmod(0o777)
        for node, group in (("kfd", 4444), ("dri/renderD128", 4445)):
            (folder / "dev" / node).touch()
            if root:
                os.chown(folder / "dev" / node, 0, group)
        for name in ("docker", "podman"):
            shutil.copy(Path(__file__).with_name("fake_docker.py"), folder / "bin" / name)
            (folder / "bin" / name).chmod(0o755)
        (folder / "home/.cache/huggingface/token").write_text("hf_secret")
        for path in (found.home, found.home / ".cache", *(found.home / ".cache").rglob("*")):
            path.chmod(0o700)
            if root:
                os.chown(path, uid, groups[0])
        os.umask(umask)
        yield found


@pytest.fixture
def ordinary() -> Iterator[Host]:
    """A caller without root's rights: another user if the tests run as root."""
    root = os.geteuid() == 0
    yield from host(4242 if root else os.geteuid(), [4242, 4343] if root else sorted(own_groups()))


@pytest.fixture(params=[pytest.param(0, marks=AS_ROOT), 4242], ids=["root", "user"])
def caller(request: pytest.FixtureRequest) -> Iterator[Host]:
    uid = request.param if os.geteuid() == 0 else os.geteuid()
    yield from host(uid, [uid] if os.geteuid() == 0 else sorted(own_groups()))


RELATIVE = {"MODELS": "models", "RUNS": "out", "CONFIG": "config"}


def lines_of(page: str) -> list[list[str]]:
    lines = re.findall(r"^    launch/docker-run\.sh (.*?)(?:  +#.*)?$", (ROOT / page).read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_the_lines_of_the_pages_work_with_relative_names(caller: Host) -> None:
    lines = lines_of("README.md")
    assert [words[0] for words in lines] == ["doctor", "fetch", "trust", "accept", "up"]
    others = [words for words in lines_of("docs/mi325x.md") if words not in lines]
    assert others == [["trust", "-r", "agent", "--yes"]]
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


def test_a_service_has_a_key_of_its_user_and_listens_on_the_network(caller: Host) -> None:
    done = caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE, PORT="9000")
    assert (done.returncode, done.stderr) == (0, "")
    key = caller.home / "config/api-key"
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, caller.owner)
    assert re.fullmatch(r"[0-9a-f]{64}", key.read_text())
    for line in ("address: http://0.0.0.0:9000/v1", f"key:     {key}", "http://127.0.0.1:9001/ready"):
        assert line in done.stdout
    started = caller.started()
    assert started["words"] == ["kimi-w4a8-eagle3", *["serve", "agent", "--set", "host=0.0.0.0", "--set", "port=9000"]]
    assert {"--detach", "--restart"} <= set(started["options"]) and "--rm" not in started["options"]
    mounts = {mount["target"]: mount for mount in started["mounts"]}
    assert mounts["/run/secrets/kimi-api-key"]["source"] == str(key)
    again = caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE)
    assert again.returncode == 1 and "first run: docker stop --time 150 kimi-agent && docker rm" in again.stderr
    before = key.read_text()
    (caller.folder / "state/kimi-agent").unlink()
    assert caller.run("up", "agent", **RELATIVE).returncode == 0 and key.read_text() == before


def filled(text: str, settings: dict[str, str]) -> str:
    """Fill in compose's ${NAME}, ${NAME:-default} and ${NAME:?message}."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match[1], match[2], match[3]
        assert name in settings or kind == ":-", f"{name} is not set"
        return settings.get(name, rest or "")

    return re.sub(r"\$\{(\w+)(:[-?])?([^}]*)\}", value, text)


def test_compose_starts_what_the_docker_line_starts(caller: Host) -> None:
    done = caller.run("up", "agent", "--listen", "0.0.0.0", "--as", "compose", **RELATIVE)
    assert (done.returncode, done.stderr) == (0, "")
    words = json.loads((caller.folder / "state/compose.json").read_text())
    assert words[:1] == ["--env-file"] and words[2:] == ["--file", str(LAUNCH / "compose.yaml"), "up", "--detach"]
    settings = dict(line.split("=", 1) for line in Path(words[1]).read_text().splitlines())
    (service,) = yaml.safe_load(filled((LAUNCH / "compose.yaml").read_text(), settings))["services"].values()
    assert caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE).returncode == 0
    started = caller.started()
    options = started["options"]
    assert service["command"] == started["words"][1:] and [service["user"]] == options["--user"]
    assert {name.split("/")[-1] for name in service["devices"]} == {Path(d).name for d in options["--device"]}
    assert {f"{name}={value}" for name, value in service["ulimits"].items()} == set(options["--ulimit"])
    assert {f"{name}={value}" for name, value in service["environment"].items()} == set(options["--env"])
    assert set(service["group_add"]) <= set(options["--group-add"])
    for key, option in (("ipc", "--ipc"), ("network_mode", "--network"), ("working_dir", "--workdir")):
        assert [service[key]] == options[option]
    for key, option in (("cap_drop", "--cap-drop"), ("security_opt", "--security-opt"), ("tmpfs", "--tmpfs")):
        assert service[key] == options[option]
    mounts = {f"{m['source']}:{m['target']}" + (":ro" if m["read_only"] else "") for m in started["mounts"]}
    assert set(service["volumes"]) == mounts and service["read_only"]


@AS_ROOT
def test_systemd_starts_what_the_docker_line_starts() -> None:
    for found in host(0, [0]):
        systemctl = found.folder / "bin/systemctl"
        systemctl.write_text(f'#!/bin/sh\necho "$@" >>{found.folder}/systemctl\n')
        systemctl.chmod(0o755)
        done = found.run("up", "agent", "--listen", "0.0.0.0", "--as", "systemd", **RELATIVE)
        assert (done.returncode, done.stderr) == (0, "")
        assert (found.folder / "systemctl").read_text() == "daemon-reload\nenable --now kimi@agent\n"
        unit = (found.folder / "etc/systemd/system/kimi@.service").read_text()
        (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        settings = dict(line.split("=", 1) for line in (found.folder / "etc/kimi/kimi.env").read_text().splitlines())
        command = start.replace("%i", "agent").replace("$ARGUMENTS", "")
        words = shlex.split(re.sub(r"\$\{(\w+)\}", lambda match, known=settings: known[match[1]], command))
        assert words[0] == str(RUN) and f'ExecStop="{found.folder}/bin/docker" stop' in unit
        assert found.run(*words[1:], **settings, NAME="kimi-agent").returncode == 0
        service = found.started()
        (found.folder / "state/kimi-agent").unlink()
        assert found.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE).returncode == 0
        assert found.started()["mounts"] == service["mounts"]
        assert [word for word in service["words"] if word != "--recipe"] == found.started()["words"]


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
        (["up", "agent", "--as", "compose", "--set", "tp-size=4"], {}, "need --as docker"),
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
