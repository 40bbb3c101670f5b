"""Matrix instructions against NumPy's matmul with the documented register layout (CDNA3 ISA, chapter 7)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_asm import run_lanes

from proof.gfx942 import MissingWait, UndefinedRead, UnknownInstruction
from proof.gfx942.numeric import bf16_to_f32

RNG = np.random.default_rng(3)
LANE = np.arange(64)


def pack_operand(matrix: np.ndarray) -> list[np.ndarray]:
    """Rows (of A) or columns (of B) [size, K] to registers: lane l holds row l % size, k = l // size * P + 0..P-1."""
    size, depth = matrix.shape
    per_lane = depth * size // 64
    registers = np.empty((64, per_lane), matrix.dtype)
    for lane in range(64):
        start = lane // size * per_lane
        registers[lane] = matrix[lane % size, start : start + per_lane]
    return list(np.ascontiguousarray(registers).view(np.uint32).T.copy())


def unpack_result(registers: list[np.ndarray], size: int, dtype: type) -> np.ndarray:
    """D: register r of lane l is row r // 4 * (256 / size) + 4 * (l // size) + r % 4, column l % size."""
    result = np.empty((size, size), dtype)
    for r, register in enumerate(registers):
        result[r // 4 * (256 // size) + 4 * (LANE // size) + r % 4, LANE % size] = register.view(dtype)
    return result


def run_mfma(
    opcode: str, a: np.ndarray, b: np.ndarray, size: int, dtype: type, c: np.ndarray | None = None
) -> np.ndarray:
    left, right = pack_operand(a), pack_operand(b)
    count, n = size * size // 64, len(left)
    operands = f"v[10:{9 + n}], v[{10 + n}:{9 + 2 * n}]"
    if c is None:
        code = f"{opcode} v[32:{31 + count}], {operands}, 0"
    else:  # through the accumulator: twice the same product
        code = (
            f"{opcode} v[32:{31 + count}], {operands}, 0\n{opcode} v[32:{31 + count}], {operands}, v[32:{31 + count}]"
        )
    out = run_lanes(code, [*left, *right], [f"v{32 + r}" for r in range(count)])
    return unpack_result(out, size, dtype)


@pytest.mark.parametrize(("size", "depth"), [(16, 32), (32, 16)])
def test_int8_is_exact(size, depth):
    a, b = (RNG.integers(-128, 128, (size, depth)).astype(np.int8) for _ in range(2))
    a[0], b[0] = -128, -128  # the largest products
    exact = a.astype(np.int32) @ b.astype(np.int32).T
    opcode = f"v_mfma_i32_{size}x{size}x{depth}_i8"
    assert (run_mfma(opcode, a, b, size, np.int32) == exact).all()
    assert (run_mfma(opcode, a, b, size, np.int32, c=exact) == 2 * exact).all()


def test_int8_accumulator_wraps():
    a = np.full((16, 32), 127, np.int8)
    code = "v_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[12:13], v[14:17]"
    out = run_lanes(code, [*pack_operand(a), *pack_operand(a), *[np.uint32(0x7FFFFFFF)] * 4], ["v32"])
    assert out[0][0] == (0x7FFFFFFF + 127 * 127 * 32) & 0xFFFFFFFF


def test_bfloat16_matrices():
    a, b = ((RNG.normal(size=(16, 16)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(2))
    exact = bf16_to_f32(a).astype(np.float64) @ bf16_to_f32(b).astype(np.float64).T
    got = run_mfma("v_mfma_f32_16x16x16_bf16", a, b, 16, np.float32)
    assert np.abs(got - exact).max() < 1e-6 * np.abs(exact).max()


def test_exec_does_not_mask_a_matrix_instruction():
    a = RNG.integers(-8, 8, (16, 32)).astype(np.int8)
    code = "s_mov_b64 exec, 1\nv_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[12:13], 0\ns_mov_b64 exec, -1"
    out = run_lanes(code, [*pack_operand(a), *pack_operand(a)], ["v32", "v33", "v34", "v35"])
    assert (unpack_result(out, 16, np.int32) == a.astype(np.int32) @ a.astype(np.int32).T).all()


def test_errors_of_matrix_instructions():
    a = RNG.integers(-8, 8, (16, 32)).astype(np.int8)
    inputs, opcode = [*pack_operand(a), *pack_operand(a)], "v_mfma_i32_16x16x32_i8"
    for code, error in {
        f"{opcode} v[32:35], v[10:11], v[20:21], 0": UndefinedRead,
        f"{opcode} v[32:35], v[10:11], v[12:13], 0 cbsz:1": UnknownInstruction,
        "v_mfma_i32_16x16x64_i8 v[32:35], v[10:13], v[10:13], 0": UnknownInstruction,
        f"global_load_dword v11, v1, s[4:5]\n{opcode} v[32:35], v[10:11], v[12:13], 0": MissingWait,
    }.items():
        with pytest.raises(error):
            run_lanes(code, inputs)
