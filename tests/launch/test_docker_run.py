"""launch/docker-run.sh beside a `docker` that refuses what Docker refuses (`fake_docker.py`)."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from support.docker_host import AS_ROOT, RELATIVE, ROOT, RUN, Host, caller, host, ordinary, own_groups

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.recipe.launch import load_recipe

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


def test_help_needs_no_docker(tmp_path: Path) -> None:
    for words in (["--help"], ["up", "--help"]):
        done = subprocess.run(
            [RUN, *words], env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("docker-run.sh [--print] COMMAND")
        assert "READY_TIMEOUT" in done.stdout and "set -euo" not in done.stdout and not list(tmp_path.iterdir())


def test_the_lines_of_the_pages_work_with_relative_names(caller: Host) -> None:
    lines = lines_of("README.md")
    assert [words[0] for words in lines] == ["up"]
    others = [words for words in lines_of("docs/first-hour.md") if words not in lines]
    assert [words[0] for words in others] == ["up", "plan", "accept", "accept"]
    steps = [["doctor"], *([name, "-r", "agent"] for name in ("fetch", "trust")), ["prepare", "agent"]]
    for words in (*steps, *others, ["serve", "agent"], *lines):
        done = caller.run(*words, **RELATIVE)
        assert (done.returncode, done.stderr) == (0, ""), words
        started = caller.started()
        assert started["options"]["--user"] == [f"{caller.owner}:{caller.groups[0] or caller.owner}"]
        for mount in started["mounts"]:
            assert caller.can("r" if mount["read_only"] else "w", mount["source"]), (words, mount)
    (home,) = caller.home.glob("out/home-0123456789ab")
    assert home.stat().st_uid == caller.owner


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
    words = ["bench", "chat", "--prompts-file", "prompts.jsonl", "--model=my model", "--again", "prompts.jsonl"]
    links = ["out/link", "out/outside"]  # `draft switch` exchanges a link, so it must get the link's own name
    for path in (ordinary.home / "bench", ordinary.home / "out/earlier"):
        path.mkdir(parents=True)
        if os.geteuid() == 0:
            for made in (path, path.parent):
                os.chown(made, ordinary.uid, ordinary.groups[0])
    (ordinary.home / "out/link").symlink_to("earlier")
    (ordinary.home / "out/outside").symlink_to("../bench")
    done = ordinary.run(*words, "--baseline", "out/earlier", "bench", *links, **RELATIVE)
    assert (done.returncode, done.stderr) == (0, "")
    started = ordinary.started()
    expected = ["bench", "chat", "--prompts-file", str(prompts), f"--model={folder}", "--again", str(prompts)]
    expected += ["--baseline", f"{ordinary.home}/out/earlier", "bench", *(f"{ordinary.home}/{link}" for link in links)]
    assert started["words"][1:] == expected
    mounted = {mount["source"]: mount for mount in started["mounts"]}
    for path in (prompts, folder, ordinary.home / "bench"):
        assert mounted[str(path)]["target"] == str(path) and mounted[str(path)]["read_only"]
    assert f"{ordinary.home}/out/earlier" not in mounted
    assert started["options"]["--workdir"] == [f"{ordinary.home}/out"]
    assert f"KIMI_RUNS={ordinary.home}/out" in started["options"]["--env"]


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ([], {}, "no command was given"),
        (["--print"], {}, "no command was given"),
        (["up"], {}, "up needs a recipe"),
        (["up", "agent", "--listen"], {}, "--listen needs a value"),
        (["up", "agent", "--trust", "--listen"], {}, "--listen needs a value"),
        (["serve", "agent"], {"HOME": ""}, "HOME is not set; set it, or MODELS and CONFIG"),
        (["fetch", "-r", "agent"], {"HF_TOKEN_PATH": "tokne"}, "tokne is not a file"),
        (["up", "agent", "--set", "port=abc"], {}, "its ports from PORT"),
        (["serve", "agent"], {"PORT": "abc"}, "PORT=abc is not a port"),
        (["serve", "agent"], {"PORT": "95270"}, "PORT=95270 is not a port"),
        (["up", "agnt"], {}, "unknown recipe 'agnt'; did you mean 'agent'?"),
        (["up", "agent", "--set", "max-total-tokens=abc"], {}, "--max-total-tokens abc is not a valid value"),
        (["up", "agent", "--nonsense"], {}, "--nonsense"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(
    ordinary: Host, words: list[str], settings: dict[str, str], message: str
) -> None:
    folders = {} if "HOME" in settings else RELATIVE
    done = ordinary.run(*words, **folders, **settings)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert ordinary.made() == []


def test_what_the_host_lacks_is_named_before_anything_is_made(ordinary: Host) -> None:
    cases = [
        (["doctor"], {"DEV": f"{ordinary.folder}/none"}, "none/kfd is missing", "modprobe amdgpu"),
        (["up", "agent"], {"API_KEY_FILE": "kye"}, f"there is no file {ordinary.home}/kye", "openssl rand"),
        (["up", "agent"], {"IMAGE": "kimi-w4a8"}, "there is no image kimi-w4a8: ", "docker build -t kimi-w4a8 "),
    ]
    for words, settings, message, command in cases:
        done = ordinary.run(*words, **{**RELATIVE, **settings})
        assert done.returncode == 1 and message in done.stderr
        assert command in done.stderr.rpartition("first run: ")[2]
    with socket.create_server(("127.0.0.1", ordinary.port + 1)):
        done = ordinary.run("up", "agent", **RELATIVE)
    assert done.returncode == 1 and f"port {ordinary.port + 1} is in use" in done.stderr
    assert ordinary.made() == []
    docker = ordinary.folder / "bin/docker"
    docker.write_text("#!/bin/sh\necho 'permission denied while trying to connect to the Docker daemon' >&2\nexit 1\n")
    assert "first run: sudo usermod --append --groups docker" in ordinary.run("serve", "agent").stderr


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


@AS_ROOT
def test_a_key_of_root_becomes_the_image_users() -> None:
    for found in host(0, [0]):
        key = found.home / "key"
        missing = found.run("serve", "agent", **RELATIVE, API_KEY_FILE="key")
        assert missing.returncode == 1 and f"there is no file {key}" in missing.stderr
        subprocess.run(["sh", "-c", missing.stderr.rpartition("first run: ")[2]], check=True)
        assert found.run("serve", "agent", **RELATIVE, API_KEY_FILE="key").returncode == 0
        assert (key.stat().st_uid, key.stat().st_mode & 0o777) == (10001, 0o600)
        os.chown(key, 4242, 4242)
        refused = found.run("serve", "agent", **RELATIVE, API_KEY_FILE="key")
        assert refused.returncode == 1 and f"chown 10001:10001 {key}" in refused.stderr


def test_the_docker_line_has_what_eight_gpus_need_and_few_rights() -> None:
    words, pairs = printed("serve", "--recipe", "eagle3-opt", MODELS="/m", RUNS="/my runs", CONFIG="/c", NAME="k")
    assert words[:2] == ["docker", "run"] and words[-4:] == ["kimi-w4a8-eagle3", "serve", "--recipe", "eagle3-opt"]
    assert {("--device", "/dev/kfd"), ("--device", "/dev/dri"), ("--ipc", "host"), ("--ulimit", "memlock=-1")} <= pairs
    folders = "/m/hub:/m/hub:ro", "/my runs:/my runs", "/c:/c:ro"
    assert {*(("--volume", folder) for folder in folders), ("--name", "k")} <= pairs
    groups = [int(after) for word, after in itertools.pairwise(words) if word == "--group-add"]
    nodes = [Path("/dev/kfd"), *Path("/dev/dri").glob("renderD*")]
    expected = {node.stat().st_gid for node in nodes if node.exists()}
    assert groups == sorted(expected | (own_groups() if os.geteuid() else set()))
    assert "--read-only" in words and "--cap-add" not in words
    assert {("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges:true")} <= pairs
    (tmpfs,) = [after for word, after in pairs if word == "--tmpfs"]
    assert tmpfs.startswith("/tmp:") and "exec" in tmpfs.split(":")[1].split(",")  # docker's default is noexec
    for command in ("fetch", "trust"):  # they may write what a server only reads, and need no GPU
        words, _ = printed(command, MODELS="/m", CONFIG="/c")
        assert "/m/hub:/m/hub" in words and "/c:/c" in words and "--device" not in words


def test_keys_come_as_files_and_the_token_by_name_for_fetch_alone() -> None:
    _, pairs = printed("serve", API_KEY_FILE="/k/api")
    inside = "/run/secrets/api_key_file"
    assert {("--volume", f"/k/api:{inside}:ro"), ("--env", f"KIMI_API_KEY_FILE={inside}")} <= pairs
    fetched = docker_run("--print", "fetch", HF_TOKEN="hf_secret")
    assert "--env HF_TOKEN " in fetched.stdout and "hf_secret" not in fetched.stdout + fetched.stderr
    for command in ("serve", "bench", "doctor", "trust"):
        assert "HF_TOKEN" not in docker_run("--print", command, HF_TOKEN="hf_secret").stdout


def test_settings_of_the_network_reach_what_asks_the_hub_and_the_port_reaches_doctor(ordinary: Host) -> None:
    settings = {"HTTPS_PROXY": "http://proxy:1", "HF_ENDPOINT": "https://hub.example", "HF_HUB_DISABLE_XET": "1"}
    for command in (["fetch", "-r", "agent"], ["doctor"], ["up", "agent"]):
        assert ordinary.run(*command, **RELATIVE, **settings).returncode == 0
        file = "prepared.json" if command[0] == "up" else "run.json"
        started = json.loads((ordinary.folder / "state" / file).read_text())
        assert {*settings} <= {*started["options"]["--env"]} and "NO_PROXY" not in started["options"]["--env"]
        assert command[0] != "doctor" or started["words"][-2:] == ["--port", str(ordinary.port)]
    assert not {*settings} & {*ordinary.started()["options"]["--env"]}  # a server needs no network
    token = ordinary.home / "my-token"
    token.write_text("hf_secret")
    token.chmod(0o644)
    assert ordinary.run("fetch", "-r", "agent", **RELATIVE, HF_TOKEN_PATH="my-token").returncode == 0
    started = ordinary.started()
    assert {"source": str(token), "target": "/run/secrets/hf-token", "read_only": True} in started["mounts"]
    assert "HF_TOKEN_PATH=/run/secrets/hf-token" in started["options"]["--env"]
    assert "--port" not in printed("doctor", "--port", "1", PORT="2")[0][-1:]


def test_a_file_in_a_folders_place_is_one_message(ordinary: Host) -> None:
    (ordinary.home / "out").write_text("")
    done = ordinary.run("serve", "agent", **RELATIVE)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"docker-run.sh: {ordinary.home}/out is not a folder")


def test_a_message_in_the_container_names_the_hosts_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (variable,) = [word for word in printed("serve", "agent")[0] if word.startswith("KIMI_COMMAND=")]
    monkeypatch.setenv(*variable.split("=", 1))
    message = str(KimiError("it is not here", remedy="kimi-w4a8 fetch -r agent, or `kimi-w4a8 trust`"))
    assert f"to do:    {RUN} fetch -r agent, or `{RUN} trust`" in message
    assert "set MODELS or PORT=8000" in str(KimiError("no room", remedy="set HF_HOME or --port 8000"))


def test_a_service_has_a_key_of_its_user_and_up_waits_until_it_serves(caller: Host) -> None:
    done = caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE)
    assert (done.returncode, done.stderr) == (0, "")
    key = caller.home / "config/api-key"
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, caller.owner)
    assert re.fullmatch(r"[0-9a-f]{64}", key.read_text())
    ready = f"http://127.0.0.1:{caller.port + 1}/ready"
    address = f"address: http://{socket.gethostname()}:{caller.port}/v1"
    for line in ("3 of 3, code: accepted\n", address, f"key:     {key}", ready, "0 min: starting\nready\n"):
        assert line in done.stdout
    prepared = json.loads((caller.folder / "state/prepared.json").read_text())
    assert prepared["words"][1:] == ["prepare", "agent", "--set", f"port={caller.port}"]
    assert "--rm" in prepared["options"] and not any("secrets" in mount["target"] for mount in prepared["mounts"])
    started = caller.started()
    served = ["serve", "agent", "--set", "host=0.0.0.0", "--set", f"port={caller.port}"]
    assert started["words"] == ["kimi-w4a8-eagle3", *served]
    assert {"--detach", "--restart"} <= set(started["options"]) and "--rm" not in started["options"]
    mounts = {mount["target"]: mount for mount in started["mounts"]}
    assert mounts["/run/secrets/api_key_file"]["source"] == str(key)

    again = caller.run("up", "agent", "--listen", "0.0.0.0", **RELATIVE)
    assert again.returncode == 0 and "kimi-agent runs already; nothing was changed" in again.stdout
    assert "\nready\n" in again.stdout and not re.search(r"\b(rm|stop|kill)\b", again.stdout + again.stderr)
    elsewhere = caller.run("up", "agent", **{**RELATIVE, "PORT": str(caller.port + 10)})
    assert elsewhere.returncode == 1 and f"is there with port {caller.port}, not {caller.port + 10}" in elsewhere.stderr
    for typo in ({"API_KEY_FILE": "kye"}, {"RUNS": "ruins"}):
        assert caller.run("up", "agent", **{**RELATIVE, **typo}).returncode == 0
    assert caller.started() == started and not (caller.home / "ruins").exists()
    other = caller.run("up", "eagle3", **RELATIVE)
    assert other.returncode == 1 and f"port {caller.port + 1} is in use" in other.stderr

    before, (stop,) = key.read_text(), re.findall(r"^stop:    (.*)$", done.stdout, re.MULTILINE)
    assert caller.execute(["sh", "-c", stop]).returncode == 0
    assert caller.run("up", "agent", **RELATIVE).returncode == 0 and key.read_text() == before


def test_a_container_that_does_not_serve_is_named_and_left_alone(ordinary: Host) -> None:
    state = ordinary.folder / "state/kimi-agent"
    for status, said in (("running 1", "does not serve (running, restarts: 1)"), ("exited 0", "first run: docker rm")):
        state.write_text(f"{status} {ordinary.port}")
        state.chmod(0o644)  # the fake docker runs as another user
        done = ordinary.run("up", "agent", **RELATIVE, READY_TIMEOUT="0")
        assert done.returncode == 1 and said in done.stderr
        assert ordinary.made() == ["kimi-agent"]


def test_two_ups_do_not_work_beside_each_other(ordinary: Host) -> None:
    lock = os.open(ordinary.home, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = ordinary.run("up", "agent", **RELATIVE)
    os.close(lock)
    assert done.returncode == 1 and "another `up` runs here; nothing was changed" in done.stderr
    assert ordinary.made() == []


def test_up_starts_nothing_on_a_machine_that_is_not_prepared_and_goes_on_from_there(ordinary: Host) -> None:
    ordinary.lacking = "this machine cannot serve agent"
    done = ordinary.run("up", "agent", **RELATIVE)
    assert done.returncode == 1 and "this machine cannot serve agent" in done.stderr
    assert "kimi-agent" not in ordinary.made()
    ordinary.lacking = ""
    assert ordinary.run("up", "agent", "--trust", **RELATIVE).returncode == 0
    words = json.loads((ordinary.folder / "state/prepared.json").read_text())["words"]
    assert words[1:4] == ["prepare", "agent", "--trust"] and "kimi-agent" in ordinary.made()


@pytest.mark.parametrize(("listen", "shown"), [("::", "[::1]"), ("fd00::7", "[fd00::7]"), ("10.0.0.7", "10.0.0.7")])
def test_the_printed_address_can_be_used(ordinary: Host, listen: str, shown: str) -> None:
    done = ordinary.run("up", "agent", "--listen", listen, **RELATIVE)
    assert f"address: http://{shown}:{ordinary.port}/v1\n" in done.stdout
    assert f"host={listen}" in ordinary.started()["words"]


def test_up_ends_with_the_log_of_a_container_that_died(ordinary: Host) -> None:
    done = ordinary.run("up", "agent", **RELATIVE, FAKE_ENGINE="dies")
    assert done.returncode == 1 and "kimi-w4a8: the checkpoint is not here" in done.stderr
    assert "kimi-agent does not serve (ended and removed)" in done.stderr and "\nready\n" not in done.stdout
    assert "kimi-agent" not in ordinary.made()


def test_up_says_what_to_do_when_the_time_is_over(ordinary: Host) -> None:
    done = ordinary.run("up", "agent", **RELATIVE, READY_TIMEOUT="0")
    assert done.returncode == 1 and "the server is not ready after 0 s: starting" in done.stderr
    assert "does not serve (running, restarts: 0)" in done.stderr and "docker logs --follow kimi-agent" in done.stderr
    assert "kimi-agent" in ordinary.made()


def test_an_upgrade_by_tag_keeps_the_old_image_to_go_back_to(ordinary: Host) -> None:
    """Run the commands of docs/docker.md, but for the build."""
    section = (ROOT / "docs/docker.md").read_text().partition("\n## Upgrade and rollback\n")[2].partition("\n## ")[0]
    _, parsed, stop, doctor, up = re.findall(r"^    (\S.*)$", section, re.MULTILINE)

    def do(line: str, image: str = "kimi-w4a8-eagle3:NEW") -> subprocess.CompletedProcess[str]:
        line = line.replace("launch/docker-run.sh", shlex.quote(str(RUN))).replace("kimi-w4a8-eagle3:NEW", image)
        return ordinary.execute(["bash", "-ec", line], PORT=str(ordinary.port), DEV=f"{ordinary.folder}/dev")

    old = "kimi-w4a8-eagle3"
    assert do(up, old).returncode == 0 and ordinary.started()["words"][0] == old
    key = (ordinary.home / ".config/kimi-w4a8-eagle3/api-key").read_text()
    assert do(parsed).returncode == 0 and "kimi-agent" in ordinary.made()  # the old one serves meanwhile
    early = do(up)
    assert early.returncode == 0 and "nothing was changed" in early.stdout and ordinary.started()["words"][0] == old
    for image in ("kimi-w4a8-eagle3:NEW", old):
        assert do(stop).returncode == 0 and "kimi-agent" not in ordinary.made()
        do(doctor, image)
        missing = do(up, f"{old}:TYPO")
        assert missing.returncode == 1 and "kimi-agent" not in ordinary.made()
        done = do(up, image)
        assert done.returncode == 0 and done.stdout.endswith("ready\n"), done.stderr
        assert ordinary.started()["words"][0] == image
        assert (ordinary.home / ".config/kimi-w4a8-eagle3/api-key").read_text() == key
    assert not (ordinary.folder / "state/removed").exists()


def test_the_lines_that_undo_leave_nothing(caller: Host) -> None:
    """Run the commands of docs/first-hour.md, of root with /var/lib/kimi below the test's folder."""
    hub = caller.home / "models/hub" if caller.uid == 0 else caller.home / ".cache/huggingface/hub"
    folders = (
        {name: str(caller.home / name.lower()) for name in ("MODELS", "RUNS", "CONFIG")} if caller.uid == 0 else {}
    )
    assert caller.run("up", "agent", **folders).returncode == 0
    for checkpoint in load_recipe("agent").checkpoints:
        (hub / f"models--{checkpoint.repo.replace('/', '--')}").mkdir()
    shutil.copy(ROOT / "Dockerfile", caller.home)
    section = (ROOT / "docs/first-hour.md").read_text().partition("\n## How to undo it\n")[2]
    first, root = section.partition("If root ran the commands")[::2]
    lines = re.findall(r"^    (\S.*)$", first, re.MULTILINE)
    if caller.uid == 0:
        (whole,) = [line for line in re.findall(r"^    (\S.*)$", root, re.MULTILINE) if "with the weights" in line]
        lines = [line for line in lines if not line.startswith("rm ")]
        lines.append(whole.replace(" /var/lib/kimi", "".join(f" {folder}" for folder in folders.values())))
    assert caller.execute(["bash", "-ec", "\n".join(lines)]).returncode == 0
    left = [path for path in caller.home.rglob("*") if path.is_file() or path.name.startswith("models--")]
    assert sorted(path.name for path in left) == ["Dockerfile", "token"]
    assert "kimi-agent" not in caller.made() and "runs" not in caller.made()
    removed = (caller.folder / "state/removed").read_text()
    bases = re.findall(r"^ARG [A-Z]*_IMAGE=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(bases) == 2 and all(name in removed for name in ("kimi-w4a8-eagle3", *bases)) and "prune" in removed
