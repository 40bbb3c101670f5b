"""Small hand-written gfx942 kernels for the interpreter's tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from proof.gfx942 import Gfx942Device, Kernel, Memory, parse_kernel
from proof.gfx942.schedule import Order

LANES = np.arange(64)


def kernel(body: str, args: int = 2, lds: int = 0, vgprs: int = 64, agprs: int = 0, scratch: int = 0) -> Kernel:
    """A kernel `k` with `args` pointer arguments; s[0:1] is the kernarg pointer, s2 the workgroup, v0 the lane."""
    offset = -(-vgprs // 4) * 4
    arguments = "".join(
        f"      - .offset: {8 * n}\n        .size: 8\n        .value_kind: global_buffer\n" for n in range(args)
    )
    return parse_kernel(f"""
k:
{body}
	s_endpgm
	.amdhsa_kernel k
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_private_segment_fixed_size {scratch}
		.amdhsa_kernarg_size {8 * args}
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr {offset + agprs if agprs else vgprs}
		.amdhsa_accum_offset {offset}
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{arguments}    .name: k
...
	.end_amdgpu_metadata
""")


def run_lanes(
    body: str,
    inputs: Sequence[npt.ArrayLike] = (),
    outputs: Sequence[str] = ("v32",),
    scalars: Sequence[int] = (),
    *,
    lds: int = 0,
    agprs: int = 0,
    order: Order = "lockstep",
) -> list[npt.NDArray[np.uint32]]:
    """Run `body` on one wave: inputs (64 words each) arrive in v10, v11, ..., scalars in s10, s11, ...

    Returns the registers named in `outputs`, uint32 [64] each.
    """
    words = [np.broadcast_to(np.asarray(i), 64) for i in inputs]
    data = np.stack(
        [w.view(np.uint32) if w.dtype.itemsize == 4 else w.astype(np.uint32) for w in map(contiguous, words)]
        or [LANES.astype(np.uint32)]
    )
    code = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "s_load_dwordx2 s[6:7], s[0:1], 0x8", "v_lshlrev_b32_e32 v1, 2, v0"]
    code += ["s_waitcnt lgkmcnt(0)"]
    code += [f"global_load_dword v{10 + n}, v1, s[4:5] offset:{256 * n}" for n in range(len(inputs))]
    code += [f"s_mov_b32 s{10 + n}, {value:#x}" for n, value in enumerate(scalars)]
    code += ["s_waitcnt vmcnt(0)", body, "s_mov_b64 exec, -1", "s_waitcnt vmcnt(0) lgkmcnt(0)"]
    for n, register in enumerate(outputs):
        if register.startswith("s") or register == "m0":
            code += [f"v_mov_b32_e32 v2, {register}"]
            register = "v2"
        code += [f"global_store_dword v1, {register}, s[6:7] offset:{256 * n}"]
    memory = Memory()
    source, result = memory.add(data, "inputs"), memory.empty((len(outputs), 64), np.uint32, "outputs")
    Gfx942Device(memory).launch(
        kernel("\n".join(code), lds=lds, agprs=agprs), (1, 1, 1), (64, 1, 1), [source, result], order=order
    )
    return list(memory.read(result).view(np.uint32))


def contiguous(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return np.ascontiguousarray(array)


def run_workgroup(
    body: str, waves: int = 2, lds: int = 0, order: Order = "lockstep", **options: Any
) -> tuple[npt.NDArray[np.generic], Counter[str]]:
    """Run `body` on one workgroup; it finds v1 = 4 * thread and stores v32 of each thread."""
    code = f"""
	s_load_dwordx2 s[6:7], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	s_waitcnt lgkmcnt(0)
{body}
	global_store_dword v1, v32, s[6:7]"""
    memory = Memory()
    result = memory.empty((64 * waves,), np.uint32, "outputs")
    launched = Gfx942Device(memory).launch(
        kernel(code, args=1, lds=lds), (1, 1, 1), (64 * waves, 1, 1), [result], order=order, **options
    )
    return memory.read(result), launched


# Source in s[4:5], result in s[6:7], four bytes times the lane in v1.
POINTERS = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_load_dwordx2 s[6:7], s[0:1], 0x8
	v_lshlrev_b32_e32 v1, 2, v0
	s_waitcnt lgkmcnt(0)
"""
