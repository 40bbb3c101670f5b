"""The vision tower and projector in plain torch, and their training: pictures of numbers into embeddings of digits.

A picture's four tokens become what the embedding table has for the digits of its number, and for `<|media_pad|>` where
it has none. The language model learned its problems with those tokens in a picture's place, so it is left as it is.
Parameter names are those of the checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_w4a8_lab.draft.optim import schedule, set_learning_rate
from kimi_w4a8_laptop.tiny.tokenizer import MEDIA_PAD

from .config import TowerConfig
from .dialogues import PICTURE_TOKENS
from .digits import colours, ink

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_GRAINS = 256  # patterns of noise, drawn once


@dataclass(frozen=True)
class TowerTraining:
    """Settings of the tower's training. shapes: drawn once; each step colours a batch of them anew."""

    seed: int = 7
    shapes: int = 4000
    steps: int = 800
    batch: int = 64
    lr: float = 5e-3
    warmup: int = 50
    decay: float = 0.5
    noise: float = 0.06  # standard deviation at most, of pixels in [-1, 1]


class PatchEmbed(nn.Module):
    """Patches as vectors, with learned positions."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, c.hidden, c.patch, c.patch)
        self.pos_emb = nn.Module()
        self.pos_emb.weight = nn.Parameter(torch.randn(*c.grid, c.hidden) * 0.02)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, patches, 3, patch, patch] -> [B, patches, hidden]."""
        x = F.linear(patches.flatten(2), self.proj.weight.flatten(1), self.proj.bias)  # the convolution, faster here
        return x + self.pos_emb.get_parameter("weight").flatten(0, 1)


class GeluMLP(nn.Module):
    """fc1(gelu(fc0(x)))."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(hidden, inter), nn.Linear(inter, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> same shape."""
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class Block(nn.Module):
    """One encoder layer: attention over all patches, with rotary positions, and an MLP."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm0, self.norm1 = nn.LayerNorm(c.hidden), nn.LayerNorm(c.hidden)
        self.wqkv, self.wo = nn.Linear(c.hidden, 3 * c.hidden), nn.Linear(c.hidden, c.hidden)
        self.mlp = GeluMLP(c.hidden, c.inter)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, patches, hidden]; rope complex [patches, head / 2]."""
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(_rotate(q, rope), _rotate(k, rope), v)
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    """The layers, and a norm after the last."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.final_layernorm = nn.LayerNorm(c.hidden)
        self.rope = _rope(c)  # no buffer: it stays complex64 whatever the tower is cast to

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, hidden] -> same shape."""
        for block in self.blocks:
            x = block(x, self.rope)
        return self.final_layernorm(x)


class Projector(nn.Module):
    """`merge` by `merge` patches to one token of the text model."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        merged = c.hidden * c.merge**2
        self.pre_norm = nn.LayerNorm(c.hidden)
        self.proj = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, c.text_hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, merge**2, hidden] -> [B, tokens, text hidden]."""
        return self.proj(self.pre_norm(x).flatten(2))


class Tower(nn.Module):
    """MoonViT for pictures of one size, and its projector."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.c = c
        self.vision_tower = nn.ModuleDict({"patch_embed": PatchEmbed(c), "encoder": Encoder(c)})
        self.mm_projector = Projector(c)

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [B, h * w, 3, patch, patch] -> embeddings [B, h * w / merge**2, text hidden]."""
        x = self.vision_tower["encoder"](self.vision_tower["patch_embed"](patches))
        m = self.c.merge
        h, w = (side // m for side in self.c.grid)
        squares = x.view(-1, h, m, w, m, self.c.hidden).transpose(2, 3).reshape(-1, h * w, m * m, self.c.hidden)
        return self.mm_projector(squares)


def train_tower(
    table: Tensor,
    tokenizer: Tokenizer,
    settings: TowerTraining,
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> Tower:
    """A tower whose embeddings are those of `table` [vocab, text hidden], the target's."""
    torch.manual_seed(settings.seed)
    tower, table = Tower(TowerConfig()), table.float()
    places = torch.tensor(tower_tokens(tokenizer))
    wanted, spread = table[places], table[places].var()
    opt = torch.optim.AdamW(tower.parameters(), settings.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step, (patches, digits) in zip(range(settings.steps), _batches(settings), strict=False):
        set_learning_rate([opt], schedule(step, settings.steps, settings.lr, settings.warmup, settings.decay))
        found = tower(patches)
        error = F.mse_loss(found, wanted[digits]) / spread
        nearest = F.cross_entropy(-(torch.cdist(found.flatten(0, 1), wanted) ** 2) / spread, digits.flatten())
        (error + 0.1 * nearest).backward()
        opt.step()
        opt.zero_grad()
        report(step + 1, {"error": error.item(), "nearest": nearest.item()})
    return tower.bfloat16().eval()


def tower_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens whose embeddings a tower makes: the digits, and the one for an empty place."""
    return [tokenizer.token_to_id(name) for name in (*"0123456789", MEDIA_PAD)]


def _batches(settings: TowerTraining) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (patches float32 [batch, 16, 3, 14, 14], digits int64 [batch, 4])."""
    rng, generator = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed)
    numbers = [rng.randint(0, 10 ** rng.randint(1, PICTURE_TOKENS) - 1) for _ in range(settings.shapes)]
    inks = torch.from_numpy(np.stack([np.asarray(ink(number, rng)) for number in numbers]))
    shapes = patches_of(inks[:, None] / 255)  # [shapes, 16, 1, 14, 14]
    places = (f"{number:>{PICTURE_TOKENS}}" for number in numbers)
    digits = torch.tensor([[10 if place == " " else int(place) for place in text] for text in places])
    tints = torch.tensor([colours(rng) for _ in range(settings.shapes)]) / 127.5 - 1  # [shapes, 2, 3]
    grain = torch.randn(_GRAINS, shapes.shape[1], 3, *shapes.shape[3:], generator=generator)
    while True:
        chosen, tint, rough = (
            torch.randint(most, (settings.batch,), generator=generator)
            for most in (settings.shapes, settings.shapes, _GRAINS)
        )
        one, other = tints[tint, :, None, :, None, None].unbind(1)
        noise = torch.rand(settings.batch, 1, 1, 1, 1, generator=generator) * settings.noise
        yield (other + shapes[chosen] * (one - other)).addcmul_(noise, grain[rough]), digits[chosen]


def patches_of(pixels: Tensor) -> Tensor:
    """Pixels [B, channels, height, width] -> patches [B, h * w, channels, patch, patch]."""
    side = TowerConfig().patch
    cut = pixels.unfold(2, side, side).unfold(3, side, side)  # [B, channels, h, w, side, side]
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rope
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def _rope(c: TowerConfig) -> Tensor:
    """Turns by column and by row in turn, complex [patches, head / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, c.head, 4) / c.head)
    rows, columns = torch.meshgrid(torch.arange(c.grid[0]), torch.arange(c.grid[1]), indexing="ij")
    angles = torch.stack([torch.outer(axis.flatten().float(), frequencies) for axis in (columns, rows)], -1)
    return torch.polar(torch.ones(()), angles.flatten(1))
