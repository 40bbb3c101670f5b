"""Memory of this process as device memory: kernels take host addresses, read and write in place, and go no further."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_asm import POINTERS, kernel

from proof.gfx942 import Gfx942Device, MachineError, Memory, OutOfBounds, UndefinedRead


class Process:
    """Two arrays that a host shares, 256 bytes each, and launches with their addresses."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.source, self.result = np.arange(64, dtype=np.uint32), np.full(64, 1000, np.uint32)
        self.memory.share(self.source.view(np.uint8), "source")
        self.result_buffer = self.memory.share(self.result.view(np.uint8), "result", written=False)

    def launch(self, body: str, arguments: bytes | None = None) -> None:
        pointers = np.array([self.source.ctypes.data, self.result.ctypes.data], np.uint64)
        code = kernel(POINTERS + body)
        Gfx942Device(self.memory).launch(code, (1, 1, 1), (64, 1, 1), arguments or pointers.tobytes())


def test_a_launch_finds_and_leaves_the_process_own_bytes() -> None:
    process = Process()
    body = """
	global_load_dword v20, v1, s[4:5]
	s_waitcnt vmcnt(0)
	global_store_dword v1, v20, s[6:7]"""
    for _ in range(2):
        process.source += 7
        process.launch(body)
        assert (process.result == process.source).all() and process.result[0] % 7 == 0


def test_one_access_to_two_buffers() -> None:
    process = Process()
    process.memory.host_wrote(process.result_buffer)
    process.launch("""
	v_cmp_gt_u32_e32 vcc, 32, v0
	v_mov_b32_e32 v10, s4
	v_mov_b32_e32 v11, s5
	v_mov_b32_e32 v12, s6
	v_mov_b32_e32 v13, s7
	v_cndmask_b32_e32 v14, v12, v10, vcc
	v_cndmask_b32_e32 v15, v13, v11, vcc
	global_load_dword v20, v[14:15], off
	s_waitcnt vmcnt(0)
	global_store_dword v1, v20, s[6:7]""")
    assert (process.result[:32] == 0).all() and (process.result[32:] == 1000).all()


@pytest.mark.parametrize(
    ("body", "arguments", "error", "match"),
    [
        ("global_load_dword v32, v1, s[4:5] offset:4", None, OutOfBounds, r"source \+ 256"),
        ("global_load_dword v32, v1, s[4:5]", bytes(16), OutOfBounds, "before every buffer"),
        ("global_load_dword v32, v1, s[6:7]", None, UndefinedRead, r"result \+ 0"),
        ("", bytes(12), MachineError, "12 bytes of arguments"),
        ("", bytes(24), MachineError, "24 bytes of arguments"),
    ],
)
def test_what_a_host_may_not_do(body: str, arguments: bytes | None, error: type[MachineError], match: str) -> None:
    with pytest.raises(error, match=match):
        Process().launch(body, arguments)
