"""Scratch (private) memory: spilled registers, a few bytes of each lane (CDNA3 ISA 10.5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .byte_store import join_bytes
from .context import Context
from .errors import OutOfBounds, UndefinedRead
from .forms import Form, extend
from .operands import Operand, reader
from .state import LANES, Waves
from .waits import Outstanding

Step = Callable[[Waves], object]


def decode_scratch(action: str, form: Form, operands: list[Operand], offset: int, context: Context) -> Step:
    """The closure of a scratch load or store."""
    place = 0 if action == "load" else 1
    data, (vector, scalar) = operands[place], operands[:place] + operands[place + 1 :]
    readers = []
    if vector.kind == "vector":
        readers.append(reader(vector, "u32"))
    if scalar.kind != "off":
        readers.append(reader(scalar, "u32"))

    def step(w: Waves) -> None:
        lanes = context.active(w)
        start = np.full((w.count, LANES), offset, np.int64)
        for read in readers:
            start = start + read(w).astype(np.int64)
        at = lanes.pick(start)[None] + np.arange(form.size)[:, None]
        memory, written = w.rows.scratch, w.rows.scratch_written
        if (at < 0).any() or (at >= memory.shape[2]).any():
            raise OutOfBounds(f"scratch access outside the {memory.shape[2]} bytes of a lane")
        place = (lanes.rows[None], lanes.lanes[None], at)
        if action == "store":
            w.check_vector(data.register, form.words)
            raw = np.stack(
                [lanes.pick(w.u32[data.register + n // 4]) >> np.uint32(8 * (n % 4)) for n in range(form.size)]
            )
            memory[place], written[place] = raw.astype(np.uint8), True
            w.queues.vm.append(Outstanding("vm"))
            return
        if not written[place].all():
            raise UndefinedRead("a scratch load reads bytes that nobody wrote")
        words = extend(join_bytes(memory[place]), form)
        w.vector_load_issued(data.register, form.words)
        for n, word in enumerate(words):
            lanes.put(w.u32[data.register + n], word)
        w.queues.vm.append(Outstanding("vm", vector=range(data.register, data.register + form.words)))

    return step
