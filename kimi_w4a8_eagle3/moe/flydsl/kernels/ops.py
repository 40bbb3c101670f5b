"""Machine-level operations that the FlyDSL kernels are written in: buffer access, MFMA, LDS, loops.

Everything here emits MLIR while a `@flyc.kernel` is traced. Integer scalars are `fx.Int32`, which has Python operators;
vectors and floats are plain MLIR values. Offsets are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm, scf, vector
from flydsl.expr import arith, math, rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import as_ir_value as raw

State = TypeVar("State")
Value: TypeAlias = "ir.Value | fx.Int32"  # an MLIR value or a FlyDSL scalar that wraps one
WAVE = 64
LOG2_E = 1.4426950408889634
NAN_BITS = 0x7FC00000
FLOAT_BIAS = 12582912.0  # 1.5 * 2**23: adding it rounds a float to an integer in its low bits, half to even
FLOAT_BIAS_BITS = 0x4B400000
RARE = "; rare"  # marks blocks that proof/kernel_counts.py leaves out
NOWHERE = 1 << 30  # an offset past the end of the buffers of rows and slots
BUFFER_FLAGS = (7 << 12) | (4 << 15)  # word 3 of a gfx9 buffer descriptor: raw, range-checked


def const_i32(value: int) -> Value:
    """Return an i32 constant; values of 2**31 and more are taken as bit patterns."""
    return arith.constant(value, type=T.i32)


def const_f32(value: float) -> Value:
    return arith.constant(value, type=T.f32)


def select(condition: Value, one: Value | int, other: Value | int) -> Any:
    """Return one where an i1 is true, else other; an fx.Int32 if either is one."""
    chosen = arith.select(raw(condition), raw(one), raw(other))
    return fx.Int32(chosen) if isinstance(one, fx.Int32) or isinstance(other, fx.Int32) else chosen


def both(one: Value, other: Value) -> Value:
    """Return the i1 that is true where two are."""
    return arith.andi(raw(one), raw(other))


def splat(value: Value, count: int) -> Value:
    """Return a vector with `value` in every element."""
    return vector.broadcast(T.vec(count, raw(value).type), raw(value))


def pack(values: Sequence[Value]) -> Value:
    """Build a vector from scalars of one type."""
    items = [raw(v) for v in values]
    return vector.from_elements(T.vec(len(items), items[0].type), items)


def element(vec: Value, index: int) -> Value:
    return vector.extract(vec, dynamic_position=[], static_position=[index])


def elements(vec: Value) -> list[Any]:
    return [element(vec, i) for i in range(vec.type.shape[0])]


def bitcast(value: Value, to: ir.Type) -> Value:
    """Reinterpret the bits of a vector or scalar."""
    return llvm.bitcast(to, raw(value))


def to_bf16(values: Value) -> Value:
    """Convert a float32 vector to bfloat16 packed in i32s, rounded to nearest (ties away from zero); NaN stays NaN."""
    rounded = elements(_plus_bits(values, 0x8000))  # carries out of the NaN 0x7FFFFFFF
    quiet = const_i32(NAN_BITS)
    for i, value in enumerate(elements(values)):
        broken = arith.cmpf(arith.CmpFPredicate.UNO, value, value)
        rounded[i] = arith.select(broken, quiet, rounded[i])
    upper_halves = const_i32(0x07060302)
    return pack([rocdl.perm_b32(b, a, upper_halves) for a, b in zip(rounded[0::2], rounded[1::2], strict=True)])


def _plus_bits(values: Value, bits: int) -> Value:
    count = values.type.shape[0]
    return arith.addi(bitcast(values, T.vec(count, T.i32)), splat(const_i32(bits), count))


def to_f16(values: Value) -> Value:
    """Convert a float32 vector below 65520 to float16 packed in i32s, rounded to nearest (ties away from zero)."""
    # By LLVM's model the conversion to nearest, one value at a time, takes four times as long.
    rounded = elements(bitcast(_plus_bits(values, 0x1000), T.vec(values.type.shape[0], T.f32)))
    pairs = zip(rounded[0::2], rounded[1::2], strict=True)
    packed = [llvm.call_intrinsic(T.f16x2, "llvm.amdgcn.cvt.pkrtz", list(pair), [], []) for pair in pairs]
    return pack([bitcast(p, T.i32) for p in packed])


def bf16_bits(words: Value) -> list[Any]:
    """Return the float32 bit patterns of packed bfloat16 pairs."""
    bits = []
    for word in elements(words):
        bits += [arith.shli(word, const_i32(16)), arith.andi(word, const_i32(0xFFFF0000))]
    return bits


def reciprocal(value: Value) -> Value:
    """Return 1 / value, refined to (almost always) the nearest float32; value is neither tiny nor zero."""
    estimate = rocdl.rcp(T.f32, value)
    error = math.fma(arith.negf(value), estimate, const_f32(1.0))
    return math.fma(error, estimate, estimate)


def divide(numerator: Value, denominator: Value, inverse: Value) -> Value:
    """Return the correctly rounded quotient, given a good inverse, with one residual correction."""
    quotient = arith.mulf(numerator, inverse)
    residual = math.fma(arith.negf(quotient), denominator, numerator)
    return math.fma(residual, inverse, quotient)


def fma_f16(word: Value, high: bool, factor: Value, addend: Value) -> Value:
    """Return half * factor + addend in float32, rounded once; half is the low or high float16 of an i32."""
    # The compiler prefers two conversions and a packed multiply-add, by LLVM's model nine times as long.
    text = f"v_fma_mix_f32 $0, $1, $2, $3 op_sel:[{int(high)},0,0] op_sel_hi:[1,0,0]"
    return llvm.inline_asm(T.f32, [raw(word), raw(factor), raw(addend)], text, "=v,v,v,v")


def from_lane(value: Value, lane: Value) -> Value:
    """Return the i32 of another lane of the wave."""
    return rocdl.ds_bpermute(T.i32, raw(lane * 4), value)


def ballot(condition: Value) -> Value:
    """Return an i64 with one bit for each lane where an i1 is true."""
    return rocdl.ballot(T.i64, raw(condition))


def count_bits(mask: Value) -> fx.Int32:
    """Count the bits set in an i64."""
    return fx.Int32(arith.trunci(T.i32, math.ctpop(mask)))


def uniform(value: Value) -> fx.Int32:
    """Mark a value as the same in all lanes, so that the compiler keeps it in a scalar register."""
    return fx.Int32(rocdl.readfirstlane(T.i32, raw(value)))


def buffer(address: Value, num_bytes: Value, offset: Value | None = None) -> Value:
    """Make a buffer descriptor: the hardware returns 0 for loads past `num_bytes` and drops stores past it.

    address: i64; num_bytes: i32 (below 4 GiB); offset: i64 bytes added to the base, uniform in the wave.
    """
    base = raw(address if offset is None else address + offset)
    pointer = llvm.IntToPtrOp(ir.Type.parse("!llvm.ptr"), base).result
    size = arith.extui(T.i64, raw(num_bytes))
    stride = arith.constant(0, type=T.i16)
    return rocdl.make_buffer_rsrc(ir.Type.parse("!llvm.ptr<8>"), pointer, stride, size, const_i32(BUFFER_FLAGS))


def item(address: Value, number: Value, size: int, there: Value | None = None, part: tuple[int, int] = (0, 0)) -> Value:
    """Make a buffer descriptor of item `number` of a tensor, of `size` bytes each; it is empty unless `there`.

    part: (first byte, bytes) of the item, if not all of it.
    """
    first, length = part if part[1] else (0, size)
    offset, length = fx.Int64(number) * size, const_i32(length)
    given = length if there is None else arith.select(raw(there), length, const_i32(0))
    return buffer(address, fx.Int32(given), offset + first if first else offset)


def load(rsrc: Value, kind: ir.Type, offset: Value, uniform_offset: Value = 0) -> Value:
    """Load `kind` per lane at offset + uniform_offset; 0 outside of the buffer."""
    return rocdl.raw_ptr_buffer_load(kind, rsrc, raw(offset), raw(uniform_offset))


def store(rsrc: Value, value: Value, offset: Value, uniform_offset: Value = 0) -> None:
    """Store per lane at offset + uniform_offset; dropped outside of the buffer."""
    rocdl.raw_ptr_buffer_store(raw(value), rsrc, raw(offset), raw(uniform_offset))


def keep(*values: Value) -> None:
    """Load uniform values into scalar registers here; the compiler would load each at its first use and wait for it."""
    llvm.inline_asm(None, [raw(v) for v in values], "", ",".join("s" * len(values)), has_side_effects=True)


def again(value: Value) -> Value:
    """Return an i32 as if it were another, so that what was computed of it is computed again and takes no registers."""
    return llvm.inline_asm(T.i32, [raw(value)], RARE, "=v,0")


def scalar_load(address: Value, index: Value) -> fx.Int32:
    """Load the int32 number `index` of an array at `address` into a scalar register; `index` is uniform."""
    return scalar_loads(address, index, 1)[0]


def scalar_loads(address: Value, first: Value, count: int, alignment: int = 4) -> list[fx.Int32]:
    """Load `count` int32 from number `first` of an array at once into scalar registers; `first` is uniform."""
    offset = arith.extui(T.i64, raw(first * 4))
    pointer_type = ir.Type.parse("!llvm.ptr<4>")  # constant address space: a scalar load
    pointer = llvm.IntToPtrOp(pointer_type, arith.addi(raw(address), offset)).result
    kind = T.i32 if count == 1 else T.vec(count, T.i32)
    loaded = llvm.LoadOp(kind, pointer, alignment=alignment).result
    return [fx.Int32(x) for x in ([loaded] if count == 1 else elements(loaded))]


def split_rows(bytes16: Value) -> tuple[Any, Any]:
    """Split 16 activation bytes of a row into the two operands that an unpacked pair multiplies."""
    words = elements(bytes16)
    return pack(words[0:2]), pack(words[2:4])


def mfma_i8(weights: Value, rows: Value, acc: Value) -> Value:
    """acc i32x4 += A x B with A, B vector<2xi32> (eight int8 of K a lane); 16x16x32."""
    operands = [element(bitcast(value, T.vec(1, T.i64)), 0) for value in (weights, rows)]
    return rocdl.mfma_i32_16x16x32_i8(acc.type, [*operands, acc])


def mfma_bf16(weights: Value, rows: Value, acc: Value) -> Value:
    """acc f32x4 += A x B with A, B vector<4xi16> holding bfloat16; 16x16x16."""
    return rocdl.mfma_f32_16x16x16bf16_1k(acc.type, [weights, rows, acc])


def bf16x4(first: Value, second: Value) -> Value:
    """Combine two i32 of packed bfloat16 pairs into an operand of mfma_bf16."""
    return bitcast(pack([first, second]), T.i16x4)


def silu_mul(gate: Value, up: Value) -> Value:
    """Compute silu(gate) * up element by element on float vectors, with the hardware's exp2 and reciprocal."""
    result = []
    for g, u in zip(elements(gate), elements(up), strict=True):
        exp = rocdl.exp2(T.f32, arith.mulf(g, const_f32(-LOG2_E)))
        sigmoid = rocdl.rcp(T.f32, arith.addf(exp, const_f32(1.0)))
        result.append(arith.mulf(arith.mulf(g, sigmoid), u))
    return pack(result)


def pin_schedule() -> None:
    """Forbid the compiler's scheduler to move anything across this point."""
    rocdl.sched_barrier(0)


def barrier() -> None:
    """Wait until all waves of the workgroup arrive and their LDS accesses are done."""
    # The compiler's own barrier would wait for the prefetched weights, too.
    rocdl.s_waitcnt(lgkmcnt=0)
    rocdl.s_barrier()


def lds_alloc(num_bytes: int) -> Value:
    """Allocate static LDS, 16-byte aligned, and return a pointer for lds_load and lds_store."""
    return fx.SharedAllocator().allocate(num_bytes, 16).peek().ptr.llvm_ptr


def lds_at(base: Value, offset: Value) -> Value:
    """Return the pointer `offset` bytes after `base`."""
    dynamic = -(2**31)  # MLIR's marker of a run-time index
    return llvm.GEPOp(base.type, base, [raw(offset)], [dynamic], T.i8, None).result


def lds_load(base: Value, kind: ir.Type, offset: Value, alignment: int = 16) -> Value:
    """Load from LDS per lane; `offset` is a multiple of `alignment`."""
    return llvm.LoadOp(kind, lds_at(base, offset), alignment=alignment).result


def lds_store(base: Value, value: Value, offset: Value, alignment: int = 16) -> None:
    """Store to LDS per lane; `offset` is a multiple of `alignment`."""
    llvm.StoreOp(raw(value), lds_at(base, offset), alignment=alignment)


def lds_add(base: Value, offset: Value) -> Value:
    """Add 1 to an i32 in LDS; return its value before."""
    return fx.llvm.atomic_add(lds_at(base, offset), fx.Int32(1), syncscope="workgroup")


@contextmanager
def when(condition: Value) -> Iterator[None]:
    """Execute a block only in the lanes where an i1 is true: `with when(condition):`."""
    with ir.InsertionPoint(scf.IfOp(raw(condition)).then_block):
        yield
        scf.YieldOp([])


def changed(here: Value | None, values: Sequence[Any], change: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Return change(values) where a uniform i1 is true (None: always), else the values; the other waves skip it."""
    if here is None:
        return list(change(list(values)))
    return choose(here, [raw(v).type for v in values], lambda: change(list(values)), lambda: values)


def choose(here: Value, types: Sequence[Any], one: Callable[[], Sequence[Any]], other: Callable[[], Any]) -> list[Any]:
    """Execute and return one() where a uniform i1 is true, else other(); both give values of these types."""
    op = scf.IfOp(raw(here), list(types), has_else=True)
    for block, body in ((op.then_block, one), (op.else_block, other)):
        with ir.InsertionPoint(block):
            scf.YieldOp([raw(v) for v in body()])
    return list(op.results)


def loop(start: Value, stop: Value, carried: State, body: Callable[[fx.Int32, State], State]) -> State:
    """Emit a rolled loop over [start, stop); `body(i, carried)` returns the values of the next iteration.

    carried: values in lists and NamedTuples, nested in any way.
    """
    if isinstance(start, int) and isinstance(stop, int) and stop <= start:
        return carried
    op = scf.ForOp(raw(start), raw(stop), const_i32(1), [raw(v) for v in _leaves(carried)])
    with ir.InsertionPoint(op.body):
        after = body(fx.Int32(op.induction_variable), _rebuilt(carried, iter(op.inner_iter_args)))
        scf.YieldOp([raw(v) for v in _leaves(after)])
    return _rebuilt(carried, iter(op.results))


def _leaves(tree: Any) -> list[Value]:
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, list | tuple) else [tree]


def _rebuilt(tree: Any, leaves: Iterator[Value]) -> Any:
    if not isinstance(tree, list | tuple):
        return next(leaves)
    parts = [_rebuilt(part, leaves) for part in tree]
    return type(tree)(*parts) if isinstance(tree, tuple) else parts
