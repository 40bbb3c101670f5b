"""What the gateway knows of its engine: whether it serves, and what fits into a request."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ENGINE_ARGUMENTS
from .engine import Engine
from .errors import Refusal, no_room, too_long

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_SERVING = ("ready", "draining")  # phases in which clients are answered
_PUBLIC = (  # smg reads some when it registers a worker
    "model_path", "served_model_name", "tokenizer_path", "tp_size", "dp_size", "speculative_algorithm",
    "speculative_num_draft_tokens", "weight_version", "version",
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Room:
    """Tokens of a request. total: of a prompt and its answer. prompt: of a prompt."""

    total: int
    prompt: int

    def answer(self, prompt: int, asked: int | None) -> int:
        """Return the tokens that an answer may have; raise Refusal for a prompt, or an answer, without room."""
        if prompt > self.prompt:
            raise too_long(prompt, self.prompt)
        if asked is not None and prompt + asked > self.total:
            raise no_room(prompt, asked, self.total)
        return self.total - prompt if asked is None else asked


class EngineFacts:
    """Follows the file in which the supervisor names the engine and its phase, and asks a new engine once."""

    def __init__(self, engine: Engine, file: Path, max_prompt: int) -> None:
        self._engine, self._file, self._max_prompt = engine, file, max_prompt
        self._stamp = (0, 0)
        self._named = ("", "")
        self.info: dict[str, Any] = {}  # public facts of the engine
        self._room: Room | None = None
        self.phase = "starting"

    @property
    def serving(self) -> bool:
        """True while the engine answers requests of clients."""
        return self._room is not None and self.phase in _SERVING

    @property
    def room(self) -> Room:
        """Room of a request; raise Refusal while the engine does not serve."""
        if self._room is None or not self.serving:
            raise Refusal(f"the server does not serve now: {self.phase}", status=503)
        return self._room

    async def follow(self) -> None:
        """Follow the engine until this task is cancelled."""
        while True:
            try:
                await self._look()
            except FileNotFoundError:  # before the first engine is named
                self.phase = "starting"
            except (Refusal, OSError, ValueError, LookupError, TypeError) as error:
                if self.phase != "down":
                    logger.warning("the engine's state is unknown: %s: %s", type(error).__name__, error)
                self.phase, self._stamp = "down", (0, 0)
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        """Take what the file says, if it has changed."""
        found = self._file.stat()
        if (stamp := (found.st_mtime_ns, found.st_ino)) == self._stamp:
            return
        named = json.loads(self._file.read_text())
        at = (named["url"], named["secret"])
        if at != self._named:
            await self._engine.point(*at)
            self._named, self._room = at, None
        phase = str(named["phase"])
        if phase in _SERVING and self._room is None:
            self._room = await self._measure()
        self.phase = phase if self._room or phase not in _SERVING else "the engine lacks arguments"
        self._stamp = stamp

    async def _measure(self) -> Room | None:
        """Return what fits into a request, or None for an engine without the arguments that a gateway needs."""
        info = await self._engine.ask("/server_info")
        if wrong := {name: value for name, value in ENGINE_ARGUMENTS.items() if info.get(name) != value}:
            logger.error("the engine must run with %s", " ".join(f"{name}={value}" for name, value in wrong.items()))
            return None
        self.info = {name: info[name] for name in _PUBLIC if name in info}
        models = await self._engine.ask("/v1/models")
        context = int(models["data"][0]["max_model_len"])
        # SGLang keeps the last two tokens of its context, or those of a verify step, which it counts with the prompt.
        kept = [2]
        if info.get("speculative_algorithm"):
            kept.append((info.get("speculative_eagle_topk") or 0) * (info.get("speculative_num_steps") or 0))
            kept.append(info.get("speculative_num_draft_tokens") or 0)
        context -= max(kept)
        most = min(context, int(info.get("max_req_input_len") or context)) - 1
        return Room(context, min(most, self._max_prompt) if self._max_prompt else most)


def usual_sampling(checkpoint: Path) -> dict[str, Any]:
    """Return the sampling that the checkpoint recommends, for a silent client: /generate does not read it."""
    try:
        given = json.loads((checkpoint / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: given[name] for name in _SAMPLING if given.get(name) is not None}


def folder_of(checkpoint: str, revision: str) -> Path:
    """Return the folder of a checkpoint's tokenizer; a repository's files come from the cache or are downloaded."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    from huggingface_hub import snapshot_download  # only without a folder

    files = ["*.json", "*.py", "*.jinja", "*.model", "*.txt"]
    return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=files))


def vocabulary_of(checkpoint: Path) -> int:
    """Return the size of the model's vocabulary, or 0 where its config names none."""
    config = json.loads((checkpoint / "config.json").read_text())
    return int(config.get("text_config", config).get("vocab_size") or config.get("vocab_size") or 0)
