"""A page in Debian's Chromium, driven over its DevTools protocol by the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from support import stop_process, wait_for

# ./test sets the variable where the browser is installed and does not start.
CHROMIUM = None
if "ATOLL_NO_BROWSER" not in os.environ:
    CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


# Pages of the console.
PAGES = ["now", "timeline", "models", "plan", "cluster"]


class Browser:
    """One page of a browser of its own."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        assert CHROMIUM
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}",
             "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.socket: socket.socket | None = None
        self.events: list[dict[str, Any]] = []
        self._buffer = b""
        self._number = 0
        try:
            self._connect(folder / "DevToolsActivePort")
        except BaseException:
            self.close()
            raise
        for domain in ["Page", "Runtime", "Log", "DOM"]:
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _connect(self, file: Path) -> None:
        assert wait_for(lambda: file.exists() and file.read_text().count("\n") >= 1)
        port = int(file.read_text().split()[0])
        pages: list[dict[str, Any]] = []

        def found() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
                pages[:] = [target for target in json.load(answer) if target["type"] == "page"]
            return bool(pages)

        assert wait_for(found)
        path = "/" + pages[0]["webSocketDebuggerUrl"].split("/", 3)[3]
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket",
                 "Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self.socket.recv(4096)
        self._buffer = self._buffer.split(b"\r\n\r\n", 1)[1]

    def _take(self, count: int) -> bytes:
        assert self.socket
        while len(self._buffer) < count:
            data = self.socket.recv(65536)
            assert data, "the browser closed the connection"
            self._buffer += data
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _message(self) -> dict[str, Any]:
        content = b""
        while True:
            first, length = self._take(2)
            length &= 127
            if length == 126:
                length = struct.unpack(">H", self._take(2))[0]
            elif length == 127:
                length = struct.unpack(">Q", self._take(8))[0]
            content += self._take(length)
            if first & 0x80:
                return json.loads(content)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol; events that come before its answer are kept."""
        assert self.socket
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        data = json.dumps(message).encode()
        size = len(data)
        head = bytes([0x81])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 1 << 16:
            head += bytes([0x80 | 126]) + struct.pack(">H", size)
        else:
            head += bytes([0x80 | 127]) + struct.pack(">Q", size)
        # Frames of a client are masked; a mask of zeros leaves them as they are.
        self.socket.sendall(head + bytes(4) + data)
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Prefers light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        assert self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                           returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> bool:
        """Whether `expression` became true within `seconds`."""
        # An element as a value is an empty object, which Python takes for false.
        return wait_for(lambda: self.evaluate(f"Boolean({expression})"), seconds)

    def go(self, page: str) -> None:
        """Goes to a page of the console that is open, and waits until it is shown."""
        self.evaluate(f"location.hash = '#{page}'")
        title = "document.querySelector('main h1')?.textContent.toLowerCase()"
        assert self.wait(f"{title} === '{page}'"), self.evaluate(title)

    def drag(self, points: list[tuple[float, float]]) -> None:
        """Moves the pressed mouse along `points`."""
        for index, (x, y) in enumerate(points):
            kind = "mouseMoved" if index else "mousePressed"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1,
                      clickCount=1)
        x, y = points[-1]
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left",
                  clickCount=1)

    def errors(self) -> list[str]:
        """Errors of the pages so far."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"])[:500])
            elif event.get("method") == "Log.entryAdded":
                entry = parameters["entry"]
                if entry["level"] == "error":
                    found.append(f"{entry['text']} {entry.get('url', '')}")
            elif event.get("method") == "Runtime.consoleAPICalled":
                if parameters["type"] in ("error", "assert"):
                    found.append(json.dumps(parameters["args"])[:500])
        return found

    def screenshot(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        if self.socket:
            self.socket.close()
        stop_process(self.process)
