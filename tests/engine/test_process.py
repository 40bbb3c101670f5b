"""The engine process: it becomes ready, fails with its log, and leaves no process behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port

# A server like the real one in what matters here: it spawns a child in its own way, then answers /health.
SERVING = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={detached})
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(tmp_path: Path, program: str, port: int | None = None) -> EngineServer:
    port = free_port() if port is None else port
    argv = [sys.executable, "-c", textwrap.dedent(program), str(port)]
    return EngineServer(argv, {}, "127.0.0.1", port, tmp_path / "server.log", name="test server")


def child_of(log: Path) -> int:
    return int(log.read_text().split()[1])


def gone(pid: int) -> bool:
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


@pytest.mark.parametrize("detached", [False, True])
def test_stop_ends_the_process_and_its_children(tmp_path, detached):
    with server(tmp_path, SERVING.format(detached=detached)) as running:
        running.wait_ready(280)
        child = child_of(running.log_path)
        assert psutil.pid_exists(child)
        assert running.log_path.stat().st_mode & 0o777 == 0o600  # it may hold prompts
    assert gone(running.pid)
    assert gone(child)


def test_children_of_a_crashed_engine_are_ended(tmp_path):
    running = server(tmp_path, SERVING.format(detached=True))
    running.start()
    running.wait_ready(280)
    child = child_of(running.log_path)
    running._children[child] = before = psutil.Process(child)
    before._ident = (child, 0.0)  # a helper that has ended, and whose number the system gave to another child
    running.poll()
    os.kill(running.pid, signal.SIGKILL)
    assert gone(running.pid)
    while running.poll() is None:  # a zombie has an exit code once its last thread has ended
        time.sleep(0.01)
    assert running.poll() == -signal.SIGKILL
    running.stop()
    assert gone(child)


def test_an_engine_that_ends_early_shows_the_end_of_its_log(tmp_path):
    running = server(tmp_path, "import sys; print('loading'); sys.exit('no such weight: layer 3')")
    running.start()
    with pytest.raises(KimiError, match=r"exit code 1 .*(\n.*)*no such weight: layer 3") as caught:
        running.wait_ready(280)
    assert caught.value.where == str(running.log_path)


def test_an_engine_that_never_answers_is_stopped(tmp_path):
    running = server(tmp_path, "import time; time.sleep(600)")
    running.start()
    with pytest.raises(KimiError, match="not ready within"):
        running.wait_ready(0.5)
    assert gone(running.pid)


def test_the_engine_ends_when_its_starter_is_killed(tmp_path):
    starter = f"""
    import sys, time
    from pathlib import Path
    from kimi_w4a8_eagle3.engine.process import EngineServer
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    s = EngineServer(sleep, {{}}, "127.0.0.1", {free_port()}, Path({str(tmp_path / "log")!r}))
    s.start(); print(s.pid, flush=True); time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(starter)], stdout=subprocess.PIPE, text=True
    ) as starting:
        assert starting.stdout is not None
        engine = int(starting.stdout.readline())
        starting.kill()
    assert gone(engine)


def test_a_taken_port_is_named_with_its_owner(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = psutil.net_connections(kind="tcp")
        ours = next(one for one in found if one.laddr[1:2] == (port,) and one.pid == os.getpid())
        other = ours._replace(laddr=type(ours.laddr)("127.0.0.2", port), pid=os.getppid())  # listed first
        monkeypatch.setattr(psutil, "net_connections", lambda kind: [other, *found])
        with pytest.raises(KimiError, match=rf"port {port} .*process {os.getpid()}"):
            server(tmp_path, "pass", port).start()


def test_a_missing_program_is_one_message(tmp_path):
    running = EngineServer(["/no/such/program"], {}, "127.0.0.1", free_port(), tmp_path / "log")
    with pytest.raises(KimiError, match="could not be started"):
        running.start()
