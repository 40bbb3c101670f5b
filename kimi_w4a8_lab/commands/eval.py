"""`kimi-w4a8 eval`: accuracy of a deployment, and proof that speculation does not change its answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import UsageError
from kimi_w4a8_eagle3.base.installed import require, require_laptop
from kimi_w4a8_eagle3.base.next_step import command
from kimi_w4a8_eagle3.commands.options import KEY_FILE, RUNS
from kimi_w4a8_eagle3.gateway.settings import client_key

from ..accuracy.evaluation import RunOptions
from ..accuracy.results import RESULTS, EvalResult
from ..base.run_folder import RunFolder
from ..base.server_under_test import Target
from ..report import evaluation
from ..report.tables import conclude
from .groups import expanded, signals

if TYPE_CHECKING:
    from ..accuracy.tasks import Protocol

_HELP = """Accuracy with a verdict, and proof that drafts change nothing.

Exit codes: 0 pass; 3 fail; 4 invalid (too many requests failed, or nothing was tested); 5 inconclusive (too few
problems to tell); 6 measured, not judged (nothing to compare with).
"""
P = TypeVar("P")
app = typer.Typer(no_args_is_help=True, help=_HELP)


@dataclass(frozen=True)
class Served:
    base_url: str | None = typer.Option(None, "--base-url", help="A running server, e.g. http://127.0.0.1:9527.")
    recipe: str | None = typer.Option(None, "--recipe", "-r", help="Start this recipe's server for this run.")
    model: str | None = typer.Option(None, "--served-model-name", help="Model name that the server must serve.")
    settings: list[str] = typer.Option([], "--set", help="With --recipe: an engine argument or a dotted recipe key.")
    api_key_file: Path | None = KEY_FILE

    def target(self) -> Target:
        key = client_key(self.api_key_file, os.environ)
        return Target(self.base_url, self.recipe, self.model, tuple(self.settings), key)


@dataclass(frozen=True)
class Kept:
    """Options with the names of the fields of RunOptions."""

    max_unusable: float = typer.Option(0.01, min=0.0, max=1.0, help="Share of failed or cut answers allowed.")
    resume: Path | None = typer.Option(None, help="Finish an interrupted run; answered requests are not repeated.")
    runs: Path = RUNS


@dataclass(frozen=True)
class Judged(Kept):
    baseline: Path | None = typer.Option(None, "--baseline", help="Run directory to compare with, problem by problem.")
    margin: float = typer.Option(0.01, min=0.0001, max=1.0, help="Accepted loss against --baseline.")


def require_packages() -> None:
    """Raise KimiError now for a package that the evaluation needs later."""
    require("lm_eval", "scipy", "jinja2", "jsonschema")


@app.command("gsm8k", epilog="Example: kimi-w4a8 eval gsm8k --recipe agent")
@expanded
def gsm8k(
    *,
    server: Served,
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Folder with train.jsonl and test.jsonl (no Hub)."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Number of problems, from the first."),
    chat: bool = typer.Option(False, "--chat", help="Use the chat template instead of plain completions."),
    shots: int = typer.Option(10, "--shots", min=0, help="Examples before each question."),
    max_tokens: int = typer.Option(
        512, "--max-tokens", min=1, help="Most tokens of an answer; a longer one counts as truncated."
    ),
    concurrency: int = typer.Option(256, "--concurrency", "-c", min=1, help="Requests in flight."),
    published: str | None = typer.Option(None, "--published", help="Judge against this published configuration."),
    judged: Judged,
) -> None:
    """Run GSM8K by lm-eval: accuracy with intervals and a verdict.

    It has 1,319 problems, each asked with ten examples.
    """
    require_packages()
    from ..accuracy import tasks  # optional: lm_eval

    protocol = tasks.Protocol(tasks.GSM8K, chat, shots, max_tokens, limit, concurrency)
    _accuracy(server, judged, protocol, data_dir, published)


@app.command("tiny-math", epilog="Example: kimi-w4a8 eval tiny-math --recipe tiny")
@expanded
def tiny_math(
    *,
    server: Served,
    limit: int = typer.Option(300, "--limit", min=1, help="Held-out problems to ask."),
    concurrency: int = typer.Option(32, "--concurrency", "-c", min=1, help="Requests in flight."),
    judged: Judged,
) -> None:
    """Run the built-in model's own task in the same way.

    It is judged against the accuracy recorded for that model.
    """
    require_packages()
    from ..accuracy import tasks  # optional: lm_eval

    _accuracy(server, judged, tasks.Protocol(tasks.TINY_MATH, True, 0, tasks.TINY_MATH.max_tokens, limit, concurrency))


@app.command("tools", epilog="Example: kimi-w4a8 eval tools --base-url http://127.0.0.1:9527")
@expanded
def tools(
    *,
    server: Served,
    data: str | None = typer.Option(
        None, "--data", help="Requests: a JSONL file, or hf://datasets/OWNER/REPO/FILE; default: built-in problems."
    ),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Number of requests, from the first."),
    stream: bool | None = typer.Option(None, "--stream/--no-stream", help="Default: as each request asks."),
    extra: str = typer.Option("{}", "--extra", help="JSON added to every request, e.g. '{\"temperature\": 1.0}'."),
    tokenizer: str | None = typer.Option(
        None, "--tokenizer", help="Folder of the checkpoint, to count prompts; default: the server's, if it is here."
    ),
    max_tokens: int = typer.Option(2048, "--max-tokens", min=1, help="Most tokens of a check's tool call."),
    concurrency: int = typer.Option(32, "--concurrency", "-c", min=1, help="Requests in flight."),
    baseline: Path | None = typer.Option(None, "--baseline", help="Run directory whose answers are the reference."),
    published: str | None = typer.Option(None, "--published", help="Judge against this table of the vendor."),
    min_similarity: float | None = typer.Option(None, min=0.0, max=1.0, help="F1 of calling; default: the table's."),
    kept: Kept,
) -> None:
    """Measure tool calls as the vendor's verifiers do.

    They check triggers, schemas, parameters and prompt token counts.
    """
    require_packages()
    from ..accuracy import tool_run  # optional: lm_eval

    asked = tool_run.ToolPlan(data, limit, stream, _object(extra), max_tokens, concurrency)
    target, plan = _planned(server, kept.resume, asked)
    judging = tool_run.Judging(
        baseline=baseline, published=published, min_similarity=min_similarity, tokenizer=tokenizer, **vars(kept)
    )
    _conclude(kept.runs, lambda: tool_run.run(target, plan, judging, table_console()))


def _object(text: str) -> dict[str, Any]:
    try:
        return TypeAdapter(dict[str, Any]).validate_json(text)
    except ValidationError as error:
        raise UsageError(f"not a JSON object: {error.errors()[0]['msg']}", "--extra", '{"temperature": 1.0}') from None


@app.command("lossless", epilog="Example: kimi-w4a8 eval lossless --recipe agent")
@expanded
def lossless(
    *,
    server: Served,
    reference_url: str | None = typer.Option(
        None, "--reference-url", help="Server of the same model without speculation."
    ),
    prompts: int = typer.Option(48, "--num-prompts", min=6, help="Chat, maths, code, long, short, non-ASCII in turn."),
    max_tokens: int = typer.Option(128, "--max-tokens", min=2, help="Tokens compared per prompt."),
    samples: int = typer.Option(400, "--samples", min=0, help="Sampled continuations per prefix; 0: greedy only."),
    exact: bool = typer.Option(
        False, "--exact", help="Compare bit for bit, with logprobs and no rule for ties: the built-in model on a CPU."
    ),
    ask: Literal["greedy", "seeded", "penalized", "mixed"] | None = typer.Option(
        None, "--ask", help="With --exact: the kind of requests; default: mixed."
    ),
    runs: Path = RUNS,
) -> None:
    """Check that speculation changes no answer.

    It compares greedy tokens, logprobs with those of a prefill, and samples.
    """
    require_packages()
    from ..accuracy import lossless as lossless_check  # optional: lm_eval

    if (server.base_url is None) != (reference_url is None):
        raise UsageError("give --base-url and --reference-url together", expected="two servers, or one --recipe")
    if ask and not exact:
        raise UsageError("--ask needs --exact", expected="--exact --ask KIND; without --exact all kinds are asked")
    target = replace(server.target(), runs=runs)
    if target.launch and target.launch.draft is None:
        raise UsageError("the recipe has no draft", f"--recipe {target.recipe}", "a recipe with [draft]")
    reference = replace(target, base_url=reference_url).plain()
    if exact:
        compare = require_laptop("exact", "--exact")
        words = (prompts, max_tokens, ask or "mixed", runs, table_console())
        _conclude(runs, lambda: compare(reference, target, *words)[0])
    plan = lossless_check.LosslessPlan(prompts, max_tokens, samples, runs=runs)
    _conclude(runs, lambda: lossless_check.run(reference, target, plan, table_console())[0])


@app.command("smoke", epilog="Example: kimi-w4a8 eval smoke --base-url http://127.0.0.1:9527")
@expanded
def smoke(
    *,
    server: Served,
    limit: int = typer.Option(30, "--limit", min=1, help="Problems to ask."),
    max_tokens: int = typer.Option(512, "--max-tokens", min=16, help="Most tokens of an answer."),
    min_correct: float = typer.Option(0.6, "--min-correct", min=0.0, max=1.0, help="Share of problems to solve."),
    min_accept_length: float = typer.Option(2.0, "--min-accept-length", min=1.0, help="Tokens per verify step."),
    no_speculation: bool = typer.Option(False, "--no-speculation", help="With --base-url: the server has no draft."),
    runs: Path = RUNS,
) -> None:
    """Check a server's failures, answers and drafts."""
    require_packages()
    from ..accuracy import smoke as smoke_check  # optional: lm_eval

    target = server.target()
    drafts = bool(target.launch.draft) if target.launch else not no_speculation
    floors = smoke_check.Floors(limit, max_tokens, 8, min_correct, min_accept_length, drafts)
    _conclude(runs, lambda: smoke_check.run(target, floors, table_console(), runs)[0])


def _planned(server: Served, resume: Path | None, plan: P) -> tuple[Target, P]:
    """Return the server and the plan of a run; those of the run to resume, unless another server is named."""
    if resume is None:
        return server.target(), plan
    run = RunFolder[object].resume(resume)
    earlier, plan = run.record, run.plan(type(plan))
    model = server.model or earlier.get("model")  # all answers of a run must come from one model
    if server.base_url is None and server.recipe is None:
        key = client_key(server.api_key_file, os.environ)
        return Target(**{**earlier["targets"]["server"], "model": model, "api_key": key}), plan
    return replace(server, model=model).target(), plan


def _accuracy(
    server: Served,
    judged: Judged,
    protocol: Protocol,
    data_dir: Path | None = None,
    published: str | None = None,
) -> None:
    from ..accuracy import accuracy  # optional: lm_eval

    target, protocol = _planned(server, judged.resume, protocol)
    earlier = RunFolder[object].resume(judged.resume).record if judged.resume else {}
    if earlier.get("data_dir"):
        data_dir = data_dir or Path(earlier["data_dir"])
    options = RunOptions(data_dir=data_dir, published=published, **vars(judged))
    _conclude(judged.runs, lambda: accuracy.run(target, protocol, options, table_console()))


def _conclude(runs: Path, evaluate: Callable[[], Path]) -> NoReturn:
    """Evaluate, print the result, write the page, name the next command, and exit with the verdict's code."""
    with signals(runs):
        folder = evaluate()
    result = RunFolder[EvalResult].open(folder, *RESULTS).result
    conclude(evaluation.page(folder, result), folder)
    typer.echo(f"next: {command()} report {folder}   # add runs of bench for one page of speed and answers")
    raise typer.Exit(result.verdict.state.exit_code)
