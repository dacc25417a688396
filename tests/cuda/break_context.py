"""Ruins this process's CUDA context on purpose, through the driver: a kernel that faults in the primary
context, which the engine uses too."""

from __future__ import annotations

import ctypes
from typing import Any

NO_COMPILER = 221  # CUDA_ERROR_JIT_COMPILER_NOT_FOUND: this driver comes without its compiler
_PTX = """
.version 7.5
.target sm_75
.address_size 64
.visible .entry fault()
{
  .reg .b64 %address;
  .reg .b32 %value;
  mov.u64 %address, 64;
  mov.u32 %value, 1;
  BODY
  ret;
}
"""
FAULTS = {
    "trap": "trap;",
    "illegal address": "st.global.u32 [%address], %value;",
    "misaligned address": "add.u64 %address, %address, 1; st.global.u32 [%address], %value;",
}


class NoCompiler(Exception):
    """The driver cannot compile the kernel."""


def break_context(fault: str, ordinal: int = 0) -> str:
    """Launches a kernel that ends in `fault` and waits for it.

    Returns:
        The driver's name of the error.

    Raises:
        NoCompiler: The kernel cannot be made here.
        RuntimeError: Something else failed than the kernel, or it did not.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def name(code: int) -> str:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"?").decode()

    def must(function: str, *arguments: Any) -> None:
        code = getattr(driver, function)(*arguments)
        if code == NO_COMPILER:
            raise NoCompiler(name(code))
        if code:
            raise RuntimeError(f"{function}: {name(code)}")

    device, context, module, kernel = ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3))
    must("cuInit", 0)
    must("cuDeviceGet", ctypes.byref(device), ordinal)
    must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    must("cuCtxPushCurrent_v2", context)
    ptx = _PTX.replace("BODY", FAULTS[fault]).encode()
    must("cuModuleLoadData", ctypes.byref(module), ptx)
    must("cuModuleGetFunction", ctypes.byref(kernel), module, b"fault")
    must("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    code = driver.cuCtxSynchronize()
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    if not code:
        raise RuntimeError(f"a kernel that ends in {fault!r} went well")
    return name(code)
