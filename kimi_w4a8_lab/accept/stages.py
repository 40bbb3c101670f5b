"""Stages in order; each makes the call of a `kimi-w4a8` command and reports its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Severity
from kimi_w4a8_eagle3.base.run_dir import write_json
from kimi_w4a8_eagle3.doctor.probe import Probe
from kimi_w4a8_eagle3.doctor.runner import examine
from kimi_w4a8_eagle3.fetch.download import hub_repositories
from kimi_w4a8_eagle3.gates import BY_NAME, read_gates
from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.moe.tiles import TABLE, read_rows
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve, unmet_requirements
from kimi_w4a8_eagle3.recipe.schema import Recipe

from ..accuracy import accuracy, lossless, smoke, tasks, tool_run
from ..accuracy.evaluation import RunOptions
from ..accuracy.prompts import prompts
from ..accuracy.recorder import CHAT, Answer, Recorder
from ..accuracy.results import RESULTS, AccuracyResult, EvalResult
from ..accuracy.tasks import Protocol
from ..accuracy.tool_scores import MARKERS, message_of
from ..accuracy.vendor_checks import as_stream
from ..base.run_folder import RunFolder
from ..base.server_under_test import Server, Target
from ..base.verdict import Verdict
from ..predict.machine_model import Cluster, kimi, moe_shape
from ..report import evaluation
from ..report.page import write_page
from ..speed.bench import Plan, Texts, bench
from ..speed.runs import grouped, read_run
from ..speed.workloads import Workload, load_workload, with_changes
from .journal import Figure, Skipped, Stage, StageResult
from .kernel_stage import check_kernels, run_child
from .lever_stage import levers_of, measure_lever
from .speed_verdict import judge, speed_figures, why_not_judged

FIRST = "agent"  # the recipe of the first hour
ON_GPUS = (FIRST, "w4a8", "eagle3", "eagle3-opt", "w4a16")  # the last one with published accuracy runs GSM8K
IMAGE = Path("/opt/kimi/packages")  # package path in the Docker image
SPEED = {True: ("con2", "con40", "chat"), False: ("tiny-con2", "tiny-con40", "tiny-maths")}  # key: runs on GPUs
PREFILL = "prefill"  # the workload that measures what shortens a prefill
LOAD_MINUTES = 20.0  # start of one engine with Kimi-K2.5 from a local disk
_MINUTES = {"start": LOAD_MINUTES, "smoke": 2.0, "tools": 4.0, "streams": 1.0, "con2": 2.0, "con40": 4.0}
_MINUTES["lossless"] = LOAD_MINUTES + 6
_STREAMED = 24  # of the prompts a sixth is maths
_GATE_OF_ANOTHER_ARITHMETIC = "FLYDSL_W4A16_HYBRID"  # bfloat16 activations, outside the contract


@dataclass(frozen=True)
class Sizes:
    """Number of requests per stage; None: all of the workload or task. full: also what the first hour leaves out."""

    smoke: int = 30
    prompts: int | None = None
    problems: int | None = None
    lossless: int = 48
    samples: int = 400
    tools: int = 100
    full: bool = False


QUICK = Sizes(smoke=12, prompts=8, problems=40, lossless=12, samples=50, tools=12)


@dataclass
class AcceptRun:
    """One acceptance run: its folder, its sizes, and the running engine that the stages of a recipe share."""

    folder: Path
    recipes: Sequence[str]
    sizes: Sizes
    console: Console
    texts: Texts
    data_dir: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    machine: Machine = field(default_factory=Machine.detect)
    _engines: ExitStack = field(default_factory=ExitStack, repr=False)
    _up: tuple[str, Server] | None = None
    _failed_starts: set[str] = field(default_factory=set)

    def stop(self) -> None:
        self._up = None
        self._engines.close()

    def stages(self) -> list[Stage]:
        """Return all stages; a stage that cannot run here states what is missing."""
        recipes = [load_recipe(name) for name in self.recipes]
        here = [recipe for recipe in recipes if not unmet_requirements(recipe, self.machine)]
        on_hub = [recipe.name for recipe in here if hub_repositories(recipe)]
        stages = [Stage("doctor", "doctor" if on_hub else "", partial(self._doctor, recipes), minutes=1.0)]
        if self.sizes.full:
            no_image = "" if Path(__file__).is_relative_to(IMAGE) else "this is not the image"
            no_hub = "" if on_hub else "needs a recipe of a model on the Hub, and its GPUs"
            no_hub = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else no_hub
            stages.append(Stage("image", "image", lambda: StageResult("this is the image"), no_image, required=False))
            stages.append(Stage("fetch", "fetch", partial(self._fetch, on_hub), no_hub, required=False))
        for recipe in recipes:
            stages += self._of_recipe(recipe)
        return stages + (list(self._kernel_stages(recipes)) if self.sizes.full else [])

    def _kernel_stages(self, recipes: Sequence[Recipe]) -> Iterator[Stage]:
        no_gpu = "" if any(device.arch == "gfx942" for device in self.machine.devices) else "needs a gfx942 GPU"
        for title, backend, gates in _variants(recipes):
            for tp in (8, 4):
                run = partial(self._kernels, backend, gates, tp, f"{title} tp{tp}".replace(" ", "-"))
                yield Stage(f"kernels {title}, TP {tp}", backend, run, no_gpu, required=False)
        yield Stage("tune-moe", "flydsl", self._tune, no_gpu, required=False)

    def _of_recipe(self, recipe: Recipe) -> Iterator[Stage]:
        """Yield a recipe's stages; the first recipe has all, the others start, smoke and speed."""
        name, missing = recipe.name, next(iter(unmet_requirements(recipe, self.machine)), "")
        on_gpus, first = recipe.hardware.gpus > 0, recipe.name == load_recipe(self.recipes[0]).name
        published_names = {reference.configuration for reference in accuracy.load_references()}
        judged = [name for name in self.recipes if name in published_names and load_recipe(name).draft]

        def stage(what: str, proves: str, run: Callable[[], StageResult]) -> Stage:
            minutes = _MINUTES.get(what, 5.0) if on_gpus else 0.5
            return Stage(f"{name}: {what}", proves if on_gpus else "", run, missing, minutes)

        yield stage("start", "start", partial(self._start, recipe))
        yield stage("smoke", "start", partial(self._smoke, recipe))
        if first:
            yield stage("tools", "", partial(self._tools, recipe))
            yield stage("streams", "", partial(self._streams, recipe))
        for workload in SPEED[on_gpus] if self.sizes.full else SPEED[on_gpus][:2]:
            load = load_workload(workload)
            yield stage(workload, "speed" if load.reference else "", partial(self._speed, recipe, load))
        if self.sizes.full and first and on_gpus:
            for lever in levers_of(recipe):
                yield stage(f"prefill with and without {lever}", "", partial(self._lever, recipe, lever))
        if self.sizes.full and (judged[-1:] == [name] or not on_gpus):
            proves = "" if self.sizes.problems else "gsm8k"  # a few problems prove nothing
            yield stage("accuracy", proves, partial(self._accuracy, recipe))
        if first and recipe.draft:
            yield stage("lossless", "lossless", partial(self._lossless, recipe))

    def _doctor(self, recipes: Sequence[Recipe]) -> StageResult:
        """Examine this machine for all recipes that were asked for. Raises KimiError with the first failure of each."""
        failed, notes = [], []
        for recipe in recipes:
            report = examine(Probe(), resolve(recipe))
            write_json(self.folder / f"doctor-{recipe.name}.json", report.as_json())
            failed += [(recipe, result) for result in report.results if result.severity is Severity.FAIL][:1]
            warned = [result.name for result in report.results if result.severity is Severity.WARN]
            notes.append(f"{recipe.name}: ready" + (f", with warnings: {', '.join(warned)}" if warned else ""))
        if failed:
            found = "\n".join(f"{recipe.name}: {result.name}: {result.found}" for recipe, result in failed)
            first, result = failed[0]
            raise KimiError(found, where=f"kimi-w4a8 doctor --recipe {first.name}", remedy=result.remedy)
        return StageResult("; ".join(notes))

    def _fetch(self, recipes: Sequence[str]) -> StageResult:
        wanted = list(
            dict.fromkeys(repository for name in recipes for repository in hub_repositories(load_recipe(name)))
        )
        for repository in wanted:
            repository.fetch(self.console.print)
        return StageResult(f"{', '.join(repository.repo for repository in wanted)}: complete")

    def _kernels(self, backend: str, gates: Mapping[str, str], tp: int, label: str) -> StageResult:
        shape, result = moe_shape(kimi(), Cluster(tp=tp)), self.folder / f"kernels-{label}.json"
        figures = check_kernels(backend, shape, gates, result)
        found = "known answers bit for bit, eagerly and from a graph; random ones beside the reference"
        return StageResult(found, figures=figures)

    def _tune(self) -> StageResult:
        table = self.folder / "tiles.json"
        run_child(["-m", "kimi_w4a8_eagle3.cli", "tune-moe", "--output", str(table)], {}, self.folder / "tune-moe.log")
        changed = [row for row in read_rows(table) if row not in read_rows(TABLE)]
        return StageResult("; ".join(f"{row['tiles']} {row['source']}" for row in changed))

    def _serving(self, recipe: Recipe) -> Server:
        if recipe.name in self._failed_starts:
            raise Skipped(f"{recipe.name} did not start")
        if self._up is None or self._up[0] != recipe.name:
            self.stop()
            target, log = Target(recipe=recipe.name, api_key=self.api_key), self.folder / f"engine-{recipe.name}.log"
            try:
                self._up = recipe.name, self._engines.enter_context(target.running(log, self.console.print))
            except Exception:
                self._failed_starts.add(recipe.name)
                raise
        return self._up[1]

    def _target(self, recipe: Recipe) -> Target:
        server = self._serving(recipe)
        return Target(server.base_url, recipe.name, server.model, api_key=self.api_key, engine=server.engine)

    def _start(self, recipe: Recipe) -> StageResult:
        facts = self._serving(recipe).facts
        drafts = facts.num_draft_tokens or "no"
        return StageResult(f"{facts.model_path}, context {facts.context_len}, {drafts} draft tokens")

    def _smoke(self, recipe: Recipe) -> StageResult:
        longest = 2048 if recipe.hardware.gpus else 512  # Kimi-K2.5 reasons before it answers
        floors = smoke.Floors(self.sizes.smoke, longest, speculates=recipe.draft is not None)
        folder, _, checks = smoke.run(self._target(recipe), floors, self.console, self.folder)
        return _evaluated(folder, *(f"{check.name}: {check.found}" for check in checks))

    def _tools(self, recipe: Recipe) -> StageResult:
        plan, judging = tool_run.ToolPlan(limit=self.sizes.tools), tool_run.Judging(runs=self.folder)
        return _evaluated(tool_run.run(self._target(recipe), plan, judging, self.console))

    def _streams(self, recipe: Recipe) -> StageResult:
        """Ask a few problems streamed and whole: thinking must be apart from the answer, and both must end."""
        server, thinks = self._serving(recipe), "reasoning-parser" in recipe.final_args
        texts = [prompt.text for prompt in prompts(_STREAMED) if prompt.kind == "maths"]
        settings = {"model": server.model, "max_tokens": 4096, "temperature": 0.0}
        whole = [{**settings, "messages": [{"role": "user", "content": text}]} for text in texts]
        bodies = [*map(as_stream, whole), *whole]
        recorder = Recorder(server.base_url, self.folder / f"streams-{recipe.name}.jsonl", api_key=server.api_key)
        answers = recorder.ask(CHAT, bodies, 1)
        wrong = [
            found for body, answer in zip(bodies, answers, strict=True) if (found := _misread(body, answer, thinks))
        ]
        if wrong:
            raise KimiError(f"{len(wrong)} of {len(answers)} answers are wrong: {wrong[0]}", where=server.base_url)
        return StageResult(f"{len(texts)} answers streamed and whole, with thinking apart from the answer")

    def _speed(self, recipe: Recipe, workload: Workload) -> StageResult:
        workload = with_changes(workload, num_prompts=self.sizes.prompts)
        plan = Plan([self._target(recipe)], [workload])
        run = read_run(bench(plan, self.texts, self.folder, self.console.print))
        cell = grouped([run])[workload.name, workload.concurrency[0]][recipe.name]
        why_not = why_not_judged(self.machine, self.sizes.prompts)
        figures = speed_figures(cell, judged=not why_not)
        verdict, found = judge(figures, why_not)
        return StageResult(f"{found}\n{'; '.join(map(str, figures))} ({run.folder.name})", verdict, figures=figures)

    def _lever(self, recipe: Recipe, lever: str) -> StageResult:
        self.stop()  # eight GPUs hold one engine
        workload = with_changes(load_workload(PREFILL), num_prompts=self.sizes.prompts)
        return measure_lever(recipe, lever, workload, self.texts, self.folder, self.console.print, self.api_key)

    def _accuracy(self, recipe: Recipe) -> StageResult:
        built_in, limit = not recipe.model.on_hub, self.sizes.problems
        math = Protocol(tasks.TINY_MATH, True, 0, tasks.TINY_MATH.max_tokens, limit or 300, 32)
        protocol = math if built_in else Protocol(tasks.GSM8K, False, tasks.GSM8K.shots, 512, limit, 256)
        options = RunOptions(data_dir=self.data_dir, runs=self.folder)
        folder = accuracy.run(self._target(recipe), protocol, options, self.console)
        figures = [
            Figure(row.metric, 100 * row.correct / row.answered, f"% of {row.answered}")
            for row in RunFolder[AccuracyResult].open(folder, AccuracyResult).result.verdict.accuracies
            if row.answered
        ]
        return _evaluated(folder, figures=figures)

    def _lossless(self, recipe: Recipe) -> StageResult:
        """Compare the running engine with the second start, the same recipe without its draft.

        SGLang cannot switch a draft off while it runs; it can change the thresholds of acceptance only.
        """
        target = self._target(recipe)
        reference = Target(recipe=recipe.name, api_key=self.api_key).plain()
        plan = lossless.LosslessPlan(self.sizes.lossless, samples=self.sizes.samples, runs=self.folder)
        # eight GPUs hold one engine
        folder, report = lossless.run(reference, target, plan, self.console, release=self.stop)
        figures = [Figure("accept length", report.accept_length or 0.0, "tokens")]
        figures += [Figure("sampling, smallest p", report.sampling.smallest, "")] if report.sampling else []
        return _evaluated(folder, figures=figures)


def _variants(recipes: Sequence[Recipe]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (title, backend, gates) for both backends, and for FlyDSL with the gates of every recipe that sets some."""
    yield "flydsl", "flydsl", {}
    for recipe in recipes:
        given = read_gates(recipe.environment).given
        gates = {name: recipe.environment[name] for name in given if "flydsl" in (BY_NAME[name].backends or ())}
        if gates and _GATE_OF_ANOTHER_ARITHMETIC not in gates:
            yield f"flydsl as {recipe.name}", "flydsl", gates
    yield "triton", "triton", {}


def _misread(body: Mapping[str, Any], answer: Answer, thinks: bool) -> str:
    """Return what is wrong with an answer, "" if thinking and answer are apart and whole."""
    message = message_of(answer) if answer.error is None else {"content": answer.error}
    text, thinking = message.get("content") or "", message.get("reasoning_content") or ""
    whole = answer.finish_reason == "stop" and bool(text) and (bool(thinking) or not thinks)
    if whole and not any(marker in text + thinking for marker in MARKERS):
        return ""
    how = "streamed" if "stream" in body else "whole"
    return f"{how}: answer {text[:40]!r}, thinking {thinking[:40]!r}, ended by {answer.finish_reason}"


def _evaluated(folder: Path, *details: str, figures: Sequence[Figure] = ()) -> StageResult:
    """Write an evaluation's page and return its verdict with details, by default its reasons.

    Raises KimiError for a run that failed or is invalid.
    """
    result = RunFolder[EvalResult].open(folder, *RESULTS).result
    page, verdict = evaluation.page(folder, result), result.verdict.state
    path, found = write_page(page, folder), "; ".join(details or (words.text for words in page.verdicts))
    if verdict in (Verdict.FAIL, Verdict.INVALID):
        raise KimiError(f"{verdict}: {found}", where=str(folder), remedy=f"open {path}")
    return StageResult(f"{found} ({folder.name})", verdict, figures=list(figures))
