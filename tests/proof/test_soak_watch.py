"""Samples of a soak: real processes with known descriptors and threads, engines that answer or do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.waiting import until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import free_port
from proof.load.asgi import served_app
from proof.load.engine_loads import RUNNING, USED, WAITING
from proof.soak.processes import ProcessTree, serving_process
from proof.soak.watch import Watch

ENGINE = """
import subprocess, sys, threading, time
worker = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)",
                           "sglang::" + "scheduler"], stdout=subprocess.PIPE)
worker.stdout.readline()
files = [open("/dev/null") for _ in range(int(sys.argv[4]))]
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
worker.wait()
"""


@contextmanager
def engine(port: int, files: int) -> Iterator[psutil.Process]:
    """A process with a known number of open files and four threads, and a child that is called a scheduler."""
    argv = [sys.executable, "-c", ENGINE, "sglang.launch_server", "--port", str(port), str(files)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        try:
            yield family[0]
        finally:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=10)


def test_every_process_has_its_name_descriptors_threads_and_memory() -> None:
    with engine(4001, files=5) as few, engine(4002, files=25):
        tree = ProcessTree(psutil.Process(), {4001: "replica-0", 4002: "replica-1"})
        held = tree.held()
        names = {"replica-0 engine", "replica-0 scheduler", "replica-1 engine", "replica-1 scheduler", "supervisor"}
        assert names <= held.keys()
        assert held["replica-1 engine"].fds - held["replica-0 engine"].fds == 20
        assert held["replica-0 engine"].threads == 4
        assert 0 < held["replica-0 engine"].uss <= few.memory_info().rss
        assert held["replica-0 engine"].pid == few.pid
    gone = {"replica-0 engine", "replica-0 scheduler", "replica-1 engine", "replica-1 scheduler"}
    assert not gone & tree.held().keys()


class Fleet:
    """An ops endpoint and an engine in one server; tests may change `loads` while it runs."""

    def __init__(self) -> None:
        self.loads: list[dict[str, int]] | None = [
            {USED: 100, RUNNING: 2, WAITING: 1},
            {USED: 11, RUNNING: 0, WAITING: 0},
        ]

    @contextmanager
    def served(self) -> Iterator[str]:
        async def status(_: object) -> Response:
            return JSONResponse({"replicas": [{"name": "0", "base_url": url}]})

        async def loads(_: object) -> Response:
            return Response(status_code=500) if self.loads is None else JSONResponse({"loads": self.loads})

        with served_app(Starlette(routes=[Route("/status", status), Route("/v1/loads", loads)])) as url:
            yield url


def test_a_sample_has_what_the_engines_report_now_and_leaves_out_the_silent(tmp_path) -> None:
    fleet = Fleet()
    with fleet.served() as url, Watch(url, None, tmp_path / "samples.jsonl", every_s=0.05) as watch:
        assert watch.look().engines == {"replica-0": {USED: 111, RUNNING: 2, WAITING: 1}}
        fleet.loads = None
        assert watch.look().engines == {}
        until(lambda: len(watch.samples) >= 3)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(watch.samples) >= 3


def test_without_an_ops_endpoint_there_is_no_soak(tmp_path) -> None:
    with pytest.raises(KimiError, match="ops endpoint does not answer"):
        Watch(f"http://127.0.0.1:{free_port()}", None, tmp_path / "samples.jsonl")


def test_a_server_is_found_by_its_port() -> None:
    with Fleet().served() as url:
        found = serving_process(url)
        assert found is not None
        assert found.pid == psutil.Process().pid
    assert serving_process(f"http://127.0.0.1:{free_port()}") is None
