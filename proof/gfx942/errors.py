"""Errors of a kernel under test, never of its data."""

from __future__ import annotations

from kimi_w4a8_eagle3.base.errors import KimiError


class MachineError(KimiError):
    """A kernel did something that real hardware would answer with a wrong result, a fault or chance."""


class UnknownInstruction(MachineError):
    """An opcode, modifier or operand that the interpreter does not model."""


class UndefinedRead(MachineError):
    """A register, LDS byte or memory byte was read before it was written."""


class OutOfBounds(MachineError):
    """An address outside LDS, outside every buffer, or a register that the kernel did not allocate."""


class MissingWait(MachineError):
    """A result of a memory instruction was used before the `s_waitcnt` that makes it valid."""


class DataRace(MachineError):
    """Two waves touch the same bytes, one of them writing, with no barrier between."""
