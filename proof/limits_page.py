"""The tables of docs/request-limits.md: endpoints with their fields, and every bound, as the gateway's code has them.

python -m proof.limits_page
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

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
from kimi_w4a8_eagle3.gateway.endpoints import ENDPOINTS, Endpoint
from kimi_w4a8_eagle3.gateway.requests import CLOSED, HARMLESS, REFUSED

PAGE = Path(__file__).parents[1] / "docs/request-limits.md"
BEGIN, END = "<!-- tables: begin (python -m proof.limits_page) -->\n", "<!-- tables: end -->"
_CONFIG = GatewayConfig("", "")
# Subject, bound, and the status of a request beyond it.
_BOUNDS: list[tuple[str, str, str]] = [
    ("headers", f"{MAX_HEADERS}, together {ClientProtocol.max_header_bytes >> 10} KiB", "closed"),
    ("time to send the headers", f"{ClientProtocol.deadline_s:.0f} s", "closed"),
    ("time to send the body", f"{exchange.BODY_S:.0f} s", "408"),
    ("an idle connection", f"{KEEP_ALIVE_S} s", "closed"),
    ("body", f"{_CONFIG.max_body_bytes >> 20} MiB (`KIMI_MAX_BODY_BYTES`)", "413"),
    ("bodies of one key that arrive or wait, in a worker", f"{limits.MAX_UNREAD_BYTES >> 20} MiB", "429"),
    ("values in a body", f"{bodies.MAX_VALUES:,}", "413"),
    ("fields of a body", f"{bodies.MAX_FIELDS}", "400"),
    ("entries of an array without token ids, or of an object", f"{bodies.MAX_ENTRIES:,}", "400"),
    ("nested arrays and objects", f"{bodies.MAX_DEPTH}", "400"),
    ("text", f"{bodies.CHARACTERS_PER_TOKEN} characters for each token of the context", "400"),
    ("prompt and answer", "the context; `KIMI_MAX_PROMPT_TOKENS` bounds the prompt further", "400"),
    ("prompts of one text completion", f"{completions.MAX_BATCH_TOKENS:,} tokens, or the context", "400"),
    ("prompts times `n`", f"{requests.MAX_SEQUENCES}", "400"),
    ("requests of one key at a time", "any number; `KIMI_MAX_CONCURRENT_REQUESTS` bounds them", "429"),
    ("`stop`", f"{requests.MAX_STOPS} texts of {requests.MAX_STOP:,} characters", "400"),
    ("logprobs of an answer", f"{limits.MAX_WHOLE_LOGPROBS:,}, streamed {limits.MAX_LOGPROBS:,}", "400"),
    ("logprobs a token of all streams of one key, in a worker", f"{limits.MAX_CANDIDATES}", "429"),
    ("schemas in the tools of a request", f"{grammar.MAX_SCHEMAS:,}", "400"),
    ("text of a grammar", f"{grammar.MAX_GRAMMAR_CHARACTERS:,} characters", "400"),
    ("memory of a compiled grammar", f"{mask_walk.MAX_GRAMMAR_BYTES >> 20} MiB", "400"),
    ("CPU time of one token's mask", f"{_CONFIG.max_mask_ms:.0f} ms (`KIMI_MAX_MASK_MS`)", "400"),
    ("pictures of a request", f"{pictures.MAX_PICTURES}, together {pictures.MAX_PIXELS:,} pixels", "400"),
    ("time of a trial of a grammar or of pictures", f"{trials.TRIAL_S:.0f} s", "400"),
    ("trials that wait, in a worker", f"{trials.MAX_WAITING}", "503"),
]


def tables() -> str:
    """Return all tables as Markdown."""
    parts = [
        _table(("subject", "bound", "beyond it"), _BOUNDS),
        "## Endpoints",
        _table(("endpoint", "methods", "needs a key", "fields that it reads"), _endpoints()),
        "## Ranges of numbers",
        _table(("field", "range"), sorted(_ranges().items())),
        "## Fields that no answer depends on",
        "They are dropped and counted. So is every field that is in no table here.",
        _table(("fields", "reason"), _by_reason(HARMLESS)),
        "## Fields that are refused",
        _table(("fields", "reason"), _by_reason({**REFUSED, **CLOSED})),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head], ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _endpoints() -> list[tuple[str, ...]]:
    return [
        (f"`{row.path}`", ", ".join(row.methods), "no" if row.who == "everyone" else "yes", _fields(row))
        for row in ENDPOINTS.values()
    ]


def _fields(row: Endpoint) -> str:
    return ", ".join(f"`{name}`" for name in sorted(row.body.model_fields)) if row.body else ""


def _ranges() -> dict[str, str]:
    found: dict[str, set[str]] = defaultdict(set)
    for row in ENDPOINTS.values():
        for name, field in row.body.model_fields.items() if row.body else ():
            if shown := _range(field):
                found[f"`{name}`"].add(shown)
    return {name: " or ".join(sorted(shown)) for name, shown in found.items()}


def _range(field: FieldInfo) -> str:
    limits_of: dict[str, Any] = {}
    for one in [*field.metadata, *(more for part in getattr(field.annotation, "__args__", ()) for more in
                                   getattr(getattr(part, "__metadata__", [None])[0], "metadata", ()))]:  # fmt: skip
        limits_of |= {name: getattr(one, name) for name in ("ge", "le") if getattr(one, name, None) is not None}
    if not limits_of:
        return ""
    least, most = limits_of.get("ge", "any"), limits_of.get("le", "any")
    return f"{_number(least)} to {_number(most)}"


def _number(value: Any) -> str:
    return {2.0**-126: "2^-126", 2**31 - 1: "2^31 - 1"}.get(value, str(value))


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    names: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(f"`{name}`")
    return [(", ".join(sorted(those)), reason) for reason, those in names.items()]


def main() -> None:
    """Write the tables into the page."""
    before, after = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + after[after.index(END) :])


if __name__ == "__main__":
    main()
