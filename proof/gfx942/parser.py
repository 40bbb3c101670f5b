"""The compiler's final assembly text: instructions, labels, kernel descriptor and argument layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from .errors import MachineError, UnknownInstruction

_LABEL = re.compile(r"^([.\w$@]+):\s*(.*)$")
_ENCODING = re.compile(r"_(e32|e64_dpp|e64|sdwa|dpp)$")
_OPCODE = re.compile(r"^(v|s|ds|buffer|global|flat|scratch)_\w+$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `opcode` without its encoding suffix, operands in assembly order, modifiers by name."""

    opcode: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    line: int
    text: str

    def bits(self, name: str, count: int, default: bool = False) -> list[bool]:
        """Return the first bits of a modifier like op_sel:[0,1,0], one a source, or `count` defaults without it."""
        text = self.modifiers.get(name)
        return [bit == "1" for bit in text.strip("[]").split(",")][:count] if text else [default] * count


@dataclass(frozen=True)
class KernelArg:
    """One kernel argument: byte offset and size in the kernarg segment, and its kind in the metadata."""

    offset: int
    size: int
    kind: str
    name: str = ""


@dataclass
class Kernel:
    """A parsed kernel: its code and what the descriptor and the metadata say of it."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    descriptor: dict[str, int]
    args: list[KernelArg]
    metadata: dict[str, object] = field(default_factory=dict)
    decoded: object = field(default=None, repr=False, compare=False)  # closures of the first launch, for the next ones

    @property
    def vgprs(self) -> int:
        """Architectural vector registers that the code may name."""
        total = self.descriptor.get("next_free_vgpr", 256)
        return min(total, self.descriptor.get("accum_offset", total), 256)

    @property
    def agprs(self) -> int:
        """Accumulation registers that the code may name."""
        total = self.descriptor.get("next_free_vgpr", 256)
        return max(0, total - self.descriptor.get("accum_offset", total))

    @property
    def lds_bytes(self) -> int:
        """Statically allocated LDS of one workgroup."""
        return self.descriptor.get("group_segment_fixed_size", 0)

    @property
    def scratch_bytes(self) -> int:
        """Private (scratch) memory of one lane."""
        return self.descriptor.get("private_segment_fixed_size", 0)

    @property
    def kernarg_bytes(self) -> int:
        ends = [arg.offset + arg.size for arg in self.args]
        return max([self.descriptor.get("kernarg_size", 0), *ends])

    @property
    def workgroup(self) -> tuple[int, int, int] | None:
        """The workgroup size that the kernel requires, if it says so."""
        size = self.metadata.get("reqd_workgroup_size")
        if not isinstance(size, list):
            return None
        x, y, z = (int(n) for n in size)
        return x, y, z


def parse_kernels(text: str) -> list[Kernel]:
    """All kernels of one assembly file, in the order of their code."""
    descriptors = _descriptors(text)
    if not descriptors:
        raise MachineError("no kernel in this assembly", expected="a .amdhsa_kernel block")
    metadata = _metadata(text)
    return [
        _kernel(name, instructions, labels, descriptors[name], metadata.get(name, {}))
        for name, instructions, labels in _functions(text, set(descriptors))
    ]


def parse_kernel(text: str, name: str | None = None) -> Kernel:
    """The kernel called `name`, or the only one."""
    kernels = parse_kernels(text)
    chosen = [k for k in kernels if name is None or k.name == name]
    if len(chosen) != 1:
        names = ", ".join(k.name for k in kernels)
        raise MachineError(f"no single kernel {name or ''!r} in this assembly", expected=f"one of: {names}")
    return chosen[0]


def _kernel(
    name: str,
    instructions: list[Instruction],
    labels: dict[str, int],
    descriptor: dict[str, int],
    metadata: dict[str, object],
) -> Kernel:
    raw = metadata.get("args") or []
    assert isinstance(raw, list)
    args = [KernelArg(int(a["offset"]), int(a["size"]), str(a["value_kind"]), str(a.get("name", ""))) for a in raw]
    return Kernel(name, instructions, labels, descriptor, args, metadata)


def _metadata(text: str) -> dict[str, dict[str, object]]:
    """The `.amdgpu_metadata` block by kernel name; keys lose their leading dot. Empty without such a block."""
    block = re.search(r"\.amdgpu_metadata\s*\n---\n(.*?)\n\.\.\.", text, re.S)
    document = _without_dots(yaml.load(block[1], Loader=yaml.CSafeLoader)) if block else {}
    return {str(kernel["name"]): kernel for kernel in document.get("amdhsa.kernels", [])}


def _without_dots(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.lstrip("."): _without_dots(inner) for key, inner in value.items()}
    return [_without_dots(inner) for inner in value] if isinstance(value, list) else value


def _descriptors(text: str) -> dict[str, dict[str, int]]:
    found = {}
    for match in re.finditer(r"^\s*\.amdhsa_kernel\s+(\S+)(.*?)\.end_amdhsa_kernel", text, re.S | re.M):
        values = re.findall(r"^\s*\.amdhsa_(\w+)\s+(0x[0-9a-fA-F]+|\d+)\s*(?:;.*)?$", match[2], re.M)
        found[match[1]] = {key: int(value, 0) for key, value in values}
    return found


def _functions(text: str, names: set[str]) -> Iterable[tuple[str, list[Instruction], dict[str, int]]]:
    current: tuple[str, list[Instruction], dict[str, int]] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(;|//).*", "", raw).strip()
        label = _LABEL.match(line)
        if label:
            if label[1] in names:
                current = (label[1], [], {})
            elif label[1].startswith(".Lfunc_end") and current:
                yield current
                current = None
            elif current:
                current[2][label[1]] = len(current[1])
            line = label[2]
        if line.startswith((".amdhsa_kernel", ".section")) and current and current[1]:
            yield current
            current = None
        if current and line and not line.startswith("."):
            current[1].append(parse_instruction(line, number))
    if current:
        yield current


def parse_instruction(line: str, number: int = 0) -> Instruction:
    """Split one line of assembly, comments removed."""
    mnemonic, _, rest = line.partition(" ") if "\t" not in line else line.replace("\t", " ").partition(" ")
    if not _OPCODE.match(mnemonic):
        raise UnknownInstruction(f"not an instruction: {line}", where=f"line {number}")
    encoding = _ENCODING.search(mnemonic)
    opcode = mnemonic[: encoding.start()] if encoding else mnemonic
    operands, modifiers = [], {}
    for part in split_outside_brackets(rest, ","):
        words = split_outside_brackets(part, " ")
        operands.append(words[0])
        for word in words[1:]:
            key, _, value = word.partition(":")
            modifiers[key] = value
    return Instruction(opcode, encoding[1] if encoding else "", tuple(operands), modifiers, number, line)


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split at `separator`, but not inside [], () or quotes; empty parts are dropped."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += char in "[("
        depth -= char in "])"
        if char == separator and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    parts.append(current.strip())
    return [part for part in parts if part]
