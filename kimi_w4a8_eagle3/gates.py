"""Every environment variable that steers a kernel, in one typed table: default, allowed values, reader, effect.

`read_gates` checks an environment against the table: a misspelt name and a value out of range are errors, because the
programs that read these variables ignore both silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .base.errors import KimiError
from .base.nearest import nearest
from .door.settings import VARIABLES as DOOR_VARIABLES

Kind = Literal["bool", "int", "float", "choice", "text"]

# AITER and FlyDSL compare with exactly these spellings; "TRUE" would be read as false.
TRUE = ("1", "true", "True", "YES", "yes")
FALSE = ("0", "false", "False", "NO", "no")

SEED_AITER = "the article's AITER"
SEED_FLYDSL = "the article's FlyDSL"
PACKAGE = "this package"
SEED_AND_PACKAGE = f"{SEED_AITER}, {PACKAGE}"
OUR_BACKENDS = ("flydsl", "triton", "reference")  # in order of preference


@dataclass(frozen=True)
class Gate:
    """One environment variable.

    allowed: valid values, empty for any. minimum: the least number. backends: which MoE backends of this package honour
    it; None when it does not concern them. always: what this package's backends behave as, where that is fixed.
    """

    name: str
    kind: Kind
    default: Any
    reader: str
    effect: str
    allowed: tuple[Any, ...] = ()
    minimum: float | None = None
    backends: tuple[str, ...] | None = None
    always: Any = None

    def parse(self, text: str) -> Any:
        """The typed value of `text`; raises KimiError when it is not allowed."""
        value = self._convert(text)
        if (self.allowed and value not in self.allowed) or (self.minimum is not None and value < self.minimum):
            raise self._refused(text)
        return value

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.kind == "bool":
            return "0 or 1"
        if self.allowed:
            return ", ".join(str(value) for value in self.allowed)
        least = "" if self.minimum is None else f" >= {self.minimum:g}"
        return {"int": "a whole number", "float": "a number", "choice": "", "text": "any text"}[self.kind] + least

    def _convert(self, text: str) -> Any:
        if self.kind == "bool":
            if text not in (*TRUE, *FALSE):
                raise self._refused(text)
            return text in TRUE
        try:
            return {"int": int, "float": float}.get(self.kind, str)(text)
        except ValueError:
            raise self._refused(text) from None

    def _refused(self, text: str) -> KimiError:
        return KimiError(f"{self.name}={text!r} is not allowed", where="environment", expected=self.expected)


# The tiles that our FlyDSL kernels exist for: stage 1 as (m, n, k); of stage 2 every combination that fits the shape.
STAGE1_TILES = (
    *((m, n, k) for m in (16, 32) for n in (32, 64) for k in (128, 256)),
    (64, 64, 128),
    (64, 128, 128),
    (128, 64, 128),
)
PREFILL_ROWS = 64  # blocks of this many rows and more have prefill's kernels
STAGE2_TILES = {"M": (16, 32, 64, 128), "N": (128, 256, 512, 1024), "K": (128, 256, 512)}
_TILES = {1: dict(zip("MNK", zip(*STAGE1_TILES, strict=True), strict=True)), 2: STAGE2_TILES}


def tile_gate(stage: int, axis: str) -> str:
    """The variable that fixes an axis, M, N or K, of a stage's tiles."""
    return f"AITER_FLYDSL_STAGE{stage}_TILE_{axis}"


def _tile(stage: int, axis: str, effect: str, aiter: tuple[int, ...] = ()) -> Gate:
    """aiter: what only AITER has kernels for; our backend refuses it."""
    allowed = tuple(sorted({*_TILES[stage][axis], *aiter}))
    return Gate(tile_gate(stage, axis), "int", None, SEED_AND_PACKAGE, effect, allowed, backends=("flydsl",))


TABLE: tuple[Gate, ...] = (
    Gate(
        "KIMI_MOE_BACKEND",
        "choice",
        "auto",
        PACKAGE,
        "which W4A8 MoE kernels run; auto takes the first that can",
        ("auto", *OUR_BACKENDS),
        backends=OUR_BACKENDS,
    ),
    Gate(
        "KIMI_KERNELS",
        "text",
        None,
        PACKAGE,
        "folder of the gfx942 code objects that `kimi-w4a8 warm` wrote; default: ~/.cache/kimi-w4a8-eagle3/kernels",
    ),
    Gate(
        "KIMI_PAGE_GUARD",
        "choice",
        "auto",
        PACKAGE,
        "page-offset guard in the server: auto caps AITER pools, force caps any pool, off never",
        ("auto", "force", "off"),
    ),
    Gate(
        "KIMI_PAGE_GUARD_INT_MAX",
        "int",
        2**31 - 1,
        PACKAGE,
        "largest page offset that counts as safe; smaller only to try the guard out",
        minimum=1,
    ),
    Gate(
        "KIMI_CHECK_MODEL_NAME",
        "bool",
        False,
        PACKAGE,
        "answer 404 to requests for a model that the server does not serve; SGLang answers any name",
    ),
    Gate(
        "KIMI_LOAD_CHECK",
        "bool",
        True,
        PACKAGE,
        "compare every MoE layer with the checkpoint and with the reference backend while it loads",
    ),
    Gate("AITER_USE_FLYDSL_MOE", "bool", True, SEED_AITER, "MoE through FlyDSL kernels", backends=(), always=True),
    Gate("AITER_USE_FLYDSL_MOE_STAGE1", "bool", True, SEED_AITER, "the same for gate/up", backends=(), always=True),
    Gate("AITER_USE_FLYDSL_MOE_STAGE2", "bool", True, SEED_AITER, "the same for down", backends=(), always=True),
    Gate(
        "AITER_W4A8_USE_INT8",
        "bool",
        False,
        SEED_AITER,
        "INT8 activations and INT8 MFMA for int4 weights; this package always does so",
        backends=(),
        always=True,
    ),
    Gate(
        "FLYDSL_W4A16_HYBRID",
        "choice",
        "",
        f"the article's SGLang, {PACKAGE}",
        "w2_bf16: the W4A16 baseline, bfloat16 activations through BF16 MFMA",
        ("", "w2_bf16"),
        backends=("flydsl",),
    ),
    Gate(
        "FLYDSL_MOE_STAGE1_SCHED",
        "bool",
        True,
        f"{SEED_FLYDSL}, {PACKAGE}",
        "hand-written instruction-scheduling hints in stage 1; 0 leaves the order to the compiler",
        backends=("flydsl",),
    ),
    Gate(
        "FLYDSL_MOE_STAGE2_SCHED",
        "bool",
        True,
        f"{SEED_FLYDSL}, {PACKAGE}",
        "the same hints in stage 2",
        backends=("flydsl",),
    ),
    _tile(1, "M", "rows of a stage-1 tile (default: the sorting block)", aiter=(48,)),
    _tile(1, "N", "output channels of a stage-1 tile", aiter=(256,)),
    _tile(1, "K", "reduction step of stage 1 (default: 256 for decode, 128 for prefill)"),
    _tile(2, "M", "rows of a stage-2 tile (default: the sorting block)", aiter=(48,)),
    _tile(2, "N", "output channels of a stage-2 tile", aiter=(64,)),
    _tile(2, "K", "reduction step of stage 2; 256 suits EAGLE3's four tokens a request", aiter=(64,)),
    Gate(
        "AITER_FLYDSL_MOE_GRID_TRIM",
        "bool",
        True,
        SEED_AND_PACKAGE,
        "launch at most tokens x topk row blocks instead of the padded worst case",
        backends=("flydsl",),
    ),
    Gate(
        "KIMI_MOE_XCD_ORDER",
        "bool",
        True,
        PACKAGE,
        "prefill: workgroups that share weights and rows run on one XCD, behind one L2 cache",
        backends=("flydsl",),
    ),
    Gate("AITER_FLYDSL_DEBUG", "bool", False, SEED_AITER, "log what the FlyDSL MoE path does", backends=()),
    Gate("AITER_FLYDSL_MOE_COMPARE", "bool", False, SEED_AITER, "compare with the CK kernel (slow)", backends=()),
    Gate("AITER_FLYDSL_MOE_COMPARE_STAGE1", "bool", True, SEED_AITER, "compare stage 1", backends=(), always=True),
    Gate("AITER_FLYDSL_MOE_COMPARE_STAGE2", "bool", False, SEED_AITER, "compare stage 2", backends=()),
    Gate("AITER_FLYDSL_MOE_COMPARE_MAX_TOKENS", "int", 256, SEED_AITER, "compare up to this batch", minimum=0),
    Gate("AITER_FLYDSL_MOE_COMPARE_MAX_ABS", "float", 0.5, SEED_AITER, "largest accepted difference", minimum=0),
    Gate("AITER_FLYDSL_MOE_COMPARE_ASSERT", "bool", False, SEED_AITER, "abort on a larger difference"),
    Gate("AITER_FLYDSL_MOE_COMPARE_VERBOSE", "bool", False, SEED_AITER, "print more while comparing"),
    Gate("AITER_FLYDSL_MOE_BLOCK_M", "int", None, SEED_AITER, "sorting block", (16, 32, 48, 64, 128), backends=()),
    Gate("AITER_FLYDSL_MOE_MIN_TOKENS", "int", None, SEED_AITER, "smaller batches skip FlyDSL", minimum=0, backends=()),
    Gate("AITER_FLYDSL_MOE_ALLOW_SMALL", "bool", None, SEED_AITER, "FlyDSL for small batches", backends=()),
    Gate("AITER_FLYDSL_MOE_COMPACT_EXPERTS", "bool", False, SEED_AITER, "slice the experts in use", backends=()),
    Gate("AITER_FLYDSL_MOE_COMPACT_MAX_TOKENS", "int", 256, SEED_AITER, "batch limit of that slicing", minimum=0),
    Gate(
        "AITER_FLYDSL_MOE_GEMM2_MODE",
        "choice",
        "atomic",
        SEED_AITER,
        "stage 2 adds its slots atomically or in a second kernel",
        ("atomic", "reduce"),
        backends=(),
    ),
    Gate("AITER_FLYDSL_MOE_STAGE1_TRY_W1_SHUFFLE", "bool", False, SEED_AITER, "debugging aid of the comparison"),
    Gate("AITER_FLYDSL_MOE_STAGE1_W1_SHUFFLE_LAYOUT", "text", "16,16", SEED_AITER, "layout for that aid"),
    Gate("FLYDSL_MOE_PROFILE", "bool", False, SEED_AITER, "time each MoE stage, summary at exit", backends=()),
    Gate("FLYDSL_MOE_STAGE1_CSHUFFLE", "bool", True, SEED_FLYDSL, "stage-1 epilogue through LDS", backends=()),
    Gate("FLYDSL_MOE_STAGE2_CSHUFFLE", "bool", True, SEED_FLYDSL, "stage-2 epilogue through LDS", backends=()),
    Gate("FLYDSL_CK_LDS128", "bool", True, SEED_FLYDSL, "unpadded 128-bit LDS rows", backends=()),
    Gate("FLYDSL_STAGE1_EARLY_RETURN", "bool", False, SEED_FLYDSL, "debugging: stage 1 returns at once"),
    Gate("FLYDSL_STAGE1_SKIP_COMPUTE", "bool", False, SEED_FLYDSL, "debugging: stage 1 does not multiply"),
    Gate("AITER_ENFORCE_DSL", "bool", True, "aiter", "keep AITER's tuned-config table from replacing the DSL kernels"),
    Gate("DSL2_ROOT", "text", None, SEED_AITER, "where FlyDSL's sources lie"),
    Gate("MLIR_PATH", "text", None, SEED_FLYDSL, "the MLIR installation that FlyDSL compiles with"),
    Gate(
        "CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT",
        "int",
        None,
        "aiter (when it builds ck_tile kernels)",
        "rounding of float32 to bfloat16 on gfx942: 0 nearest-even, 1 truncate keeping NaN, 2 truncate, "
        "3 nearest-even in assembly, 4 nearest-away in assembly",
        (0, 1, 2, 3, 4),
    ),
    Gate("TRITON_MAX_CACHE_SIZE", "int", None, "ROCm's Triton", "bytes of compiled kernels to keep", minimum=0),
    Gate("SGLANG_USE_AITER", "bool", False, "sglang", "take AITER's kernels on ROCm"),
    Gate("SGLANG_ROCM_USE_MULTI_STREAM", "bool", False, "sglang", "decode: the shared expert beside the routed ones"),
    Gate("SGLANG_DISABLE_CUDNN_CHECK", "bool", False, "sglang", "skip a check of the CUDA installation"),
    Gate("SGLANG_NUMA_BIND_V2", "bool", True, "sglang", "bind each rank to its NUMA node with --numa-node"),
    Gate("SGLANG_WARMUP_TIMEOUT", "float", None, "sglang", "seconds for its first request; 600 by itself", minimum=1),
    Gate("HIP_FORCE_DEV_KERNARG", "bool", False, "HIP", "keep the arguments of kernels in GPU memory"),
    Gate("HSA_ENABLE_IPC_MODE_LEGACY", "bool", None, "ROCm", "share GPU buffers between processes without dmabuf"),
    # Defaults and values as in vLLM 0.19.0.
    Gate("VLLM_ROCM_USE_AITER", "bool", False, "vllm", "take AITER's kernels on ROCm"),
    Gate("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "bool", False, "vllm", "MXFP4 GEMMs in assembly (gfx950)"),
    Gate("VLLM_ROCM_USE_AITER_RMSNORM", "bool", True, "vllm", "AITER's RMSNorm; the article turns it off below TP 8"),
    Gate(
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
        "choice",
        "NONE",
        "vllm",
        "width of the all-reduce between GPUs; other than NONE and FP it rounds",
        ("FP", "INT8", "INT6", "INT4", "NONE"),
    ),
)
BY_NAME: dict[str, Gate] = {gate.name: gate for gate in TABLE}

# A name with one of these prefixes is a gate or a mistake ...
PREFIXES = ("AITER_FLYDSL_", "AITER_USE_FLYDSL_", "AITER_W4A8_", "FLYDSL_", "KIMI_")
# ... except the FlyDSL library's own options, which it documents itself, and what newer AITER releases read.
FOREIGN_PREFIXES = (
    "FLYDSL_AUTOTUNE",
    "FLYDSL_COMPILE_",
    "FLYDSL_DEBUG_",
    "FLYDSL_DUMP_",
    "FLYDSL_EXTRA_",
    "FLYDSL_FLASH_ATTN_",
    "FLYDSL_FP8_",
    "FLYDSL_GPU_",
    "FLYDSL_K5_",
    "FLYDSL_KTRACE_",
    "FLYDSL_ROCM_",
    "FLYDSL_RUNTIME_",
    "AITER_FLYDSL_AOT_",
    "AITER_FLYDSL_FORCE",
    "AITER_FLYDSL_KERNARG_",
    "AITER_FLYDSL_MXFP4_",
    "AITER_FLYDSL_NUM_WAVES_",
    "AITER_FLYDSL_ROUTE_",
)
FOREIGN_NAMES = ("AITER_FLYDSL_MOE_EXPERT_SCHEDULING_MODE", "AITER_FLYDSL_STAGE2_FP8", "AITER_USE_FLYDSL_MOE_SORTING")


@dataclass(frozen=True)
class Gates:
    """The gates of one environment, checked and typed: `get` for a backend's, fields for this package's own."""

    moe_backend: str
    check_model_name: bool
    load_check: bool
    page_guard: str
    page_guard_int_max: int
    given: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, /) -> Any:
        """The typed value of the gate `name`, or None when the environment does not set it."""
        return self.given.get(name)


def read_gates(environ: Mapping[str, str]) -> Gates:
    """Check `environ` (usually os.environ) and type its gates.

    Raises KimiError for a misspelt gate, with the nearest name, or for a value that is not allowed.
    """
    given = {name: BY_NAME[name].parse(value) for name, value in environ.items() if _is_gate(name)}

    def value(name: str) -> Any:
        return given.get(name, BY_NAME[name].default)

    return Gates(
        moe_backend=value("KIMI_MOE_BACKEND"),
        check_model_name=value("KIMI_CHECK_MODEL_NAME"),
        load_check=value("KIMI_LOAD_CHECK"),
        page_guard=value("KIMI_PAGE_GUARD"),
        page_guard_int_max=value("KIMI_PAGE_GUARD_INT_MAX"),
        given=given,
    )


def ignored_gates(gates: Gates, backend: str) -> list[str]:
    """One sentence for each gate that is set to something the MoE backend `backend` of this package does not do."""
    sentences = []
    for name, value in gates.given.items():
        gate = BY_NAME[name]
        usual = gate.default if gate.always is None else gate.always
        if gate.backends is None or backend in gate.backends or value == usual:
            continue
        readers = f"read by {gate.reader}"
        sentences.append(f"{name}={value} has no effect on the MoE backend {backend!r} of this package ({readers})")
    return sentences


def _is_gate(name: str) -> bool:
    """True for a name in the table; raises KimiError for one that looks like a gate and is none."""
    if name in BY_NAME:
        return True
    if name in DOOR_VARIABLES:
        return False
    if not name.startswith(PREFIXES) or name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
        return False
    hint = nearest(name, BY_NAME)
    ours = [known for known in BY_NAME if known.startswith("KIMI_")]
    if name.startswith("KIMI_") and not difflib.get_close_matches(name, ours, cutoff=0.8):
        return False  # other programs use this prefix too, KIMI_API_KEY for one
    raise KimiError(
        f"unknown kernel gate {name}{hint}",
        where="environment",
        expected="a name that `kimi-w4a8 gates` lists",
        remedy=f"unset {name}, or correct it",
    )
