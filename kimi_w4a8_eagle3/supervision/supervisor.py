"""The supervisor of one engine: it starts it, checks it with canary prompts, watches it, drains it and restarts it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..base.errors import KimiError
from ..base.run_dir import WANTED, bound
from ..engine import startup_check
from ..engine.client import EngineClient, require_private
from ..engine.front import Front
from ..engine.given_folder import LOOP
from ..engine.process import EngineServer
from ..engine.signs import DetokenizerQueue, EngineProcesses, Pulse
from ..engine.watchdog import Watchdog
from ..ops.state import EngineState, Phase
from ..recipe.launch import Launch
from .checks import DRAIN_TIMEOUT_S, ChangedWeights, answers_file, renewed, require_unchanged, weight_files

# A cold start on MI325X reads 534 GB and builds kernels; the engine's own exit ends the wait earlier.
READY_TIMEOUT_S = 5400.0
# In a row, of an engine that has served; its end while it served is the first. 14 minutes of pauses.
MAX_FAILURES = 12
NOTICE_S = 3.0  # /ready answers 503 for so long before the engine gets SIGTERM, so that a router takes it out
_POLL_S = 0.25
_QUEUE_SILENT_S = 10.0  # of the detokenizer with work: with all delays, /ready is 503 within 15 s
_LOOP_SILENT_S = 3.0  # of the HTTP server: with all delays, /ready is 503 within 5 s
_END_GRACE_S = 0.5
_STALLED_GRACE_S = 2.0  # a stalled engine finishes nothing, and its clients wait until its sockets close
_MAX_BACKOFF_S = 300.0

logger = logging.getLogger(__name__)
Announce = Callable[[str, str, str], object]  # source, event, reason


class Stalled(KimiError):
    """The engine generated no token for its progress timeout, not for a health probe either."""


class _EndRequested(Exception):
    """Another thread asked the engine to end while it was starting."""


class Supervisor:
    """Keeps an engine of `launch` running, and its state. `keep` runs until `end` or `end_now`.

    front: the gateway, which is told of every phase. log_path: output of the engine's processes. A stalled engine
    prints its stacks there. preflight: False checks no checkpoint before a restart.
    """

    def __init__(
        self,
        launch: Launch,
        front: Front,
        log_path: Path,
        announce: Announce,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
        preflight: bool = True,
    ) -> None:
        self.launch, self._front = launch, front
        self.log_path = log_path
        timeout_s = launch.recipe.options.progress_timeout_s
        self.state = EngineState(launch.name, launch.base_url, timeout_s, *launch.acceptance, told=self._tell)
        self._announce = announce
        self._drain_timeout_s, self._preflight = drain_timeout_s, preflight
        self._ending, self._end_requested = threading.Event(), threading.Event()
        self._drains = True
        self._server: EngineServer | None = None
        self._silent_since = -1.0  # `since` of the STALLED that a silent process caused
        self._was_ready = False  # in its present or last run
        self._files = weight_files(launch)
        self._restarts = self._refuses = False

    def keep(self) -> None:
        """Run the engine again and again until it is asked to end; raise the last error when it does not start.

        An engine that was ready starts again at once, then after 1, 2, 4 ... 300 s. One that never was is given up at
        its first failure, others after MAX_FAILURES, except while the weights on the disk are others than at the start.
        """
        failures, served = 0, False
        while not self._ending.is_set():
            try:
                self.run()
                failures = 0
                continue
            except Exception as caught:
                error = caught
            if not isinstance(error, KimiError):  # a bug here must not cost the service its engine
                logger.error("%s", self.launch.name, exc_info=error)
                self._say("down", f"{type(error).__name__}: {error}")
            if self._ending.is_set():
                return
            served |= self._was_ready
            failures = 1 if self._was_ready else failures + 1
            self._refuses = isinstance(error, ChangedWeights)  # another process would serve them
            if failures >= (MAX_FAILURES if served else 1) and not self._refuses:
                self._say("gave-up", "it is not started again")
                raise error
            reason = "stalled" if isinstance(error, Stalled) else "ended" if isinstance(error, KimiError) else "error"
            self.state.restarts[reason] += 1
            pause = min(2.0 ** (failures - 2), _MAX_BACKOFF_S) if failures > 1 else 0.0
            self._say("restarting", f"in {pause:.0f} s")
            self._ending.wait(pause)

    def run(self) -> None:
        """Run the engine once. Return when another thread ended it.

        Raises KimiError with the reason if it does not start, fails a check or ends, and the exception of a bug.
        """
        self._enter(Phase.STARTING, "loading weights and building kernels")
        self._was_ready = False
        reason = WANTED
        try:
            if self._restarts:
                require_unchanged(self.launch, self._files, self._preflight)
            self._restarts = True
            with self.launch.engine(self.log_path) as server:
                self._server = server
                self.state.engine_url, self.state.engine_secret = server.base_url, server.secret
                seconds = server.wait_ready(READY_TIMEOUT_S, on_wait=self._raise_if_end_requested)
                self._check()
                self._tell(Phase.READY)
                self._front.wait_ready(self._raise_if_end_requested)
                self._enter(Phase.READY, f"after {seconds:.0f} s at {self.state.base_url}/v1")
                self._was_ready = True
                self._watch(server)
                if self._drains:
                    self._drain(server)
        except _EndRequested:
            return
        except KimiError as error:
            if self._end_requested.is_set():  # it was ended while it started or checked
                return
            reason = error.what
            raise
        finally:
            self._end_requested.clear()
            self._enter(Phase.DOWN, reason)

    def renew(self) -> None:
        """Drain the engine and start it again with its checkpoints as they are now; leave it alone if they are bad.

        Also an engine that the canary took out is renewed: its draft may be what changed.
        """
        try:
            launch = renewed(self.launch, self._preflight)
        except KimiError as error:
            self._say("renewal", f"given up: {error}")
            return
        if self._refuses:  # the next try takes them
            self.launch, self._files, self.state.openings = launch, weight_files(launch), None
            return
        if not self._was_ready or self.state.phase in (Phase.STARTING, Phase.DRAINING, Phase.DOWN):
            self._say("renewal", f"given up: the engine is {self.state.phase.value}")
            return
        self.launch, self._files, self.state.openings = launch, weight_files(launch), None
        self.state.restarts["renewed"] += 1
        self._end_requested.set()

    def end(self) -> None:
        """Ask the engine to finish its running requests and end, from another thread; `keep` then returns."""
        self._ending.set()
        if self._was_ready:
            self._end_requested.set()
        else:  # it has no request, and its canary prompts may take minutes
            self.end_now()

    def end_now(self) -> None:
        """End it without finishing its requests, from another thread; return when its processes are gone.

        SGLang looks for SIGTERM only every 5 s, and then kills its processes as `stop` does.
        """
        self._ending.set()
        self._drains = False
        self._end_requested.set()
        self._front.stop(_END_GRACE_S)
        if self._server is not None:
            self._server.stop(_END_GRACE_S)

    def _say(self, event: str, reason: str) -> None:
        self._announce(self.launch.name, event, reason)

    def _enter(self, phase: Phase, reason: str) -> None:
        self.state.enter(phase, reason)
        self._say(phase.value, reason)

    def _tell(self, phase: Phase) -> None:
        self._front.tell(phase.value, self.state.engine_url, self.state.engine_secret)

    def _raise_if_end_requested(self) -> None:
        if self._end_requested.is_set():
            raise _EndRequested

    def _check(self) -> None:
        """Check that the engine is private, and run the canary prompts.

        Raises KimiError for NaN, for answers that are empty or other than at the first start or as recorded, and for a
        draft that accepts too little.
        """
        state = self.state
        require_private(state.engine_url)
        self._enter(Phase.CHECKING, "canary prompts")
        with EngineClient(state.engine_url, state.engine_secret, state.progress_timeout_s) as client:
            answers = startup_check.require_answers(client, state.groups)
            if recorded := answers_file(self.launch):
                startup_check.require_recorded(client, answers, recorded)
        if state.openings is not None and (fault := startup_check.fault_of(answers, state.openings)):
            raise KimiError(fault, str(self.log_path), "those of this server's first start", "kimi-w4a8 fetch --verify")
        state.openings = state.openings or startup_check.openings(answers)
        if self.launch.draft is not None and state.num_draft_tokens is not None:
            state.canary = startup_check.require_acceptance(
                answers, state.num_draft_tokens, self.launch.draft, state.groups, state.least_accept_length
            )
            state.canary_at = time.time()

    def _watch(self, server: EngineServer) -> None:
        """Return when asked to end; raise when the engine ends by itself, makes no progress or is broken."""
        stalled = threading.Event()
        state, processes, lost = self.state, EngineProcesses(server.pid), None
        pulse, loop, queue = Pulse(server.folder), Pulse(server.folder, LOOP), DetokenizerQueue(server.folder)
        watchdog = Watchdog(
            state.engine_url,
            state.progress_timeout_s,
            stalled.set,
            pid=server.pid,
            on_progress=state.progressed,
            key=server.secret,
        )
        with watchdog:
            while server.poll() is None and (lost := processes.lost()) is None:
                if self._end_requested.wait(_POLL_S):
                    return
                now = time.monotonic()
                self._follow(pulse.silence(now), loop.silence(now), queue.age(now), processes.stopped())
                bound(self.log_path)
                if stalled.is_set():
                    state.stalls += 1
                    self._enter(Phase.STALLED, f"no token for {state.progress_timeout_s:.0f} s")
                    server.stop(_STALLED_GRACE_S)
                    raise Stalled(
                        f"no token was generated for {state.progress_timeout_s:.0f} s, not for a health probe either",
                        where=str(self.log_path),
                        remedy="read the stacks at the end of its log; on ROCm a custom all-reduce may hang: "
                        "--set disable-custom-all-reduce=true, then restart",
                    )
                if state.broken:
                    self._enter(Phase.STALLED, state.broken)
                    server.stop(_STALLED_GRACE_S)
                    raise KimiError(
                        f"the engine is ended because {state.broken}",
                        where=str(self.log_path),
                        expected="answers to the canary's requests",
                        remedy="read the error in its log; if it comes back after a restart, serve an earlier version",
                    )
        how = f" with exit code {server.poll()}" if lost is None else f": its process {lost} is gone"
        what = f"the engine ended by itself{how}"
        state.enter(Phase.DOWN, what)  # first, so that no request is routed here during the clean-up
        server.stop(0.0)  # without that process no request can finish, so its clients need not wait
        raise KimiError(
            what,
            where=str(self.log_path),
            remedy="read the end of its log; if it shows no error, dmesg shows whether memory ran out",
        )

    def _follow(self, scheduler_s: float, loop_s: float, queue_s: float, stopped: str | None) -> None:
        """Mark the engine not ready while a process is silent; the watchdog decides whether to end it."""
        state, limit = self.state, self.launch.recipe.options.unready_after_s
        silent = ""
        if loop_s >= _LOOP_SILENT_S:
            silent = f"its HTTP server has not answered for {loop_s:.0f} s"
        elif scheduler_s >= limit:
            silent = f"its scheduler has not answered for {limit:.0f} s"
        elif queue_s >= _QUEUE_SILENT_S:
            silent = f"its detokenizer has returned nothing for {_QUEUE_SILENT_S:.0f} s although it has work"
        elif stopped:
            silent = f"its process {stopped} is stopped"
        if state.ready and silent:
            self._enter(Phase.STALLED, silent)
            self._silent_since = state.since
        elif not silent and state.enter_unless_changed(self._silent_since, Phase.READY, "it answers again"):
            self._silent_since = -1.0
            self._say(Phase.READY.value, state.reason)

    def _drain(self, server: EngineServer) -> None:
        """Say so at /ready, then let the running requests finish: at the end those of the gateway come first."""
        self._enter(Phase.DRAINING, f"running requests may take {self._drain_timeout_s:.0f} s")
        end = time.monotonic() + min(NOTICE_S, self._drain_timeout_s)
        while time.monotonic() < end and self._drains and server.poll() is None:
            time.sleep(_POLL_S)
        if not self._drains:
            return
        end = time.monotonic() + self._drain_timeout_s
        whole = not self._ending.is_set() or self._front.stop(self._drain_timeout_s)
        if not server.stop(max(1.0, end - time.monotonic())) or not whole:
            self._say("cut", f"requests ran longer than {self._drain_timeout_s:.0f} s")
