from __future__ import annotations

import http.server
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RUN = ROOT / "launch/docker-run.sh"


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
        ("--volume", "/data/models:/models:ro"),
        ("--volume", "/data/my runs:/runs"),
        ("--name", "k"),
    ]:
        assert pair in pairs
    assert words[-4:] == ["kimi-w4a8-eagle3", "serve", "--recipe", "eagle3-opt"]


def test_nothing_of_the_image_can_be_written_and_no_capability_is_left() -> None:
    words = shlex.split(docker_run("--print", "serve", CONFIG="/c").stdout)
    pairs = set(itertools.pairwise(words))
    assert "--read-only" in words and "--cap-add" not in words
    assert {("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges:true"), ("--volume", "/c:/trust:ro")} <= pairs
    (tmpfs,) = [after for word, after in pairs if word == "--tmpfs"]
    assert tmpfs.startswith("/tmp:") and "exec" in tmpfs.split(":")[1].split(",")  # docker's default is noexec


def test_the_check_of_the_read_only_root_has_the_containers_writable_places() -> None:
    words = shlex.split(docker_run("--print", "serve").stdout)
    volumes = {inside_volume(after) for word, after in itertools.pairwise(words) if word == "--volume"}
    script = (ROOT / "launch/check-readonly.sh").read_text()
    for volume in volumes:
        inside, _, mode = volume.partition(":")
        bind = "--ro-bind" if mode == "ro" else "--bind"
        assert re.search(rf'(?<![\w-]){bind} "\$base/\w+" {inside}\s', script), volume
    written = set(re.findall(r'(?<![\w-])--bind "\$base/\w+" (\S+)', script))
    assert written == {volume for volume in volumes if not volume.endswith(":ro")}


def test_fetch_and_trust_may_write_what_serve_only_reads_and_need_no_gpu() -> None:
    for command in ("fetch", "trust"):
        words = shlex.split(docker_run("--print", command, MODELS="/m", CONFIG="/c").stdout)
        assert "/m:/models" in words and "/c:/trust" in words and "--device" not in words


def test_keys_come_as_files() -> None:
    words = shlex.split(docker_run("--print", "serve", API_KEY_FILE="/k/api", ADMIN_KEY_FILE="/k/admin").stdout)
    pairs = set(itertools.pairwise(words))
    for host, inside, name in [
        ("/k/api", "/run/secrets/kimi-api-key", "KIMI_API_KEY_FILE"),
        ("/k/admin", "/run/secrets/kimi-admin-key", "KIMI_ADMIN_KEY_FILE"),
    ]:
        assert {("--volume", f"{host}:{inside}:ro"), ("--env", f"{name}={inside}")} <= pairs
    assert "KIMI_API_KEY_FILE" not in docker_run("--print", "serve").stdout


def own_groups() -> set[int]:
    return {os.getgid(), os.getegid(), *os.getgroups()}


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


@dataclass
class Ordinary:
    """A user without root's rights, at a machine with two nodes and a `docker` that writes down how it was called."""

    folder: Path
    uid: int
    groups: list[int]

    @property
    def called(self) -> list[str]:
        return (self.folder / "home/called").read_text().splitlines()

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        usual = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": f"{self.folder}/home", "DEV": f"{self.folder}/dev"}
        root = os.geteuid() == 0
        return subprocess.run(
            [self.folder / "docker-run.sh", *command],
            env={**usual, "RUNS": f"{self.folder}/home/runs", **environment},
            cwd=self.folder,
            user=self.uid if root else None,
            group=self.groups[0] if root else None,
            extra_groups=self.groups[1:] if root else None,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def ordinary() -> Iterator[Ordinary]:
    """As root another user, as anybody else oneself. The home is 0700, as is the cache that `hf auth login` makes."""
    root = os.geteuid() == 0
    umask = os.umask(0o022)  # the other user reads the nodes, also where the umask of the tests is 077
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their owner only
        folder = Path(name)
        folder.chmod(0o755)
        user = Ordinary(folder, 4242 if root else os.geteuid(), [4242, 4343] if root else sorted(own_groups()))
        shutil.copy(RUN, folder)
        for path in (folder / "dev/dri", folder / "bin", folder / "home/.cache/huggingface"):
            path.mkdir(parents=True)
        for node, group in (("kfd", 4444), ("dri/renderD128", 4445)):
            (folder / "dev" / node).touch()
            if root:
                os.chown(folder / "dev" / node, 0, group)
        program = folder / "bin/docker"
        program.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = image ]; then echo sha256:0123456789abcdef; exit; fi\n'
            f'printf "%s\\n" "$@" > {folder}/home/called\n'
        )
        program.chmod(0o755)
        for path in (folder / "home", folder / "home/.cache", folder / "home/.cache/huggingface"):
            path.chmod(0o700)
            if root:
                os.chown(path, user.uid, user.groups[0])
        os.umask(umask)
        yield user


def test_an_ordinary_user_serves_at_the_first_try(ordinary: Ordinary) -> None:
    done = ordinary.run("serve", "--recipe", "eagle3-opt")
    assert (done.returncode, done.stderr) == (0, "")
    pairs = list(itertools.pairwise(ordinary.called))
    assert ("--user", f"{ordinary.uid}:{os.getegid() if os.geteuid() else 4242}") in pairs
    nodes = [ordinary.folder / "dev" / node for node in ("kfd", "dri/renderD128")]
    groups = {int(after) for word, after in pairs if word == "--group-add"}
    assert groups == {*ordinary.groups, *(node.stat().st_gid for node in nodes)}
    volumes = {after for word, after in pairs if word == "--volume"}
    home = ordinary.folder / "home"
    assert f"{home}/.cache/huggingface:/models:ro" in volumes
    assert f"{home}/runs/home-0123456789ab:/home/kimi" in volumes
    assert (home / "runs/home-0123456789ab").stat().st_uid == ordinary.uid


@pytest.mark.skipif(os.geteuid() != 0, reason="does what sudo would do")
def test_whatever_is_missing_comes_in_one_message_with_one_command(ordinary: Ordinary) -> None:
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
    assert ordinary.called[0] == "run"


def test_without_the_driver_nothing_is_started(ordinary: Ordinary) -> None:
    result = ordinary.run("doctor", DEV=f"{ordinary.folder}/none")
    assert result.returncode == 1
    assert "kfd is missing" in result.stderr and "first run: sudo modprobe amdgpu" in result.stderr
    assert sorted(path.name for path in (ordinary.folder / "home").iterdir()) == [".cache"]


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
def test_what_docker_refuses_has_a_command(ordinary: Ordinary, says: str, command: str) -> None:
    program = ordinary.folder / "bin/docker"
    program.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit 1\n')
    result = ordinary.run("serve")
    assert result.returncode == 1 and f"first run: {command}" in result.stderr


def test_the_script_has_no_shell_error() -> None:
    for script in [
        "launch/docker-run.sh",
        "launch/check-dockerfile.sh",
        "launch/check-readonly.sh",
        ".ci/run",
        "requirements/audit.sh",
        "requirements/install.sh",
        "requirements/lock-docker.sh",
    ]:
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        assert os.access(ROOT / script, os.X_OK)


def inside_volume(volume: str) -> str:
    """`HOST:INSIDE[:ro]` -> `INSIDE[:ro]`; the host's part has a colon of its own in `${NAME:-default}`."""
    return volume[volume.index(":/") + 1 :]


def test_compose_agrees_with_the_docker_line() -> None:
    compose = yaml.safe_load((ROOT / "launch/compose.yaml").read_text())
    (service,) = compose["services"].values()
    words = shlex.split(docker_run("--print", "serve").stdout)
    pairs = set(itertools.pairwise(words))
    for device in service["devices"]:
        assert ("--device", device) in pairs
    for name, value in service["ulimits"].items():
        assert ("--ulimit", f"{name}={value}") in pairs
    assert ("--ipc", service["ipc"]) in pairs
    assert ("--network", service["network_mode"]) in pairs
    assert service["read_only"] and "--read-only" in words
    for option, key in (("--cap-drop", "cap_drop"), ("--security-opt", "security_opt"), ("--tmpfs", "tmpfs")):
        assert {after for word, after in pairs if word == option} == set(service[key])
    assert {inside_volume(volume) for volume in service["volumes"]} == {
        inside_volume(after) for word, after in pairs if word == "--volume"
    }
    assert service["command"][:2] == ["serve", "--recipe"]
    named = {volume.partition(":-")[2].partition("}")[0] or volume.partition(":")[0] for volume in service["volumes"]}
    assert named == set(compose["volumes"])


def test_compose_builds_the_dockerfiles_default_base() -> None:
    compose = yaml.safe_load((ROOT / "launch/compose.yaml").read_text())
    base = compose["services"]["serve"]["build"]["args"]["BASE_IMAGE"]
    default = next(
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("ARG BASE_IMAGE=")
    )
    assert base == f"${{BASE_IMAGE:-{default.partition('=')[2]}}}"


UNIT = ROOT / "launch/systemd/kimi@.service"


def unit_settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_and_stops_one_named_container() -> None:
    settings = unit_settings()
    (start,) = settings["ExecStart"]
    assert start.endswith("/launch/docker-run.sh serve --recipe %i")
    assert "NAME=kimi-%i" in settings["Environment"]
    assert settings["ExecStop"][0].endswith("kimi-%i")
    assert settings["Restart"] == ["on-failure"]
    assert int(settings["TimeoutStopSec"][0]) > int(settings["ExecStop"][0].split("--time ")[1].split()[0])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
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
    copy = tmp_path / "kimi@eagle3-opt.service"
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


def run_script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "launch/docker" / name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_healthcheck(status: int, code: int) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/live"
        assert run_script("healthcheck.py", HEALTHCHECK_URL=url).returncode == code
        server.shutdown()
    result = run_script("healthcheck.py", HEALTHCHECK_URL=url)  # nobody listens any more
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def distribution(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: more"]
    (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")


def test_check_closure(tmp_path: Path) -> None:
    distribution(tmp_path, "top", "1.0", "middle>=2", 'absent; extra == "more"', 'other; python_version < "3"')
    distribution(tmp_path, "middle", "2.1", "leaf<1")
    distribution(tmp_path, "leaf", "0.9")
    good = run_script("check_closure.py", "top", PYTHONPATH=str(tmp_path))
    assert good.returncode == 0, good.stdout
    more = run_script("check_closure.py", "top[more]", PYTHONPATH=str(tmp_path))
    assert more.returncode == 1
    assert "absent" in more.stdout
    shutil.rmtree(tmp_path / "leaf-0.9.dist-info")
    distribution(tmp_path, "leaf", "1.5")
    old = run_script("check_closure.py", "top", PYTHONPATH=str(tmp_path))
    assert old.returncode == 1
    assert "leaf<1 (for middle), but 1.5 is installed" in old.stdout


def test_the_entry_point_that_sglang_reads() -> None:
    names = {entry.name: entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")}
    assert names["kimi_w4a8_eagle3"] == "kimi_w4a8_eagle3.sglang_plugin:register"
