"""The server under measurement: its model, and whether a workload fits into it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..base.errors import KimiError
from ..engine import metrics
from ..engine.behind_router import behind_router
from ..engine.client import EngineClient
from ..recipe.launch import Launch
from .workloads import Workload

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


@dataclass(frozen=True)
class Subject:
    """Running server. label: recipe it was started from, if known. context_len in tokens.

    api_key: key for its clients. ops_url: of a router, the endpoint with its engines' counters.
    """

    base_url: str
    label: str
    model: str
    model_path: str
    tokenizer: str
    version: str
    num_draft_tokens: int | None
    context_len: int | None
    api_key: str | None = field(default=None, repr=False)
    ops_url: str | None = None

    @property
    def metrics_url(self) -> str:
        """Address whose /metrics has the counters."""
        return self.ops_url or self.base_url


def is_local(base_url: str) -> bool:
    """True if the server runs on this machine, so that this machine's hardware is measured."""
    return urlsplit(base_url).hostname in _LOOPBACK


def inspect(
    base_url: str,
    label: str = "unknown",
    expected: Launch | None = None,
    api_key: str | None = None,
    ops_url: str | None = None,
) -> Subject:
    """Read the model and settings of the server at `base_url`.

    expected: launch that it should be running. ops_url: for a router, by default the port after its own. Raises
    KimiError when the server does not answer or serves another model.
    """
    base_url = base_url.rstrip("/")
    with EngineClient(base_url, api_key) as client:
        model = client.model_name()
        if behind := behind_router(base_url, ops_url, api_key):
            engine = inspect(behind.replica_url, label, expected, api_key)  # all replicas are the same service
            return replace(engine, base_url=base_url, ops_url=behind.ops_url)
        info = client.server_info()
    model_path = str(info.get("model_path", model))
    require_model(model_path, base_url, expected)
    speculative = info.get("speculative_algorithm")
    return Subject(
        base_url=base_url,
        label=label,
        model=model,
        model_path=model_path,
        tokenizer=str(info.get("tokenizer_path") or model_path),
        version=str(info.get("version", "unknown")),
        num_draft_tokens=int(info.get("speculative_num_draft_tokens") or 0) or None if speculative else None,
        context_len=_context_len(base_url),
        api_key=api_key,
    )


def require_model(model_path: str, base_url: str, expected: Launch | None) -> None:
    """Raise KimiError if the server serves another model than `expected`."""
    if expected is not None and Path(model_path).name != Path(expected.model).name:
        raise KimiError(
            f"the server serves {model_path}",
            where=base_url,
            expected=f"{expected.model} (recipe {expected.name})",
            remedy="check the address, or omit --recipe",
        )


def require_room(subject: Subject, workload: Workload) -> None:
    """Raise KimiError if a request of `workload` does not fit into the server's context."""
    needed = workload.context_len
    if needed is not None and subject.context_len is not None and needed > subject.context_len:
        raise KimiError(
            f"the workload {workload.name!r} needs {needed:,} tokens per request, the server's context has "
            f"{subject.context_len:,}",
            where=subject.base_url,
            expected=f"a context of at least {needed:,} tokens",
            remedy="start the server with a longer --context-length, or shorten it with --input-len / --output-len",
        )


def _context_len(base_url: str) -> int | None:
    """Return the context length that the engine settled on, from its metrics."""
    found = metrics.read(base_url, timeout_s=30.0).largest("sglang:context_len")
    return None if found is None else int(found)
