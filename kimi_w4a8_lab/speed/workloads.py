"""Named workloads of `bench/workloads.toml`, checked and expanded to single measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.files import read_toml
from kimi_w4a8_eagle3.base.installed import operator_dir
from kimi_w4a8_eagle3.base.nearest import nearest

from ..base.first_error import first_error

Positive = Annotated[int, Field(gt=0)]
CHAT_BACKEND = "sglang-oai-chat"
AGENT_DATASET = ("--dataset-name", "agentic-trace")


class Workload(BaseModel):
    """One workload; lengths in tokens. `random` repeats text to `input_len`, `conversations` sends it unchanged.

    `agent`: a prompt is a conversation of `turns` messages after a shared system prompt of `system_words`.
    The messages alternate between questions and tool results of `turn_words`, with the server's answers in between.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    summary: str
    dataset: Literal["random", "conversations", "agent"]
    text: Literal["sharegpt", "problems", "file"]
    input_len: Positive | None = None
    turns: Annotated[int, Field(ge=1)] = 1
    turn_words: Positive | None = None
    system_words: Positive | None = None
    output_len: Annotated[int, Field(ge=4)]
    range_ratio: float = Field(default=1.0, ge=0, le=1)
    concurrency: Annotated[list[Positive], Field(min_length=1)]
    num_prompts: Positive | None = None
    prompts_per_concurrency: Positive | None = None
    warmups: int = Field(default=1, ge=0)
    warmups_per_concurrency: Positive | None = None
    seeds: Annotated[list[int], Field(min_length=1)] = [42]
    chat_template: bool = False
    ignore_eos: bool = True
    reference: str | None = Field(default=None, description="point of bench/published that this reproduces")
    compares: str = Field(default="", description="figures of others that this workload's may stand beside")

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        if (self.num_prompts is None) == (self.prompts_per_concurrency is None):
            raise ValueError("give either num_prompts or prompts_per_concurrency")
        if (self.dataset == "random") != (self.input_len is not None):
            raise ValueError("input_len belongs to the dataset 'random', and only to it")
        of_agents = (self.turns > 1, self.turn_words is not None, self.system_words is not None)
        if set(of_agents) != {self.dataset == "agent"}:
            raise ValueError(
                "turns (2 or more), turn_words and system_words belong to the dataset 'agent', and only to it"
            )
        return self

    @property
    def context_len(self) -> int | None:
        """Tokens that one request needs in the server's context; None if the text decides."""
        return None if self.input_len is None else self.input_len + self.output_len

    @property
    def backend(self) -> str:
        """The generator's client. Only `conversations` can apply a chat template without the chat endpoint."""
        chat = self.dataset == "agent" or (self.dataset == "random" and self.chat_template)
        return CHAT_BACKEND if chat else "sglang"

    def points(self) -> list[Point]:
        """Return one measurement for each concurrency and seed, seeds innermost."""
        return [
            Point(
                workload=self,
                concurrency=concurrency,
                num_prompts=self.num_prompts or concurrency * (self.prompts_per_concurrency or 1),
                warmups=concurrency * self.warmups_per_concurrency if self.warmups_per_concurrency else self.warmups,
                seed=seed,
            )
            for concurrency in self.concurrency
            for seed in self.seeds
        ]


@dataclass(frozen=True)
class Point:
    """One run of the load generator."""

    workload: Workload
    concurrency: int
    num_prompts: int
    warmups: int
    seed: int

    @property
    def requests(self) -> int:
        """Requests that the server gets after the warm-up."""
        return len(self.turn_numbers)

    @property
    def turn_numbers(self) -> list[int]:
        """Number of each request in its conversation, from 0, in the order of the generator's output."""
        return [number for _ in range(self.num_prompts) for number in range(self.workload.turns)]

    @property
    def label(self) -> str:
        return f"{self.workload.name}-c{self.concurrency}-s{self.seed}"

    def arguments(self, dataset: Path) -> list[str]:
        """Return the options of `sglang.benchmark.serving` for this point, without server, model and output.

        For `con2` and `con40` these are the published commands, plus the generator's default seed and warm-up, the
        dataset's path, and --output-details.
        """
        work = self.workload
        words = ["--backend", work.backend, "--dataset-path", str(dataset), "--request-rate", "inf"]
        words += ["--num-prompts", str(self.num_prompts), "--max-concurrency", str(self.concurrency)]
        words += ["--warmup-requests", str(self.warmups), "--seed", str(self.seed), "--output-details"]
        if work.dataset == "random":
            words += ["--dataset-name", "random", "--random-input-len", str(work.input_len)]
            words += ["--random-output-len", str(work.output_len), "--random-range-ratio", str(work.range_ratio)]
        elif work.dataset == "agent":  # start cold, without the warm-up's prefixes
            words += [*AGENT_DATASET, "--sharegpt-output-len", str(work.output_len), "--flush-cache", "--cache-report"]
        else:
            words += ["--dataset-name", "custom", "--sharegpt-output-len", str(work.output_len)]
            words += ["--apply-chat-template"] if work.chat_template else []
        if work.backend == CHAT_BACKEND:
            words += ["--extra-request-body", json.dumps({"stream_options": {"include_usage": True}})]
        return words if work.ignore_eos else [*words, "--disable-ignore-eos"]


def workload_names() -> list[str]:
    return list(read_toml(_packaged()))


def load_workload(name_or_path: str) -> Workload:
    """Load a packaged workload by name, or the only one in the user's TOML file.

    Raises KimiError for an unknown name, invalid TOML, an unknown key or a bad value.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path).expanduser()
        tables = read_toml(path)
        if [type(table) for table in tables.values()] != [dict]:
            raise KimiError(f"{len(tables)} workloads in one file", where=str(path), expected="exactly one [table]")
        name = next(iter(tables))
    else:
        path, name = _packaged(), name_or_path
        tables = read_toml(path)
        if name not in tables:
            raise UsageError(
                f"unknown workload {name!r}{nearest(name, tables)}",
                where="kimi-w4a8 bench",
                expected=", ".join(tables),
                remedy="name a workload, or a .toml file with one workload",
            )
    return _validate({"name": name, **tables[name]}, str(path))


def with_changes(workload: Workload, **wanted: Any) -> Workload:
    """Apply the command line's changes; a workload with more than other seeds refers to no published point any more.

    wanted: values of fields; None or an empty list leaves a field as it is.
    """
    changes = {name: value for name, value in wanted.items() if value not in (None, [])}
    if "num_prompts" in changes:
        changes["prompts_per_concurrency"] = None
    if changes.keys() - {"seeds"}:
        changes |= {"reference": None, "compares": ""}
    return _validate({**workload.model_dump(), **changes}, "the command line", UsageError)


def _packaged() -> Path:
    return operator_dir("bench") / "workloads.toml"


def _validate(table: dict[str, Any], where: str, kind: type[KimiError] = KimiError) -> Workload:
    try:
        return Workload.model_validate(table)
    except ValidationError as error:
        valid = [name for name in Workload.model_fields if name != "name"]
        what = f"workload {table['name']}: {first_error(error, valid)}"
        raise kind(what, where, f"values of {', '.join(valid)}") from None
