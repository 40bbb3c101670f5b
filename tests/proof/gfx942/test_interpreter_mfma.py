"""Matrix instructions against NumPy's matmul with the documented register layout (CDNA3 ISA, chapter 7)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_asm import run_lanes

from proof.gfx942 import MissingWait, UndefinedRead, UnknownInstruction
from proof.gfx942.numeric import bf16_to_f32, f32_to_bf16, fp8_fnuz_to_f32

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


@pytest.mark.parametrize(
    ("opcode", "size", "depth", "encode", "decode"),
    [
        ("v_mfma_f32_16x16x16_bf16", 16, 16, f32_to_bf16, bf16_to_f32),
        ("v_mfma_f32_32x32x8_bf16", 32, 8, f32_to_bf16, bf16_to_f32),
        ("v_mfma_f32_16x16x16_f16", 16, 16, lambda x: x.astype(np.float16), lambda x: x.astype(np.float32)),
        ("v_mfma_f32_16x16x4_f32", 16, 4, lambda x: x, lambda x: x),
        ("v_mfma_f32_32x32x2_f32", 32, 2, lambda x: x, lambda x: x),
    ],
)
def test_float_matrices(opcode, size, depth, encode, decode):
    a, b = (encode(RNG.normal(size=(size, depth)).astype(np.float32)) for _ in range(2))
    exact = decode(a).astype(np.float64) @ decode(b).astype(np.float64).T
    assert np.abs(run_mfma(opcode, a, b, size, np.float32) - exact).max() < 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize(("left", "right"), [("fp8", "fp8"), ("bf8", "fp8"), ("fp8", "bf8")])
def test_fp8_matrices(left, right):
    mantissa = {"fp8": 3, "bf8": 2}
    a, b = (RNG.integers(0, 128, (16, 32)).astype(np.uint8) for _ in range(2))
    exact = (
        fp8_fnuz_to_f32(a, mantissa[left]).astype(np.float64) @ fp8_fnuz_to_f32(b, mantissa[right]).astype(np.float64).T
    )
    got = run_mfma(f"v_mfma_f32_16x16x32_{left}_{right}", a, b, 16, np.float32)
    assert np.allclose(got, exact, rtol=1e-6)


def test_exec_does_not_mask_a_matrix_instruction():
    a = RNG.integers(-8, 8, (16, 32)).astype(np.int8)
    code = "s_mov_b64 exec, 1\nv_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[12:13], 0\ns_mov_b64 exec, -1"
    out = run_lanes(code, [*pack_operand(a), *pack_operand(a)], ["v32", "v33", "v34", "v35"])
    assert (unpack_result(out, 16, np.int32) == a.astype(np.int32) @ a.astype(np.int32).T).all()


def test_accumulation_registers_and_errors():
    a = RNG.integers(-8, 8, (16, 32)).astype(np.int8)
    inputs = [*pack_operand(a), *pack_operand(a)]
    code = "v_mfma_i32_16x16x32_i8 a[0:3], v[10:11], v[12:13], 0\nv_accvgpr_read_b32 v32, a1"
    (second,) = run_lanes(code, inputs, agprs=4)
    assert (
        second == (a.astype(np.int32) @ a.astype(np.int32).T)[4 * (LANE // 16) + 1, LANE % 16].astype(np.uint32)
    ).all()
    with pytest.raises(UndefinedRead):
        run_lanes("v_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[20:21], 0", inputs)
    with pytest.raises(UnknownInstruction):
        run_lanes("v_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[12:13], 0 cbsz:1", inputs)
    with pytest.raises(UnknownInstruction):
        run_lanes("v_mfma_i32_16x16x64_i8 v[32:35], v[10:13], v[10:13], 0", inputs)
    with pytest.raises(MissingWait):
        run_lanes("global_load_dword v11, v1, s[4:5]\nv_mfma_i32_16x16x32_i8 v[32:35], v[10:11], v[12:13], 0", inputs)
