"""Stand-ins for the compiled operators that SGLang calls on HIP, in torch; each refuses what its contract refuses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

from ..contract_check import CONTRACTS, require, require_rules
from . import library
from .kernel_launch import Touched, host, launch

STAND_INS: dict[str, Callable[..., object]] = {}
# They only divide the work: the contract's rules say which values fit, and no result depends on them.
_PLAN = (
    "max_seqlen", "min_seqlen", "workspace_buffer", "max_num_partitions", "partition_size", "work_", "reduce_",
    "num_split", "num_kv_splits", "intra_batch_mode", "deterministic", "how_v3_bf16_cvt", "size_limit",
)  # fmt: skip
# Values with which an argument that a stand-in does not take changes nothing; also None where it is optional.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("page_size", "block_size", "nhead_kv", "cp_world_size", "mtp"), (1,)),
    **dict.fromkeys(("cp_rank", "sink_size", "use_model_sensitive_rmsnorm", "quant_type"), (0,)),
    **dict.fromkeys(("logit_cap", "logits_soft_cap", "dropout_p"), (0.0,)),
    **dict.fromkeys(("return_logits", "return_lse", "return_attn_probs", "gemma_norm", "nope_first"), (False,)),
    **dict.fromkeys(("causal", "reuse_freqs_front_part"), (True,)),
    "kv_cache_dtype": ("auto",),
    "kv_cache_layout": ("NHD",),
    "window_size": ((-1, -1), (-1, -1, 0)),
}
_Function = TypeVar("_Function", bound=Callable[..., object])


class StandInError(RuntimeError):
    """A stand-in failed on arguments that its contract allows: a fault of the virtual node, and not of the caller."""


def operator(name: str) -> Callable[[_Function], _Function]:
    """Register a stand-in of operator `name`: its contract is checked, then it runs as one launch.

    The stand-in takes the arguments that it computes with. Others must have a value that changes nothing.
    """
    contract = CONTRACTS[name]
    names = list(contract.arguments)

    def register(stand_in: _Function) -> _Function:
        read = [*inspect.signature(stand_in).parameters]
        if unknown := set(read) - set(names):
            raise TypeError(f"{stand_in.__name__} takes {unknown}, and {name} does not")

        def kernel(**values: object) -> object:
            if not library.load().vg_capturing():  # a capture may be of buffers that nothing has filled
                require_rules(name, contract, contract.contents, values)
            try:
                return stand_in(**{key: value for key, value in values.items() if key in read})
            except NotImplementedError:
                raise
            except Exception as error:
                raise StandInError(f"{name}: its stand-in on the virtual node failed: {error}") from error

        @torch.compiler.disable(reason="compiled code")
        @functools.wraps(stand_in)
        def call(*given: object, **named: object) -> object:
            if len(given) > len(names):
                raise TypeError(f"{name} takes {len(names)} arguments, not {len(given)}")
            values = {**dict(zip(names, given, strict=False)), **named}
            require(name, contract, values, "cuda")
            for key, value in values.items():
                if key not in read and not key.startswith(_PLAN) and not _neutral(key, value):
                    raise NotImplementedError(f"{name}: the stand-in does not compute with {key}={value}")
            tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
            reads = [tensor for key, tensor in tensors.items() if key not in contract.writes]
            writes = [tensor for key, tensor in tensors.items() if key in contract.writes]
            touched = Touched(reads, writes, scattered="indices" in values)
            return launch(name, kernel, touched=touched, **values)

        STAND_INS[name] = call
        return stand_in

    return register


def _neutral(name: str, value: object) -> bool:
    """Return True for a value that changes no result; scales and the lengths of last pages are ones."""
    if isinstance(value, torch.Tensor):
        on_host = host(value)
        return isinstance(on_host, torch.Tensor) and bool((on_host == 1).all())
    return value is None or value in _NEUTRAL.get(name, ())
