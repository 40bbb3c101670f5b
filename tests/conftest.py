"""Settings of the whole suite: deterministic property tests, one thread for small tensors, no silent skips."""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
from hypothesis import HealthCheck, settings
from support.tiny_servers import started, tiny_launch

from kimi_w4a8_eagle3.client import EngineClient
from kimi_w4a8_eagle3.server import EngineServer

# Speed is measured in benchmarks: a slow machine must not fail a property.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# They start engines of their own and share none, so either worker may take them.
OWN_SERVERS = (
    "tests/e2e/test_faults.py",
    "tests/e2e/test_fork_server.py",
    "tests/e2e/test_serve_processes.py",
    "tests/e2e/test_two_ranks.py",
)
_NEEDS = "lld-19 (Debian package) and the extra `kernels`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests, those with a real server, begin first."""
    items.sort(key=lambda item: item.get_closest_marker("server") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The modules of a folder with fixtures of its own go to one worker, which makes servers and long runs once."""
    from xdist.scheduler import LoadScopeScheduling

    class FixturesOnce(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            folder = module.rpartition("/")[0]
            shares = (config.rootpath / folder / "conftest.py").is_file() and module not in OWN_SERVERS
            return folder if shares else module

    return FixturesOnce(config, log)


def _skipped_kernel_tests(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    return [report for report in reporter.stats.get("skipped", []) if "kernels" in getattr(report, "keywords", {})]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that kernel tests were skipped: without them the machine code is unproved."""
    skipped = _skipped_kernel_tests(terminalreporter)
    if skipped:
        terminalreporter.section("kernels not tested")
        terminalreporter.line(f"{len(skipped)} kernel tests were skipped; they need {_NEEDS}.")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped kernel test is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and _skipped_kernel_tests(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The built-in model with EAGLE3 in real SGLang, one for the whole run; idle, it uses no processor time."""
    yield from started(tiny_launch(), tmp_path_factory.mktemp("eagle3"))


@pytest.fixture
def client(eagle3: EngineServer) -> Iterator[EngineClient]:
    """A client of that server."""
    with EngineClient(eagle3.base_url) as made:
        yield made
