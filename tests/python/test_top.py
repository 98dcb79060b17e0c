"""`atoll top`: as text, as JSON, and in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

from support import BINARY, STOP_SECONDS, Server, fp32_body, infer_url

RIGHT = b"\x1b[C"
ALTERNATE_SCREEN, NORMAL_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


def top(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(BINARY), "top", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Requests for as long as the block takes."""
    ended = threading.Event()

    def send() -> None:
        url = infer_url(server, "identity_fp32")
        while not ended.is_set():
            assert requests.post(url, json=fp32_body(1.0), timeout=60).ok
            time.sleep(0.01)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_one_frame_is_printed_as_text(server: Server) -> None:
    done = top("--once", "--url", server.url)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("identity_fp32")]
    assert row.split()[1] == "rt" or row.split()[1] == "be"
    assert any(line.startswith("MODEL") and "P99" in line for line in lines)
    assert any("preemptions/s" in line for line in lines)
    assert "\x1b" not in done.stdout


def test_figures_are_json(server: Server) -> None:
    with load(server):
        done = top("--once", "--json", "--url", server.url)
    figures = json.loads(done.stdout)
    (model,) = [model for model in figures["models"] if model["name"] == "identity_fp32"]
    assert model["requests_per_second"] > 0 and model["p99_us"] > 0
    assert figures["devices"][0]["name"] == "cpu"


def test_without_a_terminal_or_a_server_it_says_what_helps(server: Server) -> None:
    done = top("--url", server.url)
    assert done.returncode == 2 and "--once" in done.stderr
    done = top("--once", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "127.0.0.1:1" in done.stderr


class Terminal:
    """`atoll top` in a pseudo terminal of 80 by 24."""

    def __init__(self, url: str) -> None:
        self.main, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(follower)
        self.follower = follower
        self.process = subprocess.Popen(
            [str(BINARY), "top", "--url", url], stdin=follower, stdout=follower, stderr=follower,
            env={**os.environ, "TERM": "xterm-256color"}, start_new_session=True,
        )
        self.seen = b""

    def wait_for(self, text: bytes, seconds: float = 60) -> bool:
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.main], [], [], 0.1)[0]:
                self.seen += os.read(self.main, 65536)
        return text in self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)
        os.close(self.follower)


def test_it_draws_sorts_and_ends_in_a_terminal(server: Server) -> None:
    terminal = Terminal(server.url)
    try:
        assert terminal.wait_for(ALTERNATE_SCREEN) and terminal.wait_for(b"identity_fp32")
        assert terminal.wait_for(b"REQ/Sv")
        os.write(terminal.main, RIGHT)
        assert terminal.wait_for(b"P50v")
        os.write(terminal.main, b"q")
        assert terminal.wait_for(NORMAL_SCREEN)
        assert terminal.process.wait(timeout=STOP_SECONDS) == 0
        # The terminal is as it was.
        assert termios.tcgetattr(terminal.follower) == terminal.settings
    finally:
        terminal.close()
