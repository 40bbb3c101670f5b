"""`kimi-w4a8 ready`: wait until the server of this machine is ready."""

from __future__ import annotations

import time
from typing import Annotated

import httpx
import typer

from ..base.errors import KimiError
from ..gateway.config import GatewayConfig

_POLL_S, _ANSWER_S = 1.0, 10.0


def ready(
    port: Annotated[
        int, typer.Option(min=1, max=65534, help="Port of the API; the ops port is the next one.")
    ] = GatewayConfig.port,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait; 0 asks once.")] = 3600.0,
) -> None:
    """Wait until the server of this machine is ready.

    The phases of its start are printed. The exit status is 1 if it is not ready in time.
    """
    url, start, shown = f"http://127.0.0.1:{port + 1}/ready", time.monotonic(), ""
    with httpx.Client(trust_env=False, timeout=_ANSWER_S) as client:
        while (phase := _phase(client, url)) != "ready":
            waited = time.monotonic() - start
            if phase != shown:
                typer.echo(f"{waited // 60:.0f} min: {phase}")
            if waited >= timeout:
                raise KimiError(f"the server is not ready after {timeout:g} s: {phase}", where=url)
            shown = phase
            time.sleep(_POLL_S)
    typer.echo("ready")


def _phase(client: httpx.Client, url: str) -> str:
    try:
        answer = client.get(url).json()
    except (httpx.HTTPError, ValueError):
        return "no answer"
    return str(answer.get("phase")) if isinstance(answer, dict) else "no answer of an ops port"
