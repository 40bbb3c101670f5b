"""Run one engine, or several behind the router, in the foreground for `kimi-w4a8 serve` and `kimi-w4a8 route`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import constants
from rich.console import Console

from ..base.errors import KimiError
from ..base.extras import require
from ..base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from ..base.signals import Terminated, signals_raise
from ..engine.client import EngineClient
from ..engine.process import require_free_port
from ..fetch.trusted_code import locate, require_trusted
from ..ops.canary import CanaryWatch
from ..ops.replica_state import FleetView, Phase, ReplicaState
from ..recipe.launch import Launch
from ..recipe.router_settings import RouterSettings
from ..recipe.schema import Options
from .events import EventLog
from .identity import fingerprint
from .registrar import Registrar
from .replica import DRAIN_TIMEOUT_S, READY_TIMEOUT_S, Replica, engine, with_weight_version
from .router import RouterEndpoint, router_endpoint
from .supervisor import Fleet, RouterKeeper

__all__ = ["READY_TIMEOUT_S", "ServeOptions", "Terminated", "engine", "serve_foreground", "signals_raise"]


@dataclass(frozen=True)
class ServeOptions:
    """Options of `kimi-w4a8 serve` and `kimi-w4a8 route` that are not part of a recipe.

    ops_port: port of probes and metrics; None switches them off. keys: variables that tell the engines where the
    clients' key is, never the key itself. preflight: refuse a faulty checkpoint.
    """

    ops_host: str = "127.0.0.1"
    ops_port: int | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    keys: dict[str, str] = field(default_factory=dict)
    client_key: str | None = field(default=None, repr=False)
    runs: Path = DEFAULT_ROOT
    preflight: bool = True


@dataclass(frozen=True)
class SingleServer:
    """View of one engine without a router, for probes and metrics."""

    recipe: str
    state: ReplicaState
    router_url: str | None = None
    router_metrics_url: str | None = None

    def replicas(self) -> Sequence[ReplicaState]:
        return [self.state]

    def live(self) -> tuple[bool, str]:
        """Return False when the engine is gone. A stalled one may recover until the watchdog ends it."""
        return self.state.phase is not Phase.DOWN, self.state.reason


def checked(launch: Launch, preflight: bool = True) -> Launch:
    """Check everything that files show before a start (code, headers, configs, identity) and return the final launch.

    Raises KimiError for a known fault, for a checkpoint's untrusted code (`trusted_code`) and for an incomplete W4A8
    checkpoint on this disk (`preflight`). The engine gets the fingerprint of its weights, which it reports in every
    answer.
    """
    launch = _allowed(launch)
    return with_weight_version(launch, checked_weights(launch, preflight))


def _allowed(launch: Launch) -> Launch:
    """Return the launch; raise KimiError without SGLang, for a known fault, and for untrusted code."""
    if launch.engine == "sglang":
        require("sglang")
    for fault in launch.refused:
        raise KimiError(
            fault.sentence,
            where=f"the known fault {fault.id}",
            remedy=f"{fault.remedy}; or take the risk: --set 'options.accept_faults=[\"{fault.id}\"]'",
        )
    return require_trusted(launch)


def checked_weights(launch: Launch, preflight: bool = True) -> str | None:
    """Check the launch's checkpoints and return their fingerprint; None when they are not on this disk yet."""
    if launch.engine != "sglang":
        return None
    from ..quark import preflight as checks  # start-up: imports torch, needed only for checkpoints on this disk

    model = _folder(launch, launch.model, "revision")
    draft = _folder(launch, launch.draft, "speculative-draft-model-revision")
    if model is not None and preflight:
        checks.preflight(model, draft, launch.tensor_parallel).raise_for_problems()
    if model is None or (launch.draft is not None and draft is None):
        return None
    return fingerprint(*(folder for folder in (model, draft) if folder is not None))


def serve_foreground(launch: Launch, options: ServeOptions) -> int:
    """Serve one engine until it ends or a signal arrives; return the exit code of `kimi-w4a8 serve`.

    Leaves no process behind, however it ends, and prints where the log is.
    """
    console = Console(stderr=True, highlight=False)
    notes = launch.notes
    launch = checked(launch, options.preflight)
    for note in launch.notes[len(notes) :]:
        console.print(f"kimi-w4a8: {note}", style="dim")
    _require_ops_port(options)
    folder = _new_run("serve", launch, [launch], options.runs)
    log = folder / "server.log"
    log.touch()
    console.print(f"kimi-w4a8: log of the engine: {log}")
    events = EventLog(folder, console)
    replica = Replica(
        _with_keys(launch, options), log, events, "0", options.drain_timeout_s, options.client_key, launch.name
    )
    try:
        with signals_raise(drain=True), _ops(options, SingleServer(launch.name, replica.state)), follow(log):
            replica.serve()
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; the engine was stopped; log: {log}")
        return stopped.exit_code
    return 0


def serve_fleet(launches: Sequence[Launch], front: Launch, router: RouterSettings, options: ServeOptions) -> int:
    """Serve engines on loopback behind the router, which listens at `front`'s address; return the exit code.

    A replica that ends or stalls is restarted, and so is the router. SIGHUP restarts the replicas one after the other.
    """
    console = Console(stderr=True, highlight=False)
    launches = [_allowed(launch) for launch in launches]
    require("sglang_router")
    weights = checked_weights(launches[0], options.preflight)  # the same for all replicas
    launches = [with_weight_version(launch, weights) for launch in launches]
    require_free_port(front.host, front.port)
    _require_ops_port(options)
    folder = _new_run("serve", front, launches, options.runs)
    console.print(f"kimi-w4a8: logs of engines and router: {folder}")
    events = EventLog(folder, console)
    replicas = [
        Replica(
            _with_keys(launch, options),
            folder / f"replica-{number}.log",
            events,
            str(number),
            options.drain_timeout_s,
            options.client_key,
        )
        for number, launch in enumerate(launches)
    ]
    endpoint = router_endpoint(front.host, front.port)
    fleet = Fleet(front.name, replicas, endpoint, events)
    try:
        with (
            signals_raise(drain=True, on_hangup=fleet.renew.set),
            RouterKeeper(endpoint, router, folder, events),
            fleet.registrar,
            _ops(options, fleet),
        ):
            console.print(f"[bold]kimi-w4a8: {len(replicas)} replicas of {front.name} behind {endpoint.base_url}/v1[/]")
            fleet.run()
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; all engines and the router were stopped; logs: {folder}")
        return stopped.exit_code
    return 0


@dataclass(frozen=True)
class RouterOnly:
    """View of a router whose replicas run elsewhere, with probes of their own."""

    recipe: str
    registrar: Registrar
    endpoint: RouterEndpoint
    known: dict[str, ReplicaState] = field(default_factory=dict)

    @property
    def router_url(self) -> str | None:
        """Address at which clients reach the router."""
        return self.endpoint.base_url

    @property
    def router_metrics_url(self) -> str | None:
        """The router's own metrics."""
        return self.endpoint.metrics_url

    def replicas(self) -> Sequence[ReplicaState]:
        """Return one state per replica that was ever registered, so that a lost one stays visible."""
        registered = self.registrar.registered()
        for url in sorted(registered - self.known.keys()):
            self.known[url] = ReplicaState(url.removeprefix("http://"), url, progress_timeout_s=0)
        for url, state in self.known.items():
            if state.ready != (url in registered):
                state.enter(*((Phase.READY, "registered") if url in registered else (Phase.DOWN, "not registered")))
        return [self.known[url] for url in sorted(self.known)]

    def live(self) -> tuple[bool, str]:
        """Return True: this process keeps the router alive."""
        return True, ""


def route_foreground(
    host: str,
    port: int,
    model: str | None,
    router: RouterSettings,
    discover: Callable[[], frozenset[str]],
    options: ServeOptions,
) -> int:
    """Route to replicas that run elsewhere until a signal arrives; return the exit code of `kimi-w4a8 route`."""
    console = Console(stderr=True, highlight=False)
    require("sglang_router")
    require_free_port(host, port)
    _require_ops_port(options)
    folder = new_run_dir("route", options.runs)
    write_json(folder / RECORD, record("route", {}, {}, router=router.model_dump(), host=host, port=port, model=model))
    events = EventLog(folder, console)
    endpoint = router_endpoint(host, port)
    registrar = Registrar(endpoint, discover, events, model)
    try:
        with (
            signals_raise(drain=True),
            RouterKeeper(endpoint, router, folder, events, options.drain_timeout_s) as keeper,
            registrar,
            _ops(options, RouterOnly("route", registrar, endpoint)),
        ):
            console.print(f"[bold]kimi-w4a8: routing at {endpoint.base_url}/v1[/]; log: {folder}")
            try:
                threading.Event().wait()
            except Terminated as ended:
                if ended.number == signal.SIGTERM:
                    keeper.drain()
                raise
    except Terminated as stopped:
        console.print(f"kimi-w4a8: {stopped} received; the router was stopped; the replicas still run; log: {folder}")
        return stopped.exit_code
    return 0


@contextmanager
def follow(path: Path, write: Callable[[str], object] = sys.stdout.write) -> Iterator[None]:
    """Copy what is appended to a log to stdout while the block runs."""
    done = threading.Event()

    def copy() -> None:
        with path.open(errors="replace") as file:
            while True:
                ended = done.is_set()
                for line in file:
                    write(line)
                sys.stdout.flush()
                if ended:
                    return
                done.wait(0.2)

    def copy_while_possible() -> None:
        with suppress(OSError):  # stdout may be a file on a full disk; the log itself continues
            copy()

    thread = threading.Thread(target=copy_while_possible, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5.0)


def _with_keys(launch: Launch, options: ServeOptions) -> Launch:
    return replace(launch, env={**launch.env, **options.keys})


def _folder(launch: Launch, checkpoint: str | None, option: str) -> Path | None:
    """Return the folder of a checkpoint at the engine's revision on this disk, or None when it is not here."""
    if checkpoint is None:
        return None
    revision = str(launch.args.get(option, "main"))
    try:
        return locate(checkpoint, revision, Path(constants.HF_HUB_CACHE)).folder
    except KimiError:
        return None


def _new_run(kind: str, front: Launch, launches: Sequence[Launch], runs: Path) -> Path:
    folder = new_run_dir(f"{kind}-{front.name}", runs)
    servers = {
        front.name if len(launches) == 1 else f"replica-{number}": {"argv": launch.argv, "env": launch.env}
        for number, launch in enumerate(launches)
    }
    write_json(folder / RECORD, record(kind, servers, front.env))
    return folder


def _require_ops_port(options: ServeOptions) -> None:
    if options.ops_port is None:
        return
    require("starlette", "uvicorn")
    try:
        require_free_port(options.ops_host, options.ops_port)
    except KimiError as error:
        raise replace(error, where="--ops-port", remedy="choose another port with --ops-port, or 0 for none") from error


@contextmanager
def _ops(options: ServeOptions, view: FleetView) -> Iterator[None]:
    """Run probes, metrics and the repeated canary inside the block."""
    if options.ops_port is None:
        yield
        return
    from ..ops.endpoint import OpsServer  # its web server is an optional package

    # A router alone knows no replica at first and never a recipe.
    timeout_s = max((state.progress_timeout_s for state in view.replicas()), default=Options().progress_timeout_s)

    def connect(base_url: str) -> EngineClient:
        return EngineClient(base_url, options.client_key, timeout_s)

    with OpsServer(options.ops_host, options.ops_port, view) as ops, CanaryWatch(view, ops.acceptance, connect):
        yield
