#!/usr/bin/env python3
"""Makes the pictures of the console that README and book show, with the browser of the tests.

    scripts/console_pictures.py target/release/atoll docs/book/src/images
    scripts/console_pictures.py target/release/atoll OUT --all

`atoll demo` runs for a minute, so that the curves are full. Now is shown light and the timeline
dark, around a real-time request that preempted best effort. With --all every page is shown in both
schemes, 1280 and 380 pixels wide, to be looked at.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "python"))

from browser import PAGES, Browser  # noqa: E402

WIDTH, MIN_HEIGHT = 1280, 560
PATIENCE_SECONDS = 120

# A real-time request that was answered, and the best-effort run that was preempted for it.
CUT = """
(() => {
  const { store } = atoll.pages.timeline;
  const at = (slot, field) => store.at(slot, field);
  const took = (slot) => at(slot, 13) - at(slot, 12);
  const cuts = [];
  const asked = [];
  store.forEach((slot) => {
    if (at(slot, 0) === 1 && at(slot, 3) === 1 && at(slot, 9) === 1) cuts.push(slot);
    if (at(slot, 0) === 0 && at(slot, 3) === 0 && at(slot, 9) === 0) asked.push(slot);
  });
  for (const cut of cuts.reverse()) {
    const found = asked.find((slot) => at(slot, 12) <= at(cut, 10) && at(cut, 10) <= at(slot, 11)
      && at(slot, 13) > at(cut, 13) - 5e5 && took(slot) > 1e5 && took(slot) < 3e6);
    if (found !== undefined) return found;
  }
  return -1;
})()
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start(binary: str) -> tuple[subprocess.Popen[bytes], str]:
    ports = free_ports(3)
    command = [binary, "demo", "--seconds", "3600"]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [flag, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{ports[0]}"
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5)
            return process, url
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise SystemExit("the demo did not start")


def picture(browser: Browser, file: Path, width: int = WIDTH) -> None:
    """The whole page, however long it is."""
    browser.resize(width, MIN_HEIGHT)
    time.sleep(1.0)
    height = browser.evaluate("Math.max(document.documentElement.scrollHeight, innerHeight)")
    browser.resize(width, height)
    time.sleep(0.5)
    browser.screenshot(file)
    print(file, f"{width} x {height}")


def show_preemption(browser: Browser) -> None:
    """Selects a request that preempted best effort, and goes there."""
    assert browser.wait(f"({CUT}) >= 0", PATIENCE_SECONDS)
    browser.evaluate(
        f"(() => {{ const {{ timeline }} = atoll.pages; const slot = {CUT};"
        " timeline.select(slot); timeline.look(timeline.store.at(slot, 12),"
        " timeline.store.at(slot, 13)); })()"
    )
    assert browser.wait("document.querySelector('.why')")
    print(browser.evaluate("document.querySelector('.why').textContent"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("out", type=Path)
    parser.add_argument("--all", action="store_true", help="every page, both schemes and widths")
    parser.add_argument("--seconds", type=float, default=65, help="how long curves fill up")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    process, url = start(args.binary)
    browser = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            browser = Browser(Path(folder), WIDTH, MIN_HEIGHT)
            browser.scheme("light")
            browser.open(f"{url}/#now")
            time.sleep(args.seconds)
            picture(browser, args.out / "console-now.png")
            browser.scheme("dark")
            browser.go("timeline")
            show_preemption(browser)
            picture(browser, args.out / "console-timeline.png")
            if args.all:
                for scheme in ("light", "dark"):
                    browser.scheme(scheme)
                    for width in (WIDTH, 380):
                        for page in PAGES:
                            browser.go(page)
                            time.sleep(1.0)
                            if page == "timeline":
                                show_preemption(browser)
                            picture(browser, args.out / f"{page}-{scheme}-{width}.png", width)
            errors = browser.errors()
            assert errors == [], json.dumps(errors)
            browser.close()
            browser = None
    finally:
        if browser:
            browser.close()
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
