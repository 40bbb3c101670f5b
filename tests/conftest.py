"""Settings of the whole suite: deterministic property tests, one thread for small tensors, no silent skips."""

import atexit
import fcntl
import gc
import os
import shutil
import ssl
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# A test module sets it, as an engine on a CPU does; so all engines and programs of a worker share one fork server.
os.environ.setdefault("SGLANG_ENABLE_TORCH_INFERENCE_MODE", "1")
# Hundreds of processes import the same modules, SGLang's too: one compiles them for all, whatever this shell says.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# What compilers and libraries keep for the next run stays in the checkout, not in the user's home and /tmp.
if os.access(Path(__file__).parents[1], os.W_OK):
    _CACHES = Path(__file__).parents[1] / "build" / "caches"
    _HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for _name, _folder in (("UV_CACHE_DIR", _HOME / "uv"), ("PIP_CACHE_DIR", _HOME / "pip")):  # downloads
        os.environ.setdefault(_name, str(_folder))
    os.environ["XDG_CACHE_HOME"] = str(_CACHES)
    for _name in ("MPLCONFIGDIR", "SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TVM_FFI_CACHE_DIR"):
        os.environ[_name] = str(_CACHES / _name.lower())
# Servers of tests are on this machine, also where there is a proxy, and tables are as wide as a log.
os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy"), "127.0.0.1", "localhost")))
os.environ["NO_PROXY"] = os.environ["no_proxy"]
os.environ.pop("COLUMNS", None)
# Programs of `support` run as forks, all of the same fork server.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))

import httpx
import pytest
from hypothesis import HealthCheck, settings
from support.optional_parts import missing_part
from support.prometheus import NEEDS_PROMETHEUS
from support.tiny_servers import at_gpu, started, tiny_launch

from kimi_w4a8_eagle3.base.collection import VARIABLE, Consent
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.leftovers import remove_orphans
from kimi_w4a8_lab.accuracy.tokens import TokenClient

sys.dont_write_bytecode = False  # of this process
ssl.create_default_context = cache(ssl.create_default_context)  # httpx reads certificates for 30 ms, over HTTP too
# A request without a time limit of its own may take as long as a busy machine needs, not 5 s.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(dict.fromkeys(("connect", "read", "write", "pool"), 280.0))
gc.disable()  # until all is collected: modules are no garbage, and each worker imports all of them

# Speed is measured in benchmarks: a slow machine must not fail a property.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# One worker each: both releases of SGLang and Quark take seconds to import, and the engines of a worker share a fork
# server, whose start imports SGLang. What is not listed shares a worker with its folder, if that has fixtures.
TOGETHER = {
    "SGLang": (
        "tests/sglang_plugin/",
        "tests/laptop/",
        "tests/quark/test_checkpoints_are_data.py",
        "tests/predict/",
        "tests/speed/",
        "tests/commands/test_rules.py",
        "tests/gateway/test_costly_grammars.py",
        "tests/e2e/test_newest_release.py",
        "tests/recipe/test_recipes_parsed_by_sglang.py",
    ),
    "engines": (
        "tests/e2e/test_failing_requests.py",
        "tests/e2e/test_fork_server.py",
        "tests/e2e/test_serve_processes.py",
    ),
    # test_accept needs no engine of `tests/e2e`, whose modules are the longest group without it.
    "Quark": (
        "tests/quantize/",
        "tests/quark/",
        "tests/e2e/test_low_precision.py",
        "tests/e2e/test_accept.py",
        "tests/proof/test_account.py",
    ),
}
# Modules of 15 s of a core and more: begun last, one of them would run alone at the end.
LONG = (
    "tests/commands/test_missing_packages.py",
    "tests/environment/",
    "tests/launch/test_docker_",
    "tests/moe/flydsl/",
    "tests/moe/triton/",
)
LOCK = pytest.StashKey[IO[str]]()  # of the run's folder
_BEGUN = set[Path]()  # modules of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones begin first: those that one worker must run after each other, then those with a real server."""

    def order(item: pytest.Item) -> tuple[bool, bool, bool]:
        alone = item.get_closest_marker("server") is None
        return _together(item.nodeid) != "SGLang", alone, not item.nodeid.startswith(LONG)

    items.sort(key=order)


def _together(nodeid: str) -> str | None:
    return next((name for name, modules in TOGETHER.items() if nodeid.startswith(modules)), None)


def pytest_collection_finish() -> None:
    """From here on there is garbage, but none among the modules."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Nor is what earlier modules left: hypothesis walks all that is not frozen, in every thread."""
    if item.path not in _BEGUN:
        gc.freeze()
        _BEGUN.add(item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the run one folder for temporary files of all programs, with a short name because of the sockets in it.

    It is locked until the run ends, so that the next run of this checkout can remove what a killed or failed one left.
    A worker ends without freeing its objects: that takes seconds, after the last of its results was sent.
    """
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    elif config.option.basetemp is None:
        prefix = f"t-{zlib.crc32(bytes(config.rootpath)):x}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError), (left / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=prefix)
        config.stash[LOCK] = (Path(tempfile.tempdir) / "lock").open("w")
        fcntl.flock(config.stash[LOCK], fcntl.LOCK_EX)
        Path(tempfile.tempdir).chmod(0o711)  # as root, tests start programs of other users
        config.option.basetemp = f"{tempfile.tempdir}/p"


def _folder(config: pytest.Config) -> Path | None:
    """Return the run's folder, None in a worker and where the command line names one."""
    folder = Path(config.option.basetemp).parent
    return folder if str(folder) == tempfile.tempdir and not hasattr(config, "workerinput") else None


def pytest_unconfigure() -> None:
    """Python frees nothing that is frozen when it ends, so nanobind would report all of Triton as leaked."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The modules of a folder with fixtures of its own go to one worker, which makes servers and long runs once."""
    from xdist.scheduler import LoadScopeScheduling

    class FixturesOnce(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            folder = module.rpartition("/")[0]
            if together := _together(nodeid):
                return together
            return folder if (config.rootpath / folder / "conftest.py").is_file() else module

    return FixturesOnce(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tensors that a test draws are the same whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that cannot be imported because an optional part is missing is skipped; it is no error."""
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo and (missing := missing_part(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {missing}")
    return report


def _skipped(reporter: pytest.TerminalReporter, about: str) -> list[Any]:
    """Skipped tests and modules; `about` is a keyword of the test, or stands in the reason."""
    skipped = reporter.stats.get("skipped", [])
    return [r for r in skipped if about in getattr(r, "keywords", {}) or about in str(r.longrepr[-1])]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"} and (folder := _folder(terminalreporter.config)):
        terminalreporter.line(f"temporary files of this run: {folder}")
    for report in _skipped(terminalreporter, NEEDS_PROMETHEUS):  # one line for the tests of all modules
        report.longrepr = (str(Path(__file__).parent), None, NEEDS_PROMETHEUS)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped kernel test is a failure, and so is a module whose optional part is missing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        os.environ.get("CI")
        and reporter is not None
        and (_skipped(reporter, "kernels") or _skipped(reporter, "is not installed (extra"))
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    remove_orphans()  # of the engines that tests killed
    if (folder := _folder(session.config)) and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedEngine]:
    """The built-in model with EAGLE3 in real SGLang, one for the whole run; idle, it uses no processor time.

    It may collect requests, and does so only where a test consents.
    """
    folder = tmp_path_factory.mktemp("eagle3")
    (folder / "collected").mkdir(mode=0o700)
    Consent().write(folder / "collected")
    yield from started(tiny_launch(settings=(*at_gpu(0), f"env.{VARIABLE}={folder / 'collected'}")), folder)


@pytest.fixture
def client(eagle3: FrontedEngine) -> Iterator[TokenClient]:
    """A client of that server's engine."""
    with TokenClient(*eagle3.address) as made:
        yield made
