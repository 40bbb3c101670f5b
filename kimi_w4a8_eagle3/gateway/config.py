"""Settings of the gateway's processes, written into one file before they start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base.files import write_private

# Arguments of the engine that change what /generate answers, as `/server_info` names them.
ENGINE_ARGUMENTS: dict[str, bool | str] = {
    "incremental_streaming_output": True,  # a stream's events hold what is new
    "reasoning_parser": "kimi_k2",  # grammars wait for the end of thinking
    "constrained_json_disable_any_whitespace": True,  # free white space can go on without end
}
VARIABLE = "KIMI_GATEWAY"  # names the file for uvicorn's workers, which start without arguments
BROKEN = 2  # exit code of a gateway that would fail again


@dataclass(frozen=True)
class GatewayConfig:
    """What a worker knows.

    checkpoint: folder or repository of the tokenizer, at `revision`; its Python files run where `trusted`. model: the
    name that clients use; others are refused where `check_model`. engine_file: names the engine's URL, this start's
    secret and the engine's phase, and is read again when it changes. key, key_file: of clients; without one, only this
    machine may ask. max_running: requests of one key at a time, over all workers, 0 for no limit.
    max_prompt_tokens: 0 for what the engine takes. collect: folder for `draft collect`, empty for none.
    """

    checkpoint: str
    model: str
    host: str = "127.0.0.1"
    port: int = 9527
    workers: int = 2
    revision: str = "main"
    trusted: bool = False
    check_model: bool = True
    engine_file: str = ""
    key: str = ""
    key_file: str = ""
    max_running: int = 0
    max_prompt_tokens: int = 0
    max_body_bytes: int = 32 * 2**20
    max_mask_ms: float = 20.0
    collect: str = ""

    def write(self, path: Path) -> None:
        """Write the file, for its owner alone: it may hold a key."""
        write_private(path, json.dumps(asdict(self), indent=2).encode())

    @classmethod
    def read(cls, path: Path) -> GatewayConfig:
        """Read a file that `write` wrote."""
        return cls(**json.loads(path.read_text()))
