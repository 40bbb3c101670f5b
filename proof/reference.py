"""`python -m proof.reference`: bounds, fields, variables and metrics as the code has them, into docs/reference.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

import kimi_w4a8_eagle3
from kimi_w4a8_eagle3.gateway import (
    bodies,
    completions,
    exchange,
    grammar,
    limits,
    mask_walk,
    pictures,
    requests,
    trials,
)
from kimi_w4a8_eagle3.gateway.__main__ import KEEP_ALIVE_S
from kimi_w4a8_eagle3.gateway.config import GatewayConfig
from kimi_w4a8_eagle3.gateway.connections import MAX_HEADERS, ClientProtocol
from kimi_w4a8_eagle3.gateway.endpoints import ENDPOINTS
from kimi_w4a8_eagle3.gateway.settings import VARIABLES, Settings

_SETTINGS: dict[str, Any] = {one.name: one.default for one in fields(Settings)}
PAGE = Path(__file__).parents[1] / "docs/reference.md"
BEGIN, END = "<!-- tables: begin (python -m proof.reference) -->\n", "<!-- tables: end -->"
_CONFIG = GatewayConfig("", "")
# Subject, bound, and the status of a request beyond it.
_BOUNDS: list[tuple[str, str, str]] = [
    ("headers", f"{MAX_HEADERS}, {ClientProtocol.max_header_bytes >> 10} KiB in all", "connection closed"),
    ("time to send headers", f"{ClientProtocol.deadline_s:.0f} s", "connection closed"),
    ("time to send the body", f"{exchange.BODY_S:.0f} s", "408"),
    ("an idle connection", f"{KEEP_ALIVE_S} s", "connection closed"),
    ("body", f"{_CONFIG.max_body_bytes >> 20} MiB (`KIMI_MAX_BODY_BYTES`)", "413"),
    ("unread bodies of one key, per worker", f"{limits.MAX_UNREAD_BYTES >> 20} MiB", "429"),
    ("values in a body", f"{bodies.MAX_VALUES:,}", "413"),
    ("fields of a body", f"{bodies.MAX_FIELDS}", "400"),
    ("entries of an array without token ids, or of an object", f"{bodies.MAX_ENTRIES:,}", "400"),
    ("nested arrays and objects", f"{bodies.MAX_DEPTH}", "400"),
    ("text and field names", f"{bodies.CHARACTERS_PER_TOKEN} characters per context token", "400"),
    ("prompt and answer", "the context; `KIMI_MAX_PROMPT_TOKENS` bounds the prompt further", "400"),
    ("prompts of one text completion", f"max(context, {completions.MAX_BATCH_TOKENS:,}) tokens", "400"),
    ("prompts times `n`", f"{requests.MAX_SEQUENCES}", "400"),
    ("requests of one key at a time", "any number; `KIMI_MAX_CONCURRENT_REQUESTS` bounds them", "429"),
    ("`stop`", f"{requests.MAX_STOPS} texts of {requests.MAX_STOP:,} characters", "400"),
    ("logprobs of an answer", f"{limits.MAX_WHOLE_LOGPROBS:,}, streamed {limits.MAX_LOGPROBS:,}", "400"),
    ("logprobs per token of one key's running answers, per worker", f"{limits.MAX_CANDIDATES}", "429"),
    ("schemas in the tools of a request", f"{grammar.MAX_SCHEMAS:,}", "400"),
    ("text of a grammar", f"{grammar.MAX_GRAMMAR_CHARACTERS:,} characters", "400"),
    ("memory of a compiled grammar", f"{mask_walk.MAX_GRAMMAR_BYTES >> 20} MiB", "400"),
    ("CPU time of one token's mask", f"{_CONFIG.max_mask_ms:.0f} ms (`KIMI_MAX_MASK_MS`)", "400"),
    ("pictures of a request", f"{pictures.MAX_PICTURES}, together {pictures.MAX_PIXELS:,} pixels", "400"),
    ("time to try a grammar or pictures", f"{trials.TRIAL_S:.0f} s", "400"),
    ("waiting trials, per worker", f"{trials.MAX_WAITING}", "503"),
]
_EFFECTS = {
    "KIMI_API_KEY": "the key of all clients",
    "KIMI_API_KEY_FILE": "file of keys, one a line, as `KEY` or `NAME KEY`; read again when it changes",
    "KIMI_MAX_BODY_BYTES": "a larger body gets 413",
    "KIMI_MAX_PROMPT_TOKENS": "a longer prompt gets 400; 0: the context",
    "KIMI_MAX_CONCURRENT_REQUESTS": "more requests of one key, over all workers, get 429; 0: any number",
    "KIMI_MAX_MASK_MS": "a grammar whose mask takes more CPU time gets 400",
}
_DEFAULTS = {
    "KIMI_MAX_BODY_BYTES": "max_body_bytes", "KIMI_MAX_PROMPT_TOKENS": "max_prompt_tokens",
    "KIMI_MAX_CONCURRENT_REQUESTS": "max_running", "KIMI_MAX_MASK_MS": "max_mask_ms",
}  # fmt: skip


def tables() -> str:
    """Return all tables as Markdown."""
    parts = [
        _table(("subject", "limit", "if exceeded"), _BOUNDS),
        "## Endpoints and fields\nOther paths return 404. Clients' paths need a key, if set. null means absent.\n",
        _table(("path", "methods", "open to"), _endpoints()),
        _table(("path", "fields"), _bodies()),
        "Fields in no table are dropped and counted. Paths without these fields refuse or drop them:\n",
        _table(("field", "what happens"), _others()),
        "## Variables\nSet one for a server with `--set env.NAME=VALUE`. `kimi-w4a8 gates` prints all others.\n",
        _table(("variable", "default", "effect"), _variables()),
        "## Metrics\nSGLang's own (`sglang:*`) keep their names.\n",
        _table(("metric", "meaning"), sorted(set(metrics()))),
    ]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join((lines[0], "|---" * len(head) + "|", *lines[1:], ""))


def _endpoints() -> Iterator[tuple[str, ...]]:
    """Yield the paths that are open to the same callers by the same methods."""
    rows: dict[tuple[str, str], list[str]] = {}
    for path, row in ENDPOINTS.items():
        rows.setdefault((row.who, ", ".join(row.methods)), []).append(f"`{path}`")
    for (who, methods), paths in rows.items():
        yield " ".join(paths), methods, who


def _bodies() -> Iterator[tuple[str, ...]]:
    """Yield each class of bodies with those that have its fields, too, and with its own fields."""
    found = [row.body for row in ENDPOINTS.values() if row.body is not None]
    classes = dict.fromkeys(one for body in found for one in reversed(body.__mro__) if issubclass(one, requests.Body))
    for one in classes:
        heirs = dict.fromkeys(str(body.__doc__) for body in found if issubclass(body, one))
        own = [_field(name, one.model_fields[name]) for name in one.__annotations__ if name in one.model_fields]
        yield "all" if len(heirs) == len(dict.fromkeys(found)) else ", ".join(heirs), " ".join(own)


def _field(name: str, one: FieldInfo) -> str:
    """Return a field with its range; an optional type has the rules inside."""
    inner = [getattr(part, "__metadata__", [None])[0] for part in getattr(one.annotation, "__args__", ())]
    rules = [*one.metadata, *(rule for info in inner for rule in getattr(info, "metadata", ()))]
    least = next((rule.ge for rule in rules if getattr(rule, "ge", None) is not None), None)
    most = next((rule.le for rule in rules if getattr(rule, "le", None) is not None), None)
    wide = most is None or most >= 2**31 - 1
    return (
        f"`{name}`"
        if least is None or wide
        else f"`{name}` ({'above 0' if 0 < least < 0.01 else f'{least:g}'} to {most:g})"
    )


def _others() -> Iterator[tuple[str, ...]]:
    for table, verb in ((requests.REFUSED, "400"), (requests.CLOSED, "400"), (requests.HARMLESS, "dropped")):
        reasons: dict[str, list[str]] = {}
        for name, why in table.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            yield " ".join(f"`{name}`" for name in names), f"{verb}: {why}"


def _variables() -> Iterator[tuple[str, ...]]:
    for name in VARIABLES:
        default = _SETTINGS[_DEFAULTS[name]] if name in _DEFAULTS else "-"
        yield f"`{name}`", str(default), _EFFECTS[name]


def metrics() -> Iterator[tuple[str, str]]:
    """Yield name and help text of every metric that the package defines, found in its sources."""
    for path in sorted(Path(kimi_w4a8_eagle3.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        defined = [part for part in tree.body if isinstance(part, ast.Assign)]
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for scope in (ast.Module(list[ast.stmt](defined), []), *functions):
            texts = {ast.unparse(one.targets[0]): one.value for one in ast.walk(scope) if isinstance(one, ast.Assign)}
            for call in ast.walk(scope):
                if isinstance(call, ast.Call):
                    yield from _metric(call, texts)


def _metric(call: ast.Call, texts: Mapping[str, ast.expr]) -> Iterator[tuple[str, str]]:
    given = [*call.args, *(word.value for word in call.keywords)]
    strings = [_string(texts.get(ast.unparse(node), node)) for node in given]
    for name, text in pairwise(strings):
        if re.fullmatch("kimi_[a-z_]+", name) and " " in text:
            counts = "Counter" in ast.unparse(call) and not name.endswith("_total")
            yield f"`{name}{'_total' if counts else ''}`", text.rstrip(".")


def _string(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


if __name__ == "__main__":
    before, after = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + after[after.index(END) :])
