"""Triton kernels of the W4A8 MoE, for NVIDIA and AMD: quantize, route, stage 1, stage 2, reduce.

Weights are bytes: byte j of a row holds element j in its low and element j + K/2 in its high nibble, so the matching
activations are two contiguous runs. A nibble is used in the *high* half of its byte, `p << 4` and `p & 0xF0`, which is
16 times its value; `prepare` folds 1/16 into the scales. 7168 * 127 * 128 < 2**31, so int32 cannot overflow.

MXFP4 codes become int8 by `_e2m1`. A block's shift s of 0 to 11 is applied to the weights as s % 4, which int8 holds.
Blocks with s above 3 and above 7 go to dots of their own, whose sums are shifted; a tile without such blocks skips it.
A block with s of 12 is left out.

Accumulators are [n, m], output column by row of the block. With LEFT the weights are the left operand of the dot. On
Hopper wgmma then takes them from the registers where they are unpacked, and 16 tokens fill the instruction. On CDNA
they are the right operand in stage 2, where a lane then ends with four neighbouring columns of a row and stores them at
once.

Columns of stage 2 are passed in units of 16, which shows Triton that rows are aligned. Offsets are int32 except for an
expert's weights; the backend refuses a batch that is too large for that. Sizes of the model are constexpr. Values that
follow from the batch are not specialised on, so one compiled kernel serves every T.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a small float32 half to even
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
HIGH = tl.constexpr(-16)  # 0xF0 as int8


@triton.jit
def _e2m1(code):
    """Return twice the E2M1 value of the low nibble of int8 bytes: 0, 1, 2, 3, 4, 6, 8, 12 with a sign."""
    size = code & 7
    size = tl.where(size < 4, size, (2 + (size & 1)) << (tl.maximum(size >> 1, 1) - 1))
    return tl.where((code & 8) != 0, -size, size).to(tl.int8)


@triton.jit
def _unpack(packed, PTX: tl.constexpr, MX: tl.constexpr):
    """Unpack int8 bytes to (low, high) elements: INT4 times 16, or twice E2M1. PTX does four bytes at once."""
    if MX:
        low = _e2m1(packed)
        high = _e2m1(packed >> 4)
    elif PTX:
        low, high = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;",
            "=&r,=&r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low = packed << 4
        high = packed & HIGH
    return low, high


@triton.jit
def _load_shifts(shifts, row, start, limit: tl.constexpr, half: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
                 MX: tl.constexpr):  # fmt: skip
    """Load the shifts int8 [n, k] of a step of BK bytes; half 0 or 1 is the low or the high elements' half of K."""
    if MX:
        block = tl.arange(0, BK // 32)
        inside = start + block * 32 < limit
        pointers = shifts + row[:, None] * (limit // 16) + half * (limit // 32) + start // 32 + block[None, :]
        found = tl.load(pointers, mask=inside[None, :], other=0)
        return tl.reshape(tl.broadcast_to(found[:, :, None], (BN, BK // 32, 32)), (BN, BK)).to(tl.int8)
    else:
        return 0


@triton.jit
def _add(weights, x, acc, shift, LEFT: tl.constexpr, MX: tl.constexpr):
    """Return acc + (weights << shift) @ x."""
    if MX:
        near = shift < 4
        scaled = weights << (shift & 3)
        acc = _dot(tl.where(near, scaled, 0).to(tl.int8), x, acc, LEFT)
        if tl.max(tl.max(shift, 1), 0) > 3:
            far = _dot(tl.where((shift >> 2) == 1, scaled, 0).to(tl.int8), x, tl.zeros_like(acc), LEFT)
            acc += far << 4
        if tl.max(tl.max(shift, 1), 0) > 7:
            far = _dot(tl.where((shift >> 2) == 2, scaled, 0).to(tl.int8), x, tl.zeros_like(acc), LEFT)
            acc += far << 8
        return acc
    else:
        return _dot(weights, x, acc, LEFT)


@triton.jit
def _dot(weights, x, acc, LEFT: tl.constexpr):
    """Return acc + weights [n, k] @ x [k, m]; the accumulator is [n, m] with LEFT, else its transpose."""
    if LEFT:
        return tl.dot(weights, x, acc, out_dtype=tl.int32)
    else:
        return tl.dot(tl.trans(x), tl.trans(weights), acc, out_dtype=tl.int32)


@triton.jit
def _zeros(BN: tl.constexpr, BM: tl.constexpr, LEFT: tl.constexpr):
    return tl.zeros((BN, BM) if LEFT else (BM, BN), tl.int32)


@triton.jit
def _by_column(acc, LEFT: tl.constexpr):
    if LEFT:
        return acc
    else:
        return tl.trans(acc)


@triton.jit
def _quantize(x):
    """Quantize float32 [R, K] to (int8 [R, K], scale [R]). A row with NaN or Inf gets scale NaN and zeros."""
    size = tl.abs(x)
    peak = tl.max(tl.where(size <= FLOAT32_MAX, size, float("inf")), axis=1)  # NaN fails the comparison too
    finite = peak <= FLOAT32_MAX
    scale = tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32))
    scale = tl.where(finite & (scale > 0), scale, 1.0)
    ratio = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    rounded = (ratio + ROUND) - ROUND
    return tl.where(finite[:, None], rounded, 0.0).to(tl.int8), tl.where(finite, scale, float("nan"))


@triton.jit
def _route_block(ids, order, block_expert, block_first, block_rows, num_blocks, slots, E: tl.constexpr,
                 EP: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Sort up to SP slots by expert in one program; see routing.route for the outputs."""
    i = tl.arange(0, SP)
    expert = tl.load(ids + i, mask=i < slots, other=-1)
    expert = tl.where((expert < 0) | (expert >= E), E, expert)
    bins = tl.arange(0, EP)
    counts = tl.where(bins < E, tl.histogram(expert, EP), 0)
    first = tl.cumsum(counts, 0) - counts
    blocks = (counts + BM - 1) // BM
    block_start = tl.cumsum(blocks, 0) - blocks

    keys = tl.sort(expert * SP + i)
    expert = keys // SP
    here = expert < E
    rank = i - tl.gather(first, expert, 0)
    tl.store(order + i, keys % SP, mask=i < slots)  # slots that are not here sort last
    starts_block = here & (rank % BM == 0)
    block = tl.gather(block_start, expert, 0) + rank // BM
    tl.store(block_expert + block, expert, mask=starts_block)
    tl.store(block_first + block, i, mask=starts_block)
    tl.store(block_rows + block, tl.minimum(tl.gather(counts, expert, 0) - rank, BM), mask=starts_block)
    tl.store(num_blocks, tl.sum(blocks, 0))


@triton.jit(do_not_specialize=["tokens"])
def quantize_and_route(x, q, scale, ids, order, block_expert, block_first, block_rows, num_blocks, tokens,
                       H: tl.constexpr, HP: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
                       SP: tl.constexpr, BM: tl.constexpr, ROUTE: tl.constexpr):  # fmt: skip
    """Quantize a row of x in each of programs 0..tokens-1; with ROUTE a further program sorts the slots meanwhile."""
    row = tl.program_id(0)
    if row < tokens:
        k = tl.arange(0, HP)[None, :]
        values, row_scale = _quantize(tl.load(x + row * H + k, mask=k < H, other=0.0).to(tl.float32))
        tl.store(q + row * H + k, values, mask=k < H)
        tl.store(scale + row + tl.arange(0, 1), row_scale)
    elif ROUTE:
        _route_block(ids, order, block_expert, block_first, block_rows, num_blocks, tokens * TOP_K, E, EP, SP, BM)


@triton.jit
def _block(order, block_expert, block_first, block_rows, block, BM: tl.constexpr):
    """Return (expert, sorted position, slot, true if it exists) of each row m; dead rows read slot 0's data."""
    m = tl.arange(0, BM)
    live = m < tl.load(block_rows + block)
    position = tl.load(block_first + block) + m
    slot = tl.load(order + position, mask=live, other=0)
    return tl.load(block_expert + block).to(tl.int64), tl.where(live, position, 0), slot, live


@triton.jit
def _load_k(pointers, k, limit: tl.constexpr, EVEN: tl.constexpr, AXIS: tl.constexpr):
    """Load a tile whose K runs along AXIS; bytes past the row's end are zero, and zero nibbles add nothing."""
    if EVEN:
        return tl.load(pointers)
    elif AXIS == 0:
        return tl.load(pointers, mask=k[:, None] < limit, other=0)
    else:
        return tl.load(pointers, mask=k[None, :] < limit, other=0)


@triton.jit
def stage1(q, scale, w13, s13, shift13, order, block_expert, block_first, block_rows, num_blocks, out, factor,
           topk_weights, s2, H: tl.constexpr, INTER: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, LEFT: tl.constexpr,
           PTX: tl.constexpr, MX: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Compute silu(gate) * up of one block of BM rows and BN columns.

    q int8 [T, H], scale [T], w13 bytes [E, 2I, H/2], s13 [E, 2I] (INT4: already / 16), shift13 [E, 2I, H/32] with MX.
    Row p of `out` is sorted position p.
    MODE "float": out float32 [S, I].
    MODE "quant" (BN covers I): out int8 [S, I] and factor[slot], as in quantize_act.
    MODE "acc": out int32 [S, 2I], the accumulators, for weights in several parts.
    """
    NB: tl.constexpr = (INTER + BN - 1) // BN
    HB: tl.constexpr = H // 2
    EVEN: tl.constexpr = HB % BK == 0
    block = tl.program_id(0) // NB
    if block >= tl.load(num_blocks):
        return
    expert, position, slot, live = _block(order, block_expert, block_first, block_rows, block, BM)
    token = slot // TOP_K
    n = (tl.program_id(0) % NB) * BN + tl.arange(0, BN)
    row = tl.where(n < INTER, n, 0)
    k = tl.arange(0, BK)

    x_low = q + token[None, :] * H + k[:, None]
    gate = w13 + expert * (2 * INTER * HB) + row[:, None] * HB + k[None, :]
    up = gate + INTER * HB
    gate_shift = shift13 + expert * (2 * INTER * (H // 32))
    up_shift = gate_shift + INTER * (H // 32)
    acc_gate = _zeros(BN, BM, LEFT)
    acc_up = _zeros(BN, BM, LEFT)
    for start in tl.range(0, HB, BK, num_stages=STAGES):
        low = _load_k(x_low + start, k + start, HB, EVEN, 0)
        high = _load_k(x_low + start + HB, k + start, HB, EVEN, 0)
        gate_low, gate_high = _unpack(_load_k(gate + start, k + start, HB, EVEN, 1), PTX, MX)
        up_low, up_high = _unpack(_load_k(up + start, k + start, HB, EVEN, 1), PTX, MX)
        acc_gate = _add(gate_low, low, acc_gate, _load_shifts(gate_shift, row, start, HB, 0, BK, BN, MX), LEFT, MX)
        acc_gate = _add(gate_high, high, acc_gate, _load_shifts(gate_shift, row, start, HB, 1, BK, BN, MX), LEFT, MX)
        acc_up = _add(up_low, low, acc_up, _load_shifts(up_shift, row, start, HB, 0, BK, BN, MX), LEFT, MX)
        acc_up = _add(up_high, high, acc_up, _load_shifts(up_shift, row, start, HB, 1, BK, BN, MX), LEFT, MX)

    acc_gate, acc_up = _by_column(acc_gate, LEFT), _by_column(acc_up, LEFT)
    keep = (n < INTER)[:, None] & live[None, :]
    if MODE == "acc":
        pointers = out + position[None, :] * (2 * INTER) + n[:, None]
        tl.store(pointers, acc_gate >> (0 if MX else 4), mask=keep)
        tl.store(pointers + INTER, acc_up >> (0 if MX else 4), mask=keep)
    else:
        row_scale = tl.load(scale + token)[None, :]
        g = acc_gate.to(tl.float32) * row_scale * tl.load(s13 + expert * (2 * INTER) + row)[:, None]
        u = acc_up.to(tl.float32) * row_scale * tl.load(s13 + expert * (2 * INTER) + INTER + row)[:, None]
        act = g / (1.0 + tl.exp(-g)) * u
        pointers = out + position[None, :] * INTER + n[:, None]
        if MODE == "quant":
            tl.static_assert(NB == 1)
            values, act_scale = _quantize(tl.trans(tl.where((n < INTER)[:, None], act, 0.0)))
            tl.store(pointers, tl.trans(values), mask=keep)
            weight = tl.load(topk_weights + slot)
            tl.store(factor + slot, act_scale * weight * tl.load(s2 + E * H + expert), mask=live)
        else:
            tl.store(pointers, act, mask=keep)


@triton.jit(do_not_specialize=["slots"])
def quantize_act(act, q, factor, order, ids, topk_weights, s2, slots, H: tl.constexpr, INTER: tl.constexpr,
                 IP: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Quantize stage 1's rows, and write the factor that finally multiplies each row to factor[slot].

    act float32 [S, I] in sorted order -> q int8 [S, I], factor float32 [S] = scale * router weight * peak.
    """
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(order + position, mask=position < slots, other=0)
    expert = tl.load(ids + slot)
    live = (position < slots) & (expert >= 0) & (expert < E)
    k = tl.arange(0, IP)[None, :]
    keep = live[:, None] & (k < INTER)
    pointers = position[:, None] * INTER + k
    values, scale = _quantize(tl.load(act + pointers, mask=keep, other=0.0))
    tl.store(q + pointers, values, mask=keep)
    weight = tl.load(topk_weights + slot, mask=live, other=0.0)
    tl.store(factor + slot, scale * weight * tl.load(s2 + E * H + expert, mask=live, other=0.0), mask=live)


@triton.jit(do_not_specialize=["column16", "columns16"])
def stage2(q, w2, s2, shift2, order, block_expert, block_first, block_rows, num_blocks, out, column16, columns16,
           H: tl.constexpr, INTER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           STAGES: tl.constexpr, LEFT: tl.constexpr, PTX: tl.constexpr, MX: tl.constexpr,
           MODE: tl.constexpr):  # fmt: skip
    """Compute the down projection of one block of BM rows and BN of the columns column..column+columns-1.

    q int8 [S, I] in sorted order, w2 bytes [E, H, I/2], s2 float32: [E, H] relative to the expert's peak, then peaks
    [E].
    MODE "partial": out float16 [S, columns] by slot.
    MODE "acc": int32 accumulators instead.
    """
    IB: tl.constexpr = INTER // 2
    EVEN: tl.constexpr = IB % BK == 0
    column, columns = column16 * 16, columns16 * 16
    tiles = (columns + BN - 1) // BN
    block = tl.program_id(0) // tiles
    if block >= tl.load(num_blocks):
        return
    expert, position, slot, live = _block(order, block_expert, block_first, block_rows, block, BM)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    row = column + tl.where(n < columns, n, 0)
    k = tl.arange(0, BK)

    x_low = q + position[None, :] * INTER + k[:, None]
    weights = w2 + expert * (H * IB) + row[:, None] * IB + k[None, :]
    shifts = shift2 + expert * (H * (INTER // 32))
    acc = _zeros(BN, BM, LEFT)
    for start in tl.range(0, IB, BK, num_stages=STAGES):
        low = _load_k(x_low + start, k + start, IB, EVEN, 0)
        high = _load_k(x_low + start + IB, k + start, IB, EVEN, 0)
        w_low, w_high = _unpack(_load_k(weights + start, k + start, IB, EVEN, 1), PTX, MX)
        acc = _add(w_low, low, acc, _load_shifts(shifts, row, start, IB, 0, BK, BN, MX), LEFT, MX)
        acc = _add(w_high, high, acc, _load_shifts(shifts, row, start, IB, 1, BK, BN, MX), LEFT, MX)

    acc = _by_column(acc, LEFT)
    pointers = out + slot[None, :] * columns + n[:, None]
    keep = (n < columns)[:, None] & live[None, :]
    if MODE == "acc":
        tl.store(pointers, acc >> (0 if MX else 4), mask=keep)
    else:
        tl.store(pointers, (acc.to(tl.float32) * tl.load(s2 + expert * H + row)[:, None]).to(tl.float16), mask=keep)


@triton.jit(do_not_specialize=["column16", "columns16"])
def reduce_slots(partial, factor, ids, out, column16, columns16, H: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    """Write out[t, column + n] = sum over the token's slots j, in this order, of partial[slot, n] * factor[slot]."""
    column, columns = column16 * 16, columns16 * 16
    token = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        expert = tl.load(ids + slot)
        if (expert >= 0) & (expert < E):
            value = tl.load(partial + slot * columns + n, mask=n < columns, other=0.0)
            acc += value.to(tl.float32) * tl.load(factor + slot)
    tl.store(out + token * H + column + n, acc.to(out.dtype.element_ty), mask=n < columns)
