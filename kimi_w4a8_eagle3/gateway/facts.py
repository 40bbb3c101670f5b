"""What the gateway knows of its engine: whether it serves, and what fits into a request."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from .engine import Engine
from .errors import Refusal, no_room, too_long

logger = logging.getLogger(__name__)

_POLL_S, _STARTING_POLL_S = 1.0, 0.5
# Arguments of the engine that change what /generate answers.
_NEEDED = {
    "incremental_streaming_output": True,  # a stream's events hold what is new
    "reasoning_parser": "kimi_k2",  # grammars wait for the end of thinking
    "constrained_json_disable_any_whitespace": True,  # free white space can go on without end
}
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
    """Asks the engine once it serves, and its supervisor whether it does.

    file: names the engine, and is read again when it changes. status: the supervisor's URL, or empty.
    """

    def __init__(self, engine: Engine, file: Path, status: str, max_prompt: int) -> None:
        self._engine, self._file, self._status, self._max_prompt = engine, file, status, max_prompt
        self._stamp = 0
        self._room: Room | None = None
        self.phase = "starting"

    @property
    def serving(self) -> bool:
        """True while the engine answers requests of clients."""
        return self._room is not None and self.phase in ("ready", "draining")

    @property
    def room(self) -> Room:
        """Room of a request; raise Refusal while the engine does not serve."""
        if self._room is None or not self.serving:
            raise Refusal(f"the server does not serve yet: {self.phase}", status=503)
        return self._room

    async def follow(self) -> None:
        """Follow the engine until this task is cancelled."""
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                try:
                    await self._point()
                    self.phase = await self._ask(session)
                    if self.phase == "ready" and self._room is None:
                        self._room = await self._measure()
                        if self._room is None:
                            self.phase = "the engine lacks arguments"
                    elif self.phase in ("starting", "down"):
                        self._room = None  # the next engine may be another
                except (Refusal, aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
                    logger.debug("the engine's state is unknown: %s", error)
                    self.phase, self._room = "down", None
                await asyncio.sleep(_POLL_S if self.serving else _STARTING_POLL_S)

    async def _point(self) -> None:
        stamp = self._file.stat().st_mtime_ns
        if stamp != self._stamp:
            named = json.loads(self._file.read_text())
            await self._engine.point(named["url"], named["secret"])
            self._stamp, self._room = stamp, None

    async def _ask(self, session: aiohttp.ClientSession) -> str:
        if not self._status:
            await self._engine.ask("/model_info")
            return "ready"
        async with session.get(f"{self._status}/ready", timeout=aiohttp.ClientTimeout(total=2)) as answer:
            return str((await answer.json())["phase"])

    async def _measure(self) -> Room | None:
        """Return what fits into a request, or None for an engine without the arguments that a gateway needs."""
        info = await self._engine.ask("/server_info")
        if wrong := {name: value for name, value in _NEEDED.items() if info.get(name) != value}:
            logger.error("the engine must run with %s", " ".join(f"{name}={value}" for name, value in wrong.items()))
            return None
        models = await self._engine.ask("/v1/models")
        context = int(models["data"][0]["max_model_len"])
        # SGLang counts a verify step's tokens with the prompt
        if info.get("speculative_algorithm"):
            steps = (info.get("speculative_eagle_topk") or 0) * (info.get("speculative_num_steps") or 0)
            context -= max(steps, info.get("speculative_num_draft_tokens") or 0)
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
