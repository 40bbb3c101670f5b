"""A machine with a fake docker (`launch/fake_docker.py`) for the tests of launch/docker-run.sh."""

from __future__ import annotations

import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.commands import serve as serve_command
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.state import EngineState, Phase
from kimi_w4a8_eagle3.recipe.arguments import Args, require_parsed

LAUNCH = ROOT / "launch"
RUN = LAUNCH / "docker-run.sh"
FAKES = ROOT / "tests/launch"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
RELATIVE = {"MODELS": "models", "RUNS": "out", "CONFIG": "config"}


def own_groups() -> set[int]:
    return {os.getgid(), os.getegid(), *os.getgroups()}


def free_ports() -> int:
    """Return a port that is free together with the next one."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with suppress(OSError):
                other.bind(("127.0.0.1", port + 1))
                return int(port)


@dataclass
class Host:
    """A machine with two nodes, a fake docker, and a caller who is not root unless `uid` is 0."""

    folder: Path
    uid: int
    groups: list[int]
    port: int = field(default_factory=free_ports)
    endpoints: ExitStack = field(default_factory=ExitStack)
    lacking: str = ""  # what `prepare` misses

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def owner(self) -> int:
        """The user in the container."""
        return self.uid or 10001

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run docker-run.sh."""
        usual = {"PORT": str(self.port), "DEV": f"{self.folder}/dev"}
        return self.execute([str(RUN), *command], **{**usual, **environment})

    def execute(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        usual = {"PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(self.home)}
        root = os.geteuid() == 0
        return subprocess.run(
            command,
            env={**usual, "FAKE_DOCKER": f"{self.folder}/state", **environment},
            cwd=self.home,
            user=self.uid if root else None,
            group=self.groups[0] if root else None,
            extra_groups=self.groups[1:] if root else None,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def made(self) -> list[str]:
        """Return what lies in the home beside the cache, and the containers."""
        home = [path.name for path in self.home.iterdir() if path.name != ".cache"]
        return home + [path.name for path in (self.folder / "state").iterdir() if path.name != "daemon"]

    def started(self) -> dict[str, Any]:
        """Return the last arguments of the fake docker: options, mounts, words."""
        answer: dict[str, Any] = json.loads((self.folder / "state/run.json").read_text())
        return answer

    def can(self, how: str, path: str) -> bool:
        """True if the container's user has this right to a mounted file or folder; those above it do not matter."""
        found, bit = Path(path).stat(), {"r": 4, "w": 2}[how]
        shift = 6 if found.st_uid == self.owner else 3 if found.st_gid in (self.owner, *self.groups[1:]) else 0
        return bool(found.st_mode >> shift & bit)


_ACCEPTED: set[str] = set()  # arguments that SGLang's parser, whose import takes seconds, has accepted in this process


def _parse_once(args: Args) -> None:
    if repr(args) not in _ACCEPTED:
        require_parsed(args)
        _ACCEPTED.add(repr(args))


class Daemon(socketserver.UnixStreamServer):
    """The daemon of the fake docker, whose user may not be able to run our Python.

    It runs the image's `kimi-w4a8` commands, and the ops endpoint of an engine that starts.
    """

    def __init__(self, found: Host) -> None:
        super().__init__(str(found.folder / "state/daemon"), Request)
        self.found = found

    def command(self, words: list[str]) -> tuple[int, str, str]:
        if words[0] == "prepare" and self.found.lacking:
            return 1, "", f"kimi-w4a8: {self.found.lacking}\n"
        if words[0] == "prepare":  # tests/commands/test_prepare.py and test_way.py call the real one
            return 0, "3 of 3, code: accepted\n", ""
        done = CliRunner().invoke(app, words)
        if isinstance(done.exception, KimiError):
            return done.exception.exit_code, done.stdout, f"kimi-w4a8: {done.exception}\n"
        return done.exit_code, done.stdout, done.stderr

    def engine(self, started: dict[str, Any]) -> tuple[int, str, str]:
        """Start an ops endpoint that is ready a little later."""
        (url,) = [setting for setting in started["env"] if setting.startswith("HEALTHCHECK_URL=")]
        port = int(url.split(":")[-1].split("/")[0])
        state = EngineState("agent", "http://127.0.0.1:1", 300.0)
        self.found.endpoints.enter_context(OpsServer("127.0.0.1", port, state, sample_interval_s=3600))
        threading.Timer(1.0, state.enter, (Phase.READY,)).start()
        return 0, "", ""

    def stop(self, _: str) -> tuple[int, str, str]:
        self.found.endpoints.close()
        return 0, "", ""


class Request(socketserver.StreamRequestHandler):
    server: Daemon

    def handle(self) -> None:
        ((what, argument),) = json.loads(self.rfile.readline()).items()
        answer = getattr(self.server, what)(argument)
        self.wfile.write(json.dumps(answer).encode() + b"\n")


@contextmanager
def daemon(found: Host, kind: type[Daemon] = Daemon) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, kind(found) as server, found.endpoints:
        patch.setattr(serve_command, "require_parsed", _parse_once)
        (found.folder / "state/daemon").chmod(0o777)
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def host(uid: int, groups: list[int], kind: type[Daemon] = Daemon) -> Iterator[Host]:
    """Make a machine whose home and cache are 0700, as `hf auth login` makes them, without a checkout beside them."""
    root = os.geteuid() == 0
    umask = os.umask(0o022)  # the other user reads the nodes, also where the umask of the tests is 077
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their owner only
        folder = Path(name)
        folder.chmod(0o755)
        found = Host(folder, uid, groups)
        for path in ("dev/dri", "bin", "state", "home/.cache/huggingface"):
            (folder / path).mkdir(parents=True)
        (folder / "state").chmod(0o777)
        for node, group in (("kfd", 4444), ("dri/renderD128", 4445)):
            (folder / "dev" / node).touch()
            if root:
                os.chown(folder / "dev" / node, 0, group)
        shutil.copy(FAKES / "fake_docker.py", folder / "bin/docker")
        (folder / "bin/docker").chmod(0o755)
        (folder / "home/.cache/huggingface/token").write_text("hf_secret")
        for path in (found.home, found.home / ".cache", *(found.home / ".cache").rglob("*")):
            path.chmod(0o700)
            if root:
                os.chown(path, uid, groups[0])
        os.umask(umask)
        with daemon(found, kind):
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
