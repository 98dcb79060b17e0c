#!/usr/bin/env python3
"""Measure when a GPU serves again after a kernel of a process hangs on it.

    hung_process.py                 every way, each in processes of its own
    hung_process.py WAY STEP        one process of a way

A process starts a kernel that runs for 5 seconds. One second later a kernel of a new process shall
run. Ways: `beside` leaves the first process alone, `killed` kills it, `replaced` lets it execute
the new program itself, and `handed` does so after a helper has got its descriptors of the GPU.
Prints how long after the first second the new kernel had run. Needs libcuda and a GPU of compute
capability 9.0. ADR 92 has the table.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from faulted_context import Gpu

WAYS = ("beside", "killed", "replaced", "handed")
HELPER = "import sys, time; sys.stdin.read(); time.sleep(float(sys.argv[1]))"


def gpu_descriptors() -> list[int]:
    """Descriptors of the driver's devices."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            found.append(int(name))
    return found


def serve(since: float) -> None:
    """Runs a kernel in this process."""
    gpu = Gpu("release")
    if gpu.open():
        print("   refused", flush=True)
        return
    opened = time.time() - since
    right = gpu.run("good", wait=True)
    print(f"   opened after {opened:.2f} s, ran after {time.time() - since:.2f} s: {right}")


def hang(way: str) -> None:
    gpu = Gpu("release")
    gpu.open()
    gpu.run("good", wait=True)
    gpu.run("hang", wait=False)
    print("hangs", flush=True)
    time.sleep(1)
    if way in ("beside", "killed"):
        time.sleep(60)
    if way == "handed":
        descriptors = gpu_descriptors()
        print(f"   {len(descriptors)} descriptors", flush=True)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        command = [sys.executable, "-c", HELPER, "0.2"]
        subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
    os.execv(sys.executable, [sys.executable, __file__, way, f"serve {time.time()}"])


def attempt(way: str) -> None:
    print(way, flush=True)
    command = [sys.executable, __file__, way]
    first = subprocess.Popen([*command, "hang"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    first.stdout.readline()
    if way in ("beside", "killed"):
        time.sleep(1)
        since = time.time()
        if way == "killed":
            first.send_signal(signal.SIGKILL)
        subprocess.run([*command, f"serve {since}"], check=False, timeout=60)
        first.kill()
    print(first.communicate(timeout=90)[0], end="", flush=True)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2] == "hang":
        hang(sys.argv[1])
    elif len(sys.argv) == 3:
        serve(float(sys.argv[2].split()[1]))
    else:
        for way in WAYS:
            attempt(way)
            time.sleep(6)


if __name__ == "__main__":
    main()
