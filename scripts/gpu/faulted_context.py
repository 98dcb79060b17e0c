#!/usr/bin/env python3
"""Try ways to use a GPU again after a kernel has faulted on it, with the driver alone.

    faulted_context.py                 every way with every fault, each in a process of its own
    faulted_context.py WAY FAULT       one of them

Prints how long the calls took that failed or took more than 20 ms, and whether a kernel runs again.
Needs libcuda and a GPU of compute capability 9.0. ADR 67 has the table.
"""

from __future__ import annotations

import ctypes as c
import subprocess
import sys
import time

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry good(.param .u64 p) {
  .reg .u64 %a; .reg .u32 %v;
  ld.param.u64 %a,[p]; mov.u32 %v, 42; st.global.u32 [%a], %v; ret; }
.visible .entry illegal(.param .u64 p) {
  .reg .u64 %a; .reg .u32 %v;
  mov.u64 %a, 64; mov.u32 %v, 42; st.global.u32 [%a], %v; ret; }
.visible .entry misaligned(.param .u64 p) {
  .reg .u64 %a; .reg .u32 %v;
  ld.param.u64 %a,[p]; add.u64 %a,%a,1; mov.u32 %v, 42; st.global.u32 [%a], %v; ret; }
.visible .entry trapped(.param .u64 p) { trap; ret; }
.visible .entry hang(.param .u64 p) {
  .reg .u64 %b; .reg .u64 %n; .reg .pred %q;
  mov.u64 %b, %globaltimer;
  L: mov.u64 %n, %globaltimer; sub.u64 %n,%n,%b; setp.lt.u64 %q,%n,5000000000; @%q bra L; ret; }
\0"""
WAYS = ("release", "reset", "own")
FAULTS = ("illegal", "trapped", "misaligned", "hang")


def call(driver: c.CDLL, name: str, *arguments: object) -> int:
    began = time.perf_counter()
    code = getattr(driver, name)(*arguments)
    millis = (time.perf_counter() - began) * 1e3
    if code or millis > 20:
        print(f"   {name} -> {code} after {millis:.1f} ms", flush=True)
    return code


class Gpu:
    """The first GPU, opened in one of the ways."""

    def __init__(self, way: str) -> None:
        self.way, self.driver = way, c.CDLL("libcuda.so.1")
        self.device, self.context = c.c_int(), c.c_void_p()
        self.driver.cuInit(0)
        self.driver.cuDeviceGet(c.byref(self.device), 0)

    def call(self, name: str, *arguments: object) -> int:
        return call(self.driver, name, *arguments)

    def open(self) -> int:
        if self.way == "own":
            return self.call("cuCtxCreate_v2", c.byref(self.context), 0, self.device)
        code = self.call("cuDevicePrimaryCtxRetain", c.byref(self.context), self.device)
        return code or self.call("cuCtxSetCurrent", self.context)

    def destroy(self) -> None:
        calls = {"own": "cuCtxDestroy_v2", "reset": "cuDevicePrimaryCtxReset_v2"}
        name = calls.get(self.way, "cuDevicePrimaryCtxRelease_v2")
        self.call(name, self.context if self.way == "own" else self.device)

    def run(self, kernel: str, wait: bool) -> bool:
        """Whether the kernel ran; `good` must have written its number."""
        module, function, stream = c.c_void_p(), c.c_void_p(), c.c_void_p()
        memory, value = c.c_uint64(), c.c_uint()
        self.call("cuModuleLoadData", c.byref(module), c.c_char_p(PTX))
        self.call("cuModuleGetFunction", c.byref(function), module, kernel.encode())
        self.call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(4096))
        self.call("cuStreamCreate", c.byref(stream), 1)
        arguments = (c.c_void_p * 1)(c.addressof(memory))
        shape = (1, 1, 1, 1, 1, 1, 0)
        self.call("cuLaunchKernel", function, *shape, stream, arguments, None)
        if wait and self.call("cuStreamSynchronize", stream):
            return False
        if kernel == "good":
            self.call("cuMemcpyDtoH_v2", c.byref(value), memory, c.c_size_t(4))
        return value.value == 42


def attempt(way: str, fault: str) -> None:
    gpu = Gpu(way)
    gpu.open()
    gpu.run("good", wait=True)
    gpu.run(fault, wait=fault != "hang")
    gpu.destroy()
    works = gpu.open() == 0 and gpu.run("good", wait=True)
    print(f"{way}, {fault}: {'works again' if works else 'refused'}", flush=True)


def main() -> None:
    if len(sys.argv) == 3:
        attempt(sys.argv[1], sys.argv[2])
        return
    for way in WAYS:
        for fault in FAULTS:
            subprocess.run([sys.executable, __file__, way, fault], timeout=60, check=False)


if __name__ == "__main__":
    main()
