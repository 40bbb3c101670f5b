"""`kimi-w4a8 top` over a real ops endpoint: what its table says, and what it says of a wrong address."""

from __future__ import annotations

import io

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from rich.console import Console
from support.fleet_views import HandmadeFleet, replica
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.replica_state import Phase
from kimi_w4a8_eagle3.ops.top import Scrape, table


def cells(before: Scrape, now: Scrape) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200)
    console.print(table(before, now))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def scrape(at: float, decoded: int, cached: int, computed: int, length: float | None = None) -> Scrape:
    tokens = {"decode": decoded, "prefill_cache": cached, "prefill_compute": computed}
    text = "".join(f'sglang:realtime_tokens_total{{mode="{m}",replica="a"}} {n}\n' for m, n in tokens.items())
    text += 'sglang:num_running_reqs{replica="a"} 4\nsglang:num_queue_reqs{replica="a"} 1\n'
    text += 'sglang:token_usage{replica="a",tp_rank="0"} 0.25\nsglang:token_usage{replica="a",tp_rank="1"} 0.5\n'
    state = {"name": "a", "phase": "ready", "ready": True, "reason": ""}
    return Scrape(at, [{**state, "acceptance": length and {"length": length}}], Reading.parse(text))


def test_rates_are_those_between_two_looks() -> None:
    found = cells(scrape(10.0, 100, 10, 50), scrape(12.0, 160, 40, 60, length=3.31))
    assert found == [["a", "ready", "4 / 1", "50.0%", "30", "75.0%", "3.31"]]


def test_an_engine_that_was_restarted_counts_from_zero() -> None:
    assert cells(scrape(10.0, 100, 0, 50), scrape(12.0, 60, 0, 0)) == [["a", "ready", "4 / 1", "50.0%", "30", "-", "-"]]


def test_the_command_reads_an_ops_endpoint() -> None:
    registry, port = CollectorRegistry(), free_port()
    Gauge("sglang:num_running_reqs", "Running.", registry=registry).set(2)
    Counter("sglang:realtime_tokens", "Tokens.", ["mode"], registry=registry).labels("decode").inc(5)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    fleet = HandmadeFleet(
        [replica("0", f"http://127.0.0.1:{port}"), replica("1", "http://127.0.0.1:9", Phase.DOWN, "it went away")]
    )
    try:
        with OpsServer("127.0.0.1", free_port(), fleet) as ops:
            done = CliRunner().invoke(app, ["top", ops.base_url, "--once", "--interval", "0.1"])
    finally:
        server.shutdown()
        thread.join()
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.output.splitlines() if "|" in line]
    assert ["0", "ready", "2 / 0", "0.0%", "0", "-", "-"] in rows and ["1", "down", *"-----"] in rows
    assert "1: it went away" in done.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[::"])
def test_a_wrong_address_is_one_message(url: str) -> None:
    done = CliRunner().invoke(app, ["top", url, "--once"])
    assert isinstance(done.exception, KimiError) and "no ops endpoint answers" in done.exception.what
