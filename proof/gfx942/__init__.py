"""An interpreter of gfx942 (CDNA3, wave64) machine code on NumPy: it proves kernels without a GPU.

`parse_kernel(asm_text)` reads the compiler's final assembly, `Gfx942Device(Memory())` executes it. See
docs/virtual-node.md.
"""

from .errors import DataRace, MachineError, MissingWait, OutOfBounds, UndefinedRead, UnknownInstruction
from .global_memory import Buffer, Memory
from .machine import Gfx942Device
from .parser import Kernel, parse_kernel, parse_kernels

__all__ = [
    "Buffer", "DataRace", "Gfx942Device", "Kernel", "MachineError", "Memory", "MissingWait", "OutOfBounds",
    "UndefinedRead", "UnknownInstruction", "parse_kernel", "parse_kernels",
]  # fmt: skip
