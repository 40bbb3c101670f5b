"""The server under test of `bench`, `eval` and `accept`: one that runs already, or one started from a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.http import Address
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, record
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render, unmet_requirements
from kimi_w4a8_eagle3.supervision.checks import checked
from kimi_w4a8_eagle3.supervision.supervisor import READY_TIMEOUT_S

Say = Callable[[str], object]
_TIMEOUT_S = 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


@dataclass(frozen=True)
class EngineFacts:
    """Settings of an engine. num_draft_tokens: None without speculation. context_len in tokens, None if not reported.

    tokenizer: a folder on the engine's machine or a repository. incremental: its streams send what is new alone.
    """

    model_path: str
    tokenizer: str
    num_draft_tokens: int | None
    context_len: int | None
    incremental: bool = False


@dataclass(frozen=True)
class Server:
    """Running server. name labels figures. model: name under which it serves. launch: None if it ran before.

    engine: SGLang's own API behind the gateway, for token ids and loads; the server itself where no other is known.
    """

    name: str
    base_url: str
    model: str
    launch: Launch | None = None
    api_key: str | None = field(default=None, repr=False)
    own_engine: Address | None = field(default=None, repr=False)

    @property
    def engine(self) -> Address:
        return self.own_engine or Address(self.base_url, self.api_key)

    @cached_property
    def facts(self) -> EngineFacts:
        """Settings of its engine, read once. Raises KimiError for a server that is not SGLang."""
        with EngineClient(*self.engine) as client:
            info = client.server_info()
        path = str(info.get("model_path", self.model))
        draft_tokens = int(info.get("speculative_num_draft_tokens") or 0) if info.get("speculative_algorithm") else 0
        context = read_once(*self.engine).largest("sglang:context_len")
        return EngineFacts(
            model_path=path,
            tokenizer=str(info.get("tokenizer_path") or path),
            num_draft_tokens=draft_tokens or None,
            context_len=None if context is None else int(context),
            incremental=bool(info.get("incremental_streaming_output")),
        )


@dataclass(frozen=True)
class Target:
    """Server that the user named: a running one by base_url, or one to start from a recipe.

    With both, the server at base_url must serve the recipe's model. base_url may be the engine.json of a run of
    `serve`, for the engine itself. model: name under which the server must serve. settings: changes to the recipe, as
    for `--set`. api_key: key sent to the server, never recorded. engine: of a server that was started here. runs: where
    `serve` keeps its folders, one of which names the engine of a service on this machine.
    """

    base_url: str | None = None
    recipe: str | None = None
    model: str | None = None
    settings: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    engine: Address | None = field(default=None, repr=False)
    runs: Path = DEFAULT_ROOT

    def __post_init__(self) -> None:
        if self.base_url is None and self.recipe is None:
            raise UsageError(
                "no server was named",
                expected="--base-url of a running server, or --recipe to start one",
                remedy="for example --recipe tiny, on any machine",
            )

    @property
    def name(self) -> str:
        """Label of its figures: the recipe if it is known, else the address."""
        return self.launch.name if self.launch else str(self.base_url)

    @property
    def local(self) -> bool:
        """True if the server runs on this machine, so that this machine's hardware is measured."""
        at = self.base_url
        try:
            return at is None or at.endswith(".json") or urlsplit(at).hostname in _LOOPBACK
        except ValueError:  # no address, which the client refuses with a message
            return False

    @cached_property
    def launch(self) -> Launch | None:
        """Launch of the recipe; None without a recipe."""
        return None if self.recipe is None else render(load_recipe(self.recipe), self.settings)

    def plain(self) -> Target:
        """Return the same recipe without its draft."""
        if self.recipe is None:
            return self
        return replace(self, recipe=f"{self.recipe.removesuffix(':plain')}:plain")

    def check(self) -> Server | Launch:
        """Return the running server, or the launch that can start.

        Raises KimiError, before a run directory exists, for a silent server, a wrong model or missing GPUs.
        """
        return self._startable if self.base_url is None else self.connected

    @contextmanager
    def running(self, log: Path, say: Say) -> Iterator[Server]:
        """Yield the server. An engine started here logs into `log` and stops at the end of the block."""
        if self.base_url is not None:
            yield self.connected
            return
        launch = self._startable
        if not any(setting.startswith(("port=", "args.port=")) for setting in self.settings):
            launch = launch.with_args(port=free_port())
        say(f"{self.name}: starting the server (log: {log})")
        with launch.server(log, self.name) as engine:
            seconds = engine.wait_ready(READY_TIMEOUT_S)
            say(f"{self.name}: ready after {seconds:.0f} s")
            yield self._connect(engine.base_url, launch, engine.address)

    @cached_property
    def _startable(self) -> Launch:
        launch = self.launch
        assert launch is not None
        machine = Machine.detect()
        gpus, unmet = launch.recipe.hardware.gpus, unmet_requirements(launch.recipe, machine)
        if unmet and (not gpus or len(machine.devices) < gpus):
            raise KimiError(
                f"this machine cannot serve the recipe {self.name!r}: {unmet[0]}",
                remedy="name a running server with --base-url, or try --recipe tiny",
            )
        return checked(launch)

    @cached_property
    def connected(self) -> Server:
        """The server at base_url, asked once."""
        assert self.base_url is not None
        engine = self.engine
        base_url = self.base_url.rstrip("/").removesuffix("/v1")  # clients of the OpenAI API name it with its path
        if base_url.endswith(".json"):
            engine = _named_engine(Path(base_url))
            base_url = engine.url
        elif engine is None and self.local:
            engine = _engine_beside(base_url, self.runs)
        server = self._connect(base_url, None, engine)
        if self.launch is not None and Path(server.facts.model_path).name != Path(self.launch.model).name:
            raise KimiError(
                f"the server serves {server.facts.model_path}",
                where=base_url,
                expected=f"{self.launch.model} (recipe {self.name})",
                remedy="check the address, or omit --recipe",
            )
        return server

    def _connect(self, base_url: str, launch: Launch | None, engine: Address | None) -> Server:
        key = engine.key if engine and engine.url == base_url else self.api_key
        with EngineClient(base_url, key, _TIMEOUT_S) as client:
            served = client.model_name()
        if self.model is not None and served != self.model:
            raise KimiError(
                f"the server serves {served!r}, not {self.model!r}",
                where=base_url,
                expected=repr(self.model),
                remedy="check the address, or name the served model with --served-model-name",
            )
        return Server(self.name if self.launch else base_url, base_url, served, launch, key, engine)


def _named_engine(file: Path) -> Address:
    """Return the engine that a supervisor's file names."""
    try:
        named = json.loads(file.read_text())
        return Address(named["url"], named["secret"])
    except (OSError, ValueError, KeyError) as error:
        what = f"this file names no engine: {type(error).__name__}"
        raise UsageError(what, str(file), "engine.json in the folder of a run of `kimi-w4a8 serve`") from error


def _engine_beside(base_url: str, runs: Path) -> Address | None:
    """Return the engine behind a gateway of this machine, as its newest run of `serve` names it; None if none does."""
    for file in sorted(runs.glob("*-serve-*/engine.json"), reverse=True):
        with suppress(OSError, ValueError, KeyError, AttributeError, UsageError):
            served = json.loads((file.parent / RECORD).read_text())["servers"].values()
            if urlsplit(base_url).port in [urlsplit(one["base_url"]).port for one in served]:
                return _named_engine(file)
    return None


def record_of(kind: str, targets: Mapping[str, Target], **facts: object) -> dict[str, object]:
    """Return a run's record with its targets by label, the launches of those started here, and their kernel gates."""
    started = {name: target.launch for name, target in targets.items() if target.launch and target.base_url is None}
    gates = {f"{name}: {gate}": value for name, launch in started.items() for gate, value in launch.env.items()}
    servers = {name: launch.described() for name, launch in started.items()}
    unsaid = ("engine", "runs", "api_key")  # of this machine, or secret
    described = {
        name: {key: value for key, value in asdict(target).items() if key not in unsaid}
        for name, target in targets.items()
    }
    return record(kind, servers, gates, targets=described, **facts)
