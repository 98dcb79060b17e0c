"""Places of a cluster that `chaos.py` can break: ways between processes, and a disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path


class Proxy:
    """The way to a port. While it is cut, bytes wait, as when a network loses packets; with a delay
    they arrive that much later."""

    def __init__(self, host: str, port: int, target: tuple[str, int]) -> None:
        self.host, self.port, self.target = host, port, target
        self.open = asyncio.Event()
        self.open.set()
        self.delay = 0.0

    async def listen(self) -> None:
        await asyncio.start_server(self.connect, self.host, self.port)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.open.wait()
        try:
            there = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        # Cancelled at the end of the run.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self.pump(reader, there[1]), self.pump(there[0], writer))

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.delay > 0:
                    await asyncio.sleep(self.delay)
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class SmallDisk:
    """A folder with a file system of its own that can be filled: a tmpfs in a mount namespace,
    which needs no root where users may make namespaces. Only processes started with `inside` see
    it."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        as_root = os.geteuid() == 0
        user = [] if as_root else ["--map-root-user"]
        mount = f"mount -t tmpfs -o size={mebibytes}m none '{folder}' && exec sleep 1000000"
        self.holder = subprocess.Popen(
            ["unshare", *user, "--mount", "sh", "-c", mount], stderr=subprocess.DEVNULL
        )
        enter = [] if as_root else ["--user", "--preserve-credentials"]
        there = f"--wd={os.getcwd()}"
        self.inside = ("nsenter", "--target", str(self.holder.pid), *enter, "--mount", there)
        self.filler = Path(f"/proc/{self.holder.pid}/root{folder.resolve()}") / "filler"
        while self.holder.poll() is None and not self.is_mounted():
            time.sleep(0.01)

    def is_mounted(self) -> bool:
        """Also whether the shell that mounts has become the process that waits."""
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{self.holder.pid}/comm").read_text().strip()
            return name == "sleep"
        return False

    @property
    def is_there(self) -> bool:
        return self.holder.poll() is None

    def fill(self) -> int:
        """Writes until nothing fits any more; the number of bytes."""
        written = 0
        with self.filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (65536, 1):
                with contextlib.suppress(OSError):
                    while True:
                        written += file.write(b"x" * size)
        return written

    def empty(self) -> None:
        self.filler.unlink(missing_ok=True)

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()


def small_disk(folder: Path, mebibytes: int) -> SmallDisk | None:
    """A small disk, where this machine allows one."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return None
    disk = SmallDisk(folder, mebibytes)
    return disk if disk.is_there else None
