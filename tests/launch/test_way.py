"""The way from nothing to a served token: docker-run.sh, a daemon that restarts, `serve tiny`, alerts on deaths."""

from __future__ import annotations

import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.docker_host import RELATIVE, ROOT, RUN, Daemon, host, own_groups
from support.hub_server import HubServer, Repo, serve
from support.prometheus import installed, prometheus
from support.waiting import until

from kimi_w4a8_laptop import tiny

KIMI = [sys.executable, "-m", "kimi_w4a8_eagle3.cli"]
README = (ROOT / "README.md").read_text().partition("\n## Run it on 8x MI325X\n")[2].partition("\n## ")[0]
MODEL = "org/kimi"
RESTARTS = 3  # as --restart on-failure:3


def settings(variables: list[str], mounts: list[dict[str, str]]) -> dict[str, str]:
    """Return a container's variables, with the host's paths of its mounts."""
    sources = {mount["target"]: mount["source"] for mount in mounts}
    pairs = (variable.partition("=") for variable in variables if "=" in variable)
    return {name: sources.get(value, value) for name, _, value in pairs}


class RestartingDaemon(socketserver.ThreadingMixIn, Daemon):
    """Runs the real commands as processes, and a container's again when it fails."""

    daemon_threads = True
    process: subprocess.Popen[bytes]
    stopping = True

    def command(self, words: list[str]) -> tuple[int, str, str]:
        environment: dict[str, str] = {**os.environ}
        if words[0] == "prepare":
            given = json.loads((self.found.folder / "state/prepared.json").read_text())
            environment |= settings(given["options"]["--env"], given["mounts"])
        done = subprocess.run(
            [*KIMI, *words], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200
        )
        return done.returncode, done.stdout, done.stderr

    def server_close(self) -> None:
        super().server_close()
        if not self.stopping:  # the test failed before its end
            self.stop("")

    def engine(self, started: dict[str, Any]) -> tuple[int, str, str]:
        self.environment = {**os.environ, **settings(started["env"], started["mounts"])}
        self.started, self.stopping = started, False
        self._start()
        threading.Thread(target=self._keep, daemon=True).start()
        return 0, "", ""

    def _start(self) -> None:
        with (self.found.folder / "container.log").open("ab") as log:
            words = [*KIMI, *self.started["command"]]
            self.process = subprocess.Popen(words, env=self.environment, cwd=self.found.home, stdout=log, stderr=log)
        type(self).process = self.process

    def _keep(self) -> None:
        for restarts in range(1, RESTARTS + 1):
            if self.process.wait() == 0 or self.stopping:
                return
            state: Path = self.found.folder / "state" / self.started["name"]
            state.write_text(f"running {restarts} {state.read_text().split()[-1]}")
            self._start()

    def stop(self, _: str) -> tuple[int, str, str]:
        self.stopping = True
        self.process.terminate()
        self.process.wait(timeout=60)
        return 0, "", ""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The built-in model as a repository of the Hub, with code that somebody must accept."""
    files = {path.name: path.read_bytes() for path in tiny.target_path().iterdir()}
    tokenizer = {**json.loads(files["tokenizer_config.json"]), "auto_map": {"AutoTokenizer": ["words.Words", None]}}
    files |= {"tokenizer_config.json": json.dumps(tokenizer).encode(), "words.py": b"class Words:\n    pass\n"}
    with serve({MODEL: Repo(files)}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_the_way_is_four_commands_and_at_most_three_questions() -> None:
    commands = re.findall(r"^    (git|docker|launch/\S+|curl) ", README, re.MULTILINE)
    assert commands == ["git", "docker", "launch/docker-run.sh", "curl", "docker"]  # the last one stops it
    sources = [path.read_text() for path in (RUN, ROOT / "kimi_w4a8_eagle3/commands/prepare.py")]
    asked = sum(len(re.findall(r"\bread -|typer\.(?:confirm|prompt)\(|\binput\(", text)) for text in sources)
    assert asked <= 3


@pytest.mark.server
@pytest.mark.slow
@installed
def test_one_command_serves_and_two_deaths_page_and_a_second_up_or_a_typo_changes_nothing(
    hub: HubServer, tmp_path: Path
) -> None:
    root = os.geteuid() == 0
    for node in host(0 if root else os.geteuid(), [0] if root else sorted(own_groups()), RestartingDaemon):
        words = ["--set", f"model.repo={MODEL}", "--served-model-name", "kimi-k2.5-tiny"]
        unread = node.run("up", "tiny", *words, **RELATIVE)
        assert unread.returncode == 1 and "were not accepted" in unread.stderr
        shown = re.sub(r".*\r", "", unread.stdout + unread.stderr)  # a terminal writes progress over itself
        assert "words.py" in shown and len((README + shown).split()) <= 600
        up = node.run("up", "tiny", "--trust", *words, **RELATIVE)
        assert (up.returncode, up.stderr) == (0, ""), up.stdout + up.stderr
        assert "1 of 3, machine: " in up.stdout and "is complete and verified" in up.stdout
        assert up.stdout.endswith("\nready\n") and len((README + up.stdout).split()) <= 600
        said = dict(re.findall(r"^(\w+): +(.*)$", up.stdout, re.MULTILINE))
        address = said["address"]
        question = {"model": "kimi-k2.5-tiny", "messages": [{"role": "user", "content": "What is 33 + 14?"}]}
        headers = {"Authorization": f"Bearer {Path(said['key']).read_text()}"}
        assert httpx.post(f"{address}/chat/completions", json=question, timeout=60).status_code == 401
        answer = httpx.post(f"{address}/chat/completions", json=question, headers=headers, timeout=60)
        assert "47" in answer.json()["choices"][0]["message"]["content"]

        with prometheus(f"http://127.0.0.1:{node.port + 1}", tmp_path) as watch:
            until(lambda: watch.query("kimi_engine_ready == 1"), 30)
            assert not watch.query('ALERTS{alertname=~"KimiEngine.*"}')
            family = psutil.Process(RestartingDaemon.process.pid).children(recursive=True)
            schedulers = [process for process in family if "scheduler" in " ".join(process.cmdline())]
            schedulers[0].send_signal(signal.SIGKILL)  # its supervisor starts it again
            until(lambda: watch.query("changes(kimi_engine_start_time_seconds[2h]) == 1"), 60)
            RestartingDaemon.process.send_signal(signal.SIGKILL)  # the daemon starts another, whose counters are 0
            until(lambda: watch.query("kimi:engine_restarts:2h == 2"), 60)

            pid = RestartingDaemon.process.pid
            for recipe, port in (("tny", node.port), ("tiny", node.port + 10)):
                assert node.run("up", recipe, **{**RELATIVE, "PORT": str(port)}).returncode == 1
            for typo in ({}, {"API_KEY_FILE": "kye"}):
                second = node.run("up", "tiny", **{**RELATIVE, **typo})
                assert second.returncode == 0 and "runs already; nothing was changed" in second.stdout
                assert not re.search(r"\b(rm|stop|kill)\b", second.stdout + second.stderr)
            assert RestartingDaemon.process.pid == pid and RestartingDaemon.process.poll() is None
            until(lambda: watch.query('ALERTS{alertname="KimiEngineRestarting", alertstate="firing"}'), 60)
        assert node.execute(["sh", "-c", said["stop"]]).returncode == 0
        until(lambda: RestartingDaemon.process.poll() is not None, 30)
