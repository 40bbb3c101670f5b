"""Send every request to a server and compare the replies with what the vendors' documents say: the table of a base URL.

python -m proof.conformance http://127.0.0.1:9527 [--key KEY]
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import run

from .cases import cases
from .forms import ABSENT, Case, Request
from .replies import Reply

_TIMEOUT_S = 300.0


def main(
    base_url: str = typer.Argument(help="Address of a server, without /v1."),
    key: str = typer.Option("", help="A key of the server, where it needs one.", envvar="KIMI_API_KEY"),
    model: str = typer.Option("", help="Name of the model; by default the first one that the server lists."),
    only: list[str] = typer.Option([], help="Kinds of requests, as the table names them."),
    concurrency: int = typer.Option(4, min=1, help="Requests at a time."),
) -> None:
    """Print the table and every failure; exit 1 when a reply was not as expected."""

    async def all_of_them() -> tuple[list[Case], dict[Case, str]]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, limits=limits) as http:
            named = model or await _first_model(http)
            chosen = [case for case in cases(bool(key)) if not only or case.kind in only]
            return chosen, await failures(http, named, chosen, concurrency)

    chosen, failed = asyncio.run(all_of_them())
    console = Console()
    for case, why in failed.items():
        console.print(f"[red]✗[/] {escape(f'{case.kind}, {case.api}, {case.name}: {why}')}", soft_wrap=True)
    console.print(_table(chosen, failed))
    raise typer.Exit(1 if failed else 0)


async def _first_model(http: httpx.AsyncClient) -> str:
    """Return the first name that the server lists; raise KimiError where it lists none."""
    try:
        answer = await http.get("/v1/models")
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        what = f"the server does not answer: {type(error).__name__} {error}".rstrip()
    except (ValueError, KeyError, IndexError, TypeError):
        what = f"/v1/models lists no model: status {answer.status_code}"
    raise KimiError(what, str(http.base_url), "a server of one of the three APIs", "check the address, or give --model")


async def failures(http: httpx.AsyncClient, model: str, chosen: Sequence[Case], concurrency: int) -> dict[Case, str]:
    """Return the cases whose replies were not as expected, each with the reason."""
    places, failed = asyncio.Semaphore(concurrency), dict[Case, str]()

    async def one(case: Case) -> None:
        async with places:
            try:
                case.check(*[await _reply(http, model, request) for request in case.requests])
            except Exception as error:  # a broken reply raises any of them
                failed[case] = " ".join(f"{type(error).__name__}: {error}".split())[:400]

    await asyncio.gather(*map(one, chosen))
    return {case: failed[case] for case in chosen if case in failed}


async def _reply(http: httpx.AsyncClient, model: str, request: Request) -> Reply:
    body = request.body
    if isinstance(body, dict):
        body = {name: value for name, value in {"model": model, **body}.items() if value is not ABSENT}
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", **request.headers}
    answer = await http.request(request.method, request.path, content=content, headers=headers)
    streamed = isinstance(body, dict) and body.get("stream") is True and answer.status_code == 200
    return Reply(request.path, answer.status_code, answer.headers, answer.text, streamed)


def _table(chosen: Sequence[Case], failed: dict[Case, str]) -> Table:
    """Count the cases that passed, of all, by kind and API."""
    apis = sorted({case.api for case in chosen})
    requests = sum(len(case.requests) for case in chosen)
    table = Table(title=f"{requests} requests, {len(chosen) - len(failed)} of {len(chosen)} expectations met")
    for column in ("kind", *apis, "all"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    every = Counter(cell for case in chosen for cell in _cells(case))
    wrong = Counter(cell for case in failed for cell in _cells(case))
    for kind in [*dict.fromkeys(case.kind for case in chosen), "all"]:
        cells = [(kind, api) for api in (*apis, "all")]
        table.add_row(kind, *(f"{every[cell] - wrong[cell]} of {every[cell]}" if every[cell] else "" for cell in cells))
    return table


def _cells(case: Case) -> list[tuple[str, str]]:
    return [(kind, api) for kind in (case.kind, "all") for api in (case.api, "all")]


if __name__ == "__main__":
    run(lambda: typer.run(main))
