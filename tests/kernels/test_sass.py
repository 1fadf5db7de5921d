"""Reading of compiled code, and what the kernels over rows of logits issue for an element."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sass import H100, H200, blocks_per_processor, main_loop

ROOT = Path(__file__).parents[2]
# A loop of three instructions that copies 16 bytes, around it one that multiplies, and what stands at a kernel's end.
CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   FMUL R2, R2, R3 ;
.L_x_0:
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   MUFU.EX2 R5, R4 ;
        /*0040*/               @P0 STG.E.U16 desc[UR4][R6.64], R5 ;
        /*0050*/                   NOP ;
        /*0060*/              @!P1 BRA `(.L_x_0) ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   BRA `(.L_x_2);
"""


def test_the_innermost_loop_that_moves_memory_is_read():
    loop = main_loop(CODE)
    assert loop.opcodes == {"LDG": 1, "MUFU": 1, "STG": 1, "BRA": 1}
    assert (loop.loads, loop.stores, loop.bytes) == ({16: 1}, {2: 1}, 18)
    assert loop.repeats


def test_a_kernel_without_a_loop_is_read_whole():
    loop = main_loop(
        "".join(line + "\n" for line in CODE.splitlines() if "L_x_0)" not in line and "L_x_1)" not in line)
    )
    assert not loop.repeats
    assert loop.number("FMUL", "MOV", "EXIT") == 3


def test_the_busiest_unit_beside_a_copy():
    unit, time = main_loop(CODE).load_of(H100)
    # One special function for 18 bytes, 16 of them a clock, where a copy moves 3.0e12 bytes a second.
    assert unit == "special functions"
    assert time == pytest.approx((1 / 16 / 18) * 3.0e12 / (132 * 1.755e9))
    assert main_loop(CODE).load_of(H200)[1] > time


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "blocks"), [(8, 32, 0, 8), (8, 33, 0, 6), (4, 32, 71680, 3), (1, 16, 0, 32)]
)
def test_blocks_of_a_processor(warps, registers, shared, blocks):
    assert blocks_per_processor("sm_90", warps, registers, shared) == blocks


def test_rows_of_logits_are_read_in_the_widest_loads_and_in_few_instructions(tmp_path):
    """13.3, 17.2 and 17.3 instructions an element once: an exponential in five of them, a comparison with the label for
    each column, and logits scaled before their maximum was known.
    """
    program = (
        "import json; from benchmarks import read_kernels as r\n"
        "wanted = [c for c in r.chosen() if c.kernel in r.ROWS and c.name in ('bf16, V 128256', "
        "'bf16 to bf16, V 128256')]\n"
        "print(json.dumps([r.reading(c, 90) for c in wanted]))"
    )
    environment = {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    read = {entry["kernel"]: entry for entry in json.loads(done.stdout)}
    assert set(read) == {"logprobs_kernel", "statistics_kernel", "dlogits_kernel"}
    for entry in read.values():
        assert set(entry["loads"]) == {"16"}
        assert set(entry["stores"]) <= {"16"}
        assert entry["instructions"] <= 10 * entry["elements"]
        # All warps that a processor can hold.
        assert entry["blocks"] * entry["warps"] == 64
