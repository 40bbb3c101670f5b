"""`kimi-w4a8 route` and `kimi-w4a8 serve --replicas` refuse wrong options before they start anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.machine.hardware import Machine

WORKER = ("--worker", "http://node1:9527")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "detect", classmethod(lambda cls: cls()))


def refusal(*arguments: str) -> KimiError:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, KimiError), result.output
    assert not list(Path().iterdir())  # no run folder of something that never ran
    return result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of --worker and --workers-dns"),
        ((*WORKER, "--workers-dns", "replicas:9527"), "give exactly one of --worker and --workers-dns"),
        (("--worker", "node1"), "cannot read the replica"),
        ((*WORKER, *WORKER), "twice"),
        ((*WORKER, "--set", "router.policy=random"), "--set needs a recipe"),
        ((*WORKER, "--recipe", "tny"), "did you mean 'tiny'"),
        ((*WORKER, "--port", "39527", "--ops-port", "39527"), "port 39527 is the API's, too\n  where:    --ops-port"),
        ((*WORKER, "--recipe", "tiny", "--set", "router.policy=fastest"), "router.policy"),
    ],
)
def test_route_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in str(refusal("route", *arguments))


@pytest.mark.parametrize("option", ["--port", "--ops-port"])
@pytest.mark.parametrize(
    "command", [("route", *WORKER), ("serve", "--recipe", "tiny", "--replicas", "2")], ids=lambda c: c[0]
)
def test_a_taken_port_is_named(command: tuple[str, ...], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = port if option == "--port" else free_port()  # the default one may be of a server that runs
        words = ("--set", f"port={own}") if command[0] == "serve" else ("--port", str(own))
        error = refusal(*command, *words, *((option, str(port)) if option == "--ops-port" else ()))
    assert str(port) in error.what
    assert option == "--port" or error.where == "--ops-port"


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_an_invalid_number_of_replicas_is_refused(count: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--recipe", "tiny", "--replicas", count])
    assert result.exit_code == 2 and "--replicas" in result.stderr
