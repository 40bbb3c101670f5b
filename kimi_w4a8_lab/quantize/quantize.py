"""Quantize with AMD Quark: a BF16 (or compressed-tensors INT4) target to INT4 or MXFP4, a BF16 EAGLE3 draft to FP8."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import laptop_part
from kimi_w4a8_eagle3.base.next_step import pip_install
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4, WeightFormat

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import QConfig

# Layers that amd/Kimi-K2.5-W4A8 leaves unquantized, so that only the routed experts are quantized.
KIMI_EXCLUDE = (
    "*self_attn*",
    "*mlp.gate",
    "*lm_head",
    "*mlp.gate_proj",
    "*mlp.up_proj",
    "*mlp.down_proj",
    "*shared_experts*",
    "*mm_projector*",
    "*vision_tower*",
)
# `fc` merges three hidden states of the target and lm_head chooses the token, so both stay in BF16.
DRAFT_EXCLUDE = ("fc", "lm_head")
_BUILD_S = 600.0  # Quark's extension compiles in a minute


def quantize_w4a8(
    source: Path,
    destination: Path,
    *,
    weights: WeightFormat = INT4,
    exclude: Sequence[str] = KIMI_EXCLUDE,
    device: str = "cpu",
    verbose: bool = False,
) -> None:
    """Quantize every linear layer that no pattern of `exclude` matches; copy the other tensors and files.

    INT4 goes through Quark's ProgressiveSpec: FP8 e4m3 per tensor, then INT4 per output channel. A projection [N, K]
    becomes `weight` int32 [N, K/8] in `reorder` packing, `weight_scale` float32 [] and `weight_scale_2` float32 [N].
    MXFP4 becomes `weight` uint8 [N, K/2] and `weight_scale` uint8 [N, K/32].
    One shard at a time is in memory. Raises KimiError when Quark cannot be imported.
    """
    config = _mxfp4_config if weights == MXFP4 else _w4a8_config
    _run_quark(source, destination, lambda: config(exclude), device, verbose)


def quantize_fp8(source: Path, destination: Path, *, device: str = "cpu", verbose: bool = False) -> None:
    """Quantize every linear layer of the draft in `source` except `fc` and `lm_head` to `ptpc_fp8` in `destination`.

    Weights get one scale per channel, inputs one per token: a projection [N, K] becomes `weight` F8_E4M3 [N, K] and
    `weight_scale` float32 [N].
    """
    _run_quark(source, destination, _fp8_config, device, verbose)


def _run_quark(source: Path, destination: Path, config: Callable[[], QConfig], device: str, verbose: bool) -> None:
    """Run Quark's file-to-file quantization with the result of `config()`, called after quark is imported."""
    import_quark()
    from quark.common.utils.log import ScreenLogger  # optional: amd-quark
    from quark.torch import ModelQuantizer  # optional: amd-quark

    ScreenLogger.set_shared_level(logging.INFO if verbose else logging.WARNING)
    ModelQuantizer(config()).direct_quantize_checkpoint(
        pretrained_model_path=str(source), save_path=str(destination), device=device
    )
    for shard in destination.glob("*.safetensors"):
        shard.chmod(0o644)  # Quark writes its shards readable for the owner only


def import_quark() -> None:
    """Import Quark, which compiles an extension the first time; raise KimiError where that fails."""
    from torch.utils import cpp_extension  # start-up: torch

    remove_stale_locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()))
    if declare := laptop_part("torchvision_operators"):  # Quark imports transformers, which imports torchvision
        declare()
    library = str(Path(cpp_extension.__file__).parents[1] / "lib")
    cpp_extension.TORCH_LIB_PATH = shlex.quote(library)  # torch's link command breaks at a space in it
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # where pip puts ninja
    try:
        from quark.common.utils.log import ScreenLogger  # optional: amd-quark

        ScreenLogger.set_shared_level(logging.WARNING)
        import quark.torch  # noqa: F401  # optional: amd-quark
    except (ImportError, RuntimeError) as error:  # RuntimeError: the extension does not compile
        raise KimiError(
            f"AMD Quark cannot be imported: {error}",
            expected="amd-quark 0.13, with ninja and a C++ compiler for the extension of its first import",
            remedy=f"{pip_install('amd-quark==0.13', 'ninja')}; apt-get install g++",
        ) from error


def remove_stale_locks(folder: Path) -> None:
    """Remove the locks that killed builds left in torch's folder of extensions, for which torch waits without end.

    The builder keeps its lock open. Raises KimiError for a young lock that no process of this machine has open.
    """
    held: set[Path] = set()
    locks = list(folder.rglob("lock"))
    for link in glob("/proc/[0-9]*/fd/*") if locks else ():  # noqa: PTH207  Path.glob raises when a process ends
        with suppress(OSError):  # another user's process, or one that has ended
            held.add(Path(link).readlink())
    for lock in locks:
        with suppress(FileNotFoundError):  # released meanwhile
            if lock.resolve() in held:
                continue
            if time.time() - lock.stat().st_mtime < _BUILD_S:
                raise KimiError(
                    "no process of this machine builds the extension whose lock is held",
                    where=str(lock),
                    remedy=f"rm {shlex.quote(str(lock))}, unless another machine builds in the same folder",
                )
            lock.unlink()


def _w4a8_config(exclude: Sequence[str]) -> QConfig:
    """Return Quark's configuration.

    `scale_type` must be given: without it Quark stores the FP8 scale in the weight's dtype.
    """
    # optional: amd-quark
    from quark.torch.quantization.config.config import (
        FP8E4M3PerTensorSpec,
        Int4PerChannelSpec,
        ProgressiveSpec,
        QConfig,
        QLayerConfig,
    )

    weight = ProgressiveSpec(
        first_stage=FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32", is_dynamic=False),
        second_stage=Int4PerChannelSpec(
            symmetric=True, scale_type="float32", round_method="half_even", ch_axis=0, is_dynamic=False
        ),
    ).to_quantization_spec()
    activation = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=True).to_quantization_spec()
    return QConfig(global_quant_config=QLayerConfig(weight=weight, input_tensors=activation), exclude=list(exclude))


def _mxfp4_config(exclude: Sequence[str]) -> QConfig:
    """Return the configuration of amd/Kimi-K2.5-MXFP4: weights and, by its config, activations in blocks of 32."""
    from quark.torch.quantization.config.config import OCP_MXFP4Spec, QConfig, QLayerConfig  # optional: amd-quark

    weight = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    activation = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec()
    return QConfig(global_quant_config=QLayerConfig(weight=weight, input_tensors=activation), exclude=list(exclude))


def _fp8_config() -> QConfig:
    # optional: amd-quark
    from quark.torch.quantization.config.config import FP8E4M3PerChannelSpec, QConfig, QLayerConfig

    weight = FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0).to_quantization_spec()
    activation = FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1).to_quantization_spec()
    layer = QLayerConfig(weight=weight, input_tensors=activation)
    return QConfig(global_quant_config=layer, exclude=list(DRAFT_EXCLUDE))
