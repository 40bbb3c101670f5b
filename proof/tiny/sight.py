"""Quality of the tower's reading of unseen pictures, and of the target's answers to problems with them."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from kimi_w4a8_laptop.tiny.processor import TinyKimiProcessor
from kimi_w4a8_laptop.tiny.tokenizer import MEDIA_CONTENT, MEDIA_PAD

from .checkpoint import load_target, load_tower
from .config import TowerConfig, preprocessor_config_json
from .dialogues import PICTURE_BEGIN, PICTURE_TOKENS, in_picture, instant
from .digits import FONTS, MOST, UNSEEN_FONTS, picture
from .generate import greedy
from .problems import problems
from .tokenizer import load_tokenizer
from .tower import Tower


@dataclass(frozen=True)
class Sight:
    """Shares of `pictures`. read: all four tokens are nearest to the right ones of the whole vocabulary, in known and
    in unseen fonts. solved: answers right with the picture, and with the digits' own tokens in its place."""

    pictures: int
    read: float
    read_unseen: float
    solved: float
    solved_without: float

    def __str__(self) -> str:
        return (
            f"{self.pictures} held-out pictures: {self.read:.1%} read, {self.read_unseen:.1%} in unseen fonts; "
            f"problems with one: {self.solved:.1%} right, {self.solved_without:.1%} with digits in its place"
        )


@torch.no_grad()
def sight(checkpoint: Path, pictures: int) -> Sight:
    """Measure a checkpoint, BF16 or W4A8; in plain torch, pictures through the processor that serves."""
    tokenizer, target, tower = load_tokenizer(checkpoint), load_target(checkpoint), load_tower(checkpoint)
    table, pad = target.embed_tokens.weight, tokenizer.token_to_id(MEDIA_PAD)

    def read(fonts: tuple[str, ...], rng: random.Random) -> float:
        numbers = [rng.randint(0, min(MOST, 10 ** rng.randint(1, PICTURE_TOKENS) - 1)) for _ in range(pictures)]
        nearest = torch.cdist(seen(tower, numbers, rng, fonts).float(), table.float()).argmin(-1)
        wanted = [[pad if c == " " else tokenizer.token_to_id(c) for c in f"{n:>{PICTURE_TOKENS}}"] for n in numbers]
        return sum(a == b for a, b in zip(nearest.tolist(), wanted, strict=True)) / pictures

    rng = random.Random("sight")
    asked = [in_picture(instant(problem, rng), rng) for problem in problems("held_out", 2 * pictures)]
    asked = [problem for problem in asked if PICTURE_BEGIN in problem.prompt(min(problem.turns()))][:pictures]
    prompts = [tokenizer.encode(problem.prompt(min(problem.turns()))).ids for problem in asked]
    begins = [ids.index(tokenizer.token_to_id(MEDIA_CONTENT)) + 1 for ids in prompts]
    shown = [ids[at : at + PICTURE_TOKENS] for ids, at in zip(prompts, begins, strict=True)]
    rows = seen(tower, [int(tokenizer.decode(ids)) for ids in shown], rng, FONTS)

    # Every picture's four embeddings become four more tokens of the vocabulary.
    target.embed_tokens = nn.Embedding.from_pretrained(torch.cat([table, rows.flatten(0, 1)]))
    for i, (ids, at) in enumerate(zip(prompts[:], begins, strict=True)):
        first = len(table) + PICTURE_TOKENS * i
        prompts.append([*ids[:at], *range(first, first + PICTURE_TOKENS), *ids[at + PICTURE_TOKENS :]])
    replies = [reply for at in range(0, len(prompts), 250) for reply in greedy(target, prompts[at : at + 250])]
    right = [problem.accepts(tokenizer.decode(r)) for problem, r in zip(asked * 2, replies, strict=True)]
    without, solved = (sum(half) / len(asked) for half in (right[: len(asked)], right[len(asked) :]))
    return Sight(pictures, read(FONTS, rng), read(UNSEEN_FONTS, rng), solved, without)


def seen(tower: Tower, numbers: list[int], rng: random.Random, fonts: tuple[str, ...]) -> Tensor:
    """Return the tower's output for pictures of numbers, of several sizes, PNG and JPEG: [numbers, 4, hidden]."""
    processor = TinyKimiProcessor(None, preprocessor_config_json(TowerConfig())["media_proc_cfg"])
    patches = [processor.pixels(_sent(number, rng, fonts))[0] for number in numbers]
    found: Tensor = tower(torch.stack(patches).bfloat16())
    return found


def _sent(number: int, rng: random.Random, fonts: tuple[str, ...]) -> Image.Image:
    file = io.BytesIO()
    picture(number, rng, fonts, scale=rng.choice([1, 2, 3, 4])).save(file, rng.choice(["PNG", "JPEG"]))
    return Image.open(file)
