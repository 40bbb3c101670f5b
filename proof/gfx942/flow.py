"""Data flow in a hot region: which loads are weights, what unpacking them costs, how much is in flight."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from .costs import address_group, is_vector_load, kind, load_bytes, loads_to_lds, scalar_registers, vector_registers
from .parser import Instruction

NEAR = 24  # a wait for a load issued at most so many instructions ago cannot hide its latency
Registers = set[tuple[str, int]]


@dataclass(frozen=True)
class WeightFlow:
    """Weights are the loads, not staged through LDS, of the address group with most bytes.

    bytes: per wave. unpack: vector ALU operations between a weight load and the MFMA that eats it, by opcode.
    """

    group: str | None
    bytes: int
    staged_groups: tuple[str, ...]
    unpack: dict[str, int]

    @property
    def words(self) -> int:
        """Weight dwords per lane; one holds eight 4-bit weights."""
        return self.bytes // 256

    @property
    def unpack_per_word(self) -> float:
        return sum(self.unpack.values()) / self.words if self.words else 0.0


@dataclass(frozen=True)
class InFlight:
    """Weight bytes that one wave has outstanding, and waits for loads that were issued just before."""

    maximum: int
    mean: float
    exposed_waits: int


def renamed(code: list[Instruction]) -> list[Instruction]:
    """The same with one name for each resource: copies have that of the first, others in its registers another."""
    values: dict[int, object] = {}
    names: dict[tuple[object, ...], str] = {}
    result = []
    for number, instruction in enumerate(code):
        operands = instruction.operands
        if is_vector_load(instruction):
            for operand in (o for o in operands if o.startswith("s[")):
                value = tuple(values.get(r, r) for r in sorted(scalar_registers(operand)))
                name = names.setdefault(value, f"{operand}#{number}" if operand in names.values() else operand)
                operands = tuple(name if o == operand else o for o in operands)
            instruction = replace(instruction, operands=operands)
        elif operands and re.match("s_(?!cmp|bitcmp)|v_readfirstlane|v_readlane", instruction.opcode):
            targets = sorted(scalar_registers(operands[0]))
            copied = sorted(scalar_registers(operands[1])) if instruction.opcode.startswith("s_mov_b") else []
            copies = [values.get(r, r) for r in copied]  # before any of them changes
            for n, register in enumerate(targets):
                values[register] = copies[n] if len(copies) == len(targets) else (number, n)
        result.append(instruction)
    return result


def weight_flow(region: list[Instruction], loop: bool) -> WeightFlow:
    """Find the weights of `region` and follow them to the MFMAs."""
    staged = _staged_groups(region + region if loop else region)
    loaded: Counter[str] = Counter()
    for instruction in region:
        if is_vector_load(instruction) and not loads_to_lds(instruction):
            loaded[address_group(instruction)] += 64 * load_bytes(instruction.opcode)
    direct = {name: count for name, count in loaded.items() if name not in staged}
    chosen = max(direct, key=lambda name: direct[name], default=None)
    unpack = _unpack_operations(region, loop, chosen)
    return WeightFlow(chosen, loaded[chosen] if chosen else 0, tuple(sorted(staged)), dict(unpack))


def _staged_groups(sequence: list[Instruction]) -> set[str]:
    """Address groups whose data is written to LDS: activations."""
    owner: dict[tuple[str, int], str] = {}
    staged: set[str] = set()
    for instruction in sequence:
        if is_vector_load(instruction):
            if loads_to_lds(instruction):
                staged.add(address_group(instruction))
                continue
            for register in vector_registers(instruction.operands[0]):
                owner[register] = address_group(instruction)
        elif instruction.opcode.startswith("ds_write"):
            used = {r for operand in instruction.operands[1:] for r in vector_registers(operand)}
            staged |= {owner[register] for register in used if register in owner}
        elif instruction.opcode.startswith("v_") and instruction.operands:
            for register in vector_registers(instruction.operands[0]):
                owner.pop(register, None)
    return staged


def _unpack_operations(region: list[Instruction], loop: bool, group: str | None) -> Counter[str]:
    last = max((n for n, i in enumerate(region) if kind(i.opcode) == "mfma"), default=-1)
    tainted: Registers = set()
    if loop:  # what the previous trip loaded is unpacked in this one
        _follow(region, group, tainted)
        return _follow(region, group, tainted)
    return _follow(region[: last + 1], group, tainted)


def _follow(region: list[Instruction], group: str | None, tainted: Registers) -> Counter[str]:
    operations: Counter[str] = Counter()
    for instruction in region:
        if not instruction.operands or loads_to_lds(instruction):
            continue
        opcode, targets = instruction.opcode, vector_registers(instruction.operands[0])
        if is_vector_load(instruction):
            weights = address_group(instruction) == group
        elif kind(opcode) == "mfma" or opcode.startswith("ds_read"):
            weights = False
        elif opcode.startswith("v_"):
            sources = {r for operand in instruction.operands[1:] for r in vector_registers(operand)}
            weights = bool(sources & tainted)
            operations[opcode] += weights
        else:
            continue
        tainted.difference_update(targets)
        tainted.update(targets if weights else ())
    return +operations


def in_flight(region: list[Instruction], loop: bool, group: str | None) -> InFlight:
    """Replay the region's vmcnt queue (a loop for a second trip, with the first one's loads outstanding)."""
    queue: list[tuple[int, int, bool]] = []  # position, weight bytes, is a load
    sizes: list[int] = []
    exposed = 0
    trips = 2 if loop else 1
    for position, instruction in enumerate(region * trips):
        counted = position >= len(region) * (trips - 1)
        if re.match(r"^(buffer|global|flat|scratch)_(load|store|atomic)_", instruction.opcode):
            load = "_load_" in instruction.opcode
            weight = load and address_group(instruction) == group and not loads_to_lds(instruction)
            queue.append((position, 64 * load_bytes(instruction.opcode) if weight else 0, load))
        wait = re.search(r"vmcnt\((\d+)\)", instruction.text) if instruction.opcode == "s_waitcnt" else None
        if wait:
            done = queue[: max(0, len(queue) - int(wait[1]))]
            queue = queue[len(done) :]
            exposed += counted and any(load and position - at <= NEAR for at, _, load in done)
        if counted:
            sizes.append(sum(size for _, size, _ in queue))
    return InFlight(max(sizes, default=0), sum(sizes) / len(sizes) if sizes else 0.0, exposed)
