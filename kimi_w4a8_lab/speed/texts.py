"""Text of a workload: read, checked, and written in the load generator's format.

The generator silently drops unusable texts and then sends fewer requests than asked, so every file is checked before a
server is contacted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.files import read_text

from ..accuracy.problems import MOST, problems
from ..base.data_file import HUB_PREFIX, data_file
from .workloads import Workload

Pair = tuple[str, str]

SHAREGPT = f"{HUB_PREFIX}anon8231489123/ShareGPT_Vicuna_unfiltered/ShareGPT_V3_unfiltered_cleaned_split.json"
_INSTEAD = "give a local file: --sharegpt FILE, or --prompts-file FILE for text of your own"
_FORMATS = "ShareGPT .json, .jsonl with conversations, question/answer or prompt/response, or .txt paragraphs"
_QUESTION_KEYS = ("question", "prompt", "instruction", "input")
_ANSWER_KEYS = ("answer", "response", "completion", "output")
# More conversations than any workload needs; reading the rest of a 600 MB file only takes time.
_MOST = 20_000
# More problems than needed are drawn, so that other seeds send other prompts.
_SPARE = 8
# A turn in Kimi's chat format with empty thinking, on which the built-in model was trained.
_DOCUMENT = (
    "<|im_user|>user<|im_middle|>{question}<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think></think>{solution}<|im_end|>"
)


@dataclass(frozen=True)
class Texts:
    """Sources of text. sharegpt: a file, by default the Hub's. prompts: the user's own text instead."""

    sharegpt: str | None = None
    prompts: str | None = None

    def on_hub(self, workload: Workload) -> bool:
        """True if the text of `workload` may have to be downloaded."""
        sharegpt = self.sharegpt or SHAREGPT if workload.text == "sharegpt" else ""
        return (self.prompts or sharegpt).startswith(HUB_PREFIX)

    def prepare(self, workload: Workload) -> Path | str:
        """Return the dataset of `workload` for the generator: a file that is there, or the content of a new one.

        Raises KimiError when a file is missing, malformed or has too few usable texts.
        """
        needed = max(point.num_prompts for point in workload.points())
        if self.prompts is not None:
            source, pairs = self.prompts, read_pairs(data_file(self.prompts, _INSTEAD))
        elif workload.text == "problems":
            documents = workload.dataset == "random"
            source, pairs = "the built-in problems", _problems(_SPARE * needed, as_document=documents)
        elif workload.text == "sharegpt":
            path = data_file(self.sharegpt or SHAREGPT, _INSTEAD)
            source, pairs = str(path), read_pairs(path)
            if workload.dataset == "random":
                _require(pairs, needed, source)
                return path.resolve()
        else:
            raise UsageError(
                f"the workload {workload.name!r} needs a file of prompts",
                where="kimi-w4a8 bench",
                expected=_FORMATS,
                remedy="name one with --prompts-file FILE (or hf://datasets/OWNER/NAME/FILE)",
            )
        _require(pairs, needed, source, workload.turns)
        if workload.dataset == "agent":
            return json.dumps({"conversations": _agents(pairs, needed, workload, source)})
        return _dataset(pairs, workload)


def placed(dataset: Path | str, folder: Path, name: str) -> Path:
    """Return the path of a dataset; a new one is written below `folder`, in its folder `name` if there is one."""
    if isinstance(dataset, Path):
        return dataset
    (folder / name).mkdir(exist_ok=True)
    path = (folder / name / "texts.json").resolve()
    path.write_text(dataset)
    return path


def read_pairs(path: Path) -> list[Pair]:
    """Read (user text, answer) pairs of a file in one of `_FORMATS`; the answer may be empty."""
    content = read_text(path, "the text file", _FORMATS)
    if path.suffix == ".txt":
        pairs = [(block.strip(), "") for block in content.split("\n\n") if block.strip()]
    else:
        pairs = _from_json(content, path)
    if not pairs:
        raise KimiError("no usable text in the file", where=str(path), expected=_FORMATS)
    return pairs


def _from_json(content: str, path: Path) -> list[Pair]:
    try:
        if path.suffix == ".jsonl":
            rows: Any = [json.loads(line) for line in content.splitlines() if line.strip()]
        else:
            rows = json.loads(content)
    except ValueError as error:
        raise KimiError(
            f"not valid JSON: {error}",
            where=str(path),
            expected=_FORMATS,
            remedy="the file is incomplete or of another format: fetch it again",
        ) from None
    if not isinstance(rows, list):
        raise KimiError(f"a JSON {type(rows).__name__} instead of a list", where=str(path), expected=_FORMATS)
    return [pair for row in rows[:_MOST] if isinstance(row, dict) and (pair := _pair(row))]


def _pair(row: dict[str, Any]) -> Pair | None:
    turns = row.get("conversations") or row.get("conversation")
    if isinstance(turns, list):
        texts = [str(turn.get("value") or turn.get("content") or "") for turn in turns if isinstance(turn, dict)]
        return (texts[0], texts[1]) if len(texts) >= 2 and texts[0] else None
    question = next((row[key] for key in _QUESTION_KEYS if row.get(key)), None)
    answer = next((row[key] for key in _ANSWER_KEYS if row.get(key)), "")
    return (str(question), str(answer)) if question else None


def _require(pairs: list[Pair], prompts: int, source: str, turns: int = 1) -> None:
    if len(pairs) < (needed := prompts * turns):
        fewer = len(pairs) // turns
        raise KimiError(
            f"{len(pairs)} usable texts, but the workload sends {needed} different prompts",
            where=source,
            expected=f"at least {needed}",
            remedy="use a larger file" + (f", or add --num-prompts {fewer}" if fewer else ""),
        )


def _agents(pairs: list[Pair], needed: int, workload: Workload, source: str) -> list[list[dict[str, Any]]]:
    """Return each user's messages by turn in the form of SGLang's `agentic-trace`. No text is sent twice.

    A tool result is a user message, because the generator returns answers as text, without the calls that a message of
    the role `tool` would need.
    """
    left = iter(pairs)
    words: list[str] = []
    while len(words) < (workload.system_words or 0) and (pair := next(left, None)):
        words += " ".join(pair).split()
    system = {"role": "system", "content": " ".join(words[: workload.system_words])}
    turns = list(islice(left, needed * workload.turns))
    _require(turns, needed, f"{source}, after the system prompt", workload.turns)
    conversations = []
    for user in range(needed):
        said = turns[user * workload.turns : (user + 1) * workload.turns]
        texts = [f"Result of the tool: {answer}" if at % 2 else question for at, (question, answer) in enumerate(said)]
        cut = ({"role": "user", "content": " ".join(text.split()[: workload.turn_words])} for text in texts)
        conversations.append([{"messages": [*([] if at else [system]), message]} for at, message in enumerate(cut)])
    return conversations


def _problems(needed: int, as_document: bool) -> list[Pair]:
    """Return built-in problems as pairs; as documents they have the chat format on which the model was trained."""
    drawn = problems(min(needed, MOST), seed=7)
    if as_document:
        return [(_DOCUMENT.format(question=p.question, solution=p.solution), p.solution) for p in drawn]
    return [(problem.question, problem.solution) for problem in drawn]


def _dataset(pairs: Iterable[Pair], workload: Workload) -> str:
    """Return ShareGPT JSON for `random`, or `custom` JSONL for conversations; the generator skips empty answers."""
    filled = [(user, answer or "(no answer)") for user, answer in pairs]
    if workload.dataset == "random":
        return json.dumps([{"conversations": [{"value": user}, {"value": answer}]} for user, answer in filled])
    lines = [{"conversations": [{"content": user}, {"content": answer}]} for user, answer in filled]
    return "".join(json.dumps(line) + "\n" for line in lines)
