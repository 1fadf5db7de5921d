"""The disassembly of a kernel (`nvdisasm -c`) -> what its loop over memory issues, and the time that follows.

Predictions take every unit to be busy all the time; latency and a kernel's beginning and end come on top.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LABEL = re.compile(r"^\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
PREDICATE = re.compile(r"^@!?U?P[T\d]+\s+")
BRANCH = re.compile(r"^BRA\b.*`\((\.L_x_\d+)\)")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
# To and from device memory; LDGSTS and UBLKCP copy to shared memory without waiting.
LOADS, STORES, ASYNCHRONOUS = ("LDG", "LDGSTS"), ("STG",), ("LDGSTS", "UBLKCP", "UTMALDG")
TENSOR_CORES = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA")
FP32 = ("FADD", "FMUL", "FFMA")

# Lanes of a processor that finish an instruction in a clock, sm_90 (CUDA programming guide, throughput of arithmetic
# instructions). Every instruction takes an issue slot, too.
ISSUED = 128
LANES = {
    "special functions": (16, ("MUFU",)),
    "comparisons and integers": (
        64,
        (
            "FMNMX",
            "FSETP",
            "FSEL",
            "FSET",
            "ISETP",
            "IADD3",
            "VIADD",
            "LOP3",
            "SHF",
            "PRMT",
            "SEL",
            "LEA",
            "PLOP3",
            "F2FP",
        ),
    ),
    "fp64": (64, ("DADD", "DMUL", "DFMA", "DSETP")),
    "shared memory and exchanges": (32, ("LDS", "STS", "LDSM", "STSM", "SHFL", "LDG", "STG", "LDGSTS")),
}
# Threads, registers and bytes of shared memory of a processor, by architecture; a block takes 1 KiB more of the last.
THREADS, REGISTERS, MOST_BLOCKS = 2048, 65536, 32
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024}


class Device(NamedTuple):
    name: str
    processors: int
    clock: float  # Hz
    peak: float  # bytes/s by the datasheet
    copy: float  # bytes/s that a copy is taken to reach

    @property
    def copy_per_clock(self) -> float:
        """Bytes a processor."""
        return self.copy / (self.processors * self.clock)


H100 = Device("H100", 132, 1.755e9, 3.35e12, 3.0e12)
H200 = Device("H200", 132, 1.755e9, 4.8e12, 4.3e12)


@dataclass(frozen=True)
class Loop:
    """The instructions of a thread in one step of a loop, by opcode, and their accesses to device memory."""

    opcodes: Counter[str]
    loads: Counter[int]  # by bytes
    stores: Counter[int]
    repeats: bool  # False: the whole kernel, where nothing in a loop touches device memory

    @property
    def bytes(self) -> int:
        return sum(width * number for width, number in (self.loads + self.stores).items())

    def number(self, *opcodes: str) -> int:
        return sum(self.opcodes[opcode] for opcode in opcodes)

    def clocks_per_byte(self) -> dict[str, float]:
        """Of a processor, by what is busy."""
        busy = {"instructions issued": self.opcodes.total() / ISSUED}
        busy |= {unit: self.number(*opcodes) / lanes for unit, (lanes, opcodes) in LANES.items()}
        return {unit: clocks / self.bytes for unit, clocks in busy.items()}

    def load_of(self, device: Device) -> tuple[str, float]:
        """The busiest unit, and the time that it takes next to a copy of the same bytes."""
        busy = self.clocks_per_byte()
        unit = max(busy, key=lambda name: busy[name])
        return unit, busy[unit] * device.copy_per_clock


def main_loop(code: str) -> Loop:
    """Of the loops with no other loop inside, the one that moves the most bytes of device memory."""
    instructions, labels = parsed(code)
    loops = list(backward_branches(instructions, labels))
    innermost = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    steps = [counted(instructions[first : last + 1], repeats=True) for first, last in innermost]
    moving = [step for step in steps if step.bytes and step.loads]
    return max(moving, key=lambda step: step.bytes, default=counted(instructions, repeats=False))


def parsed(code: str) -> tuple[list[str], dict[str, int]]:
    """Instructions without their predicates, and the place of each label in them."""
    instructions: list[str] = []
    labels = {}
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.search(line):
            instructions.append(PREDICATE.sub("", found[1]))
    return instructions, labels


def backward_branches(instructions: list[str], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """The first and the last instruction of each loop; a branch to itself, where a kernel ends, is none."""
    for place, instruction in enumerate(instructions):
        branch = BRANCH.match(instruction)
        if branch and labels.get(branch[1], place) < place:
            yield labels[branch[1]], place


def counted(instructions: list[str], *, repeats: bool) -> Loop:
    opcodes: Counter[str] = Counter()
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for instruction in instructions:
        opcode, *modifiers = instruction.split()[0].split(".")
        opcodes[opcode] += opcode != "NOP"
        if opcode in LOADS or opcode in STORES:
            width = next((WIDTHS[modifier] for modifier in reversed(modifiers) if modifier in WIDTHS), 4)
            (stores if opcode in STORES else loads)[width] += 1
    return Loop(+opcodes, loads, stores, repeats)


def blocks_per_processor(architecture: str, warps: int, registers: int, shared: int) -> int:
    # Registers come to a warp in portions of 8 a thread.
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED[architecture] // (shared + 1024)
    return min(MOST_BLOCKS, THREADS // (32 * warps), by_registers, by_shared)
