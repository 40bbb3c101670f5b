"""One real router for the tests of its replicas."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kimi_w4a8_eagle3.base.run_dir import EventLog
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.fleet.router import RouterEndpoint, router_process
from kimi_w4a8_eagle3.recipe.router_settings import RouterSettings


@pytest.fixture(scope="session")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterEndpoint]:
    endpoint = RouterEndpoint("127.0.0.1", free_port())
    settings = RouterSettings(policy="round_robin", health_check_interval_secs=1, health_check_timeout_secs=2)
    with router_process(endpoint, settings, tmp_path_factory.mktemp("router") / "router.log") as process:
        process.wait_ready(280)
        yield endpoint


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path, Console(file=io.StringIO()))
