"""A recipe's requirements of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from ..recipe.launch import DEFAULT_PORT, Recipe, resolve
from ..recipe.schema import ArgValue, RecipeCheckpoint

GIB = 1 << 30
# Bytes of the published checkpoints, for a machine without access to the Hub. The published "497 GB" are GiB: the INT4
# experts alone are 384 x 60 x 3 x 7168 x 2048 / 2 = 507.3 GB.
PUBLISHED_SIZES = {
    "amd/Kimi-K2.5-W4A8": 534_000_000_000,
    "amd/Kimi-K2.6-MXFP4": 559_000_000_000,
    "lightseekorg/kimi-k2.5-eagle3": 6_000_000_000,
}


@dataclass(frozen=True)
class Needs:
    """Requirements of one recipe; sizes in bytes. `gpus` = 0 is a recipe for a CPU."""

    recipe: str
    gpus: int
    arch: tuple[str, ...]
    hbm: float
    checkpoints: tuple[RecipeCheckpoint, ...]
    host: str
    port: int
    numa: list[int] | None
    environment: dict[str, str]
    args: dict[str, ArgValue]
    accepted_faults: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        return self.gpus > 0

    @property
    def shm(self) -> int:
        """Shared memory for buffers between the ranks of eight GPUs (docker's default is 64 MiB)."""
        return 16 * GIB if self.on_gpu else GIB // 16

    @classmethod
    def of(cls, recipe: Recipe) -> Needs:
        """Return the requirements of a recipe, including its improvements."""
        args = resolve(recipe).args
        numa = args.get("numa-node")
        return cls(
            recipe=recipe.name,
            gpus=recipe.hardware.gpus,
            arch=tuple(recipe.hardware.arch),
            hbm=recipe.hardware.hbm_gib * GIB,
            checkpoints=tuple(recipe.checkpoints),
            host=str(args.get("host", "127.0.0.1")),
            port=int(str(args.get("port", DEFAULT_PORT))),
            numa=[int(node) for node in numa] if isinstance(numa, list) else None,
            environment=recipe.environment,
            args=args,
            accepted_faults=tuple(recipe.options.accept_faults),
        )
