"""The timeline: pausing, touch and wheel, many lanes, hidden tabs; files that miss their box."""

from __future__ import annotations

import time
from pathlib import Path

from browser import Browser
from support import ASSETS, Server

LIVE = "document.getElementById('status').className === 'status live'"
STORE = "atoll.pages.timeline.store"
INFO = "document.querySelector('main .head p').textContent"
CANVAS = "document.querySelector('.timeline canvas')"

# Spans of `kind`, 14 numbers each, one after another from `from` on.
MAKE = """
window.make = (count, { kind = 1, from = 1e12, model = () => 1, extra = 0 } = {}) => {
  const numbers = new Float64Array(count * 14);
  for (let index = 0; index < count; index += 1) {
    const begin = from + index * 1e6;
    numbers.set([kind, 0, model(index), 0, index, extra, 0, 0, 0, 0, begin, begin, begin,
      begin + 5e5], index * 14);
  }
  return numbers;
};
"""


def open_timeline(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#timeline")
    assert browser.wait(LIVE)
    browser.evaluate(MAKE)


def box(browser: Browser, selector: str) -> tuple[float, float]:
    """The middle of an element."""
    x, y = browser.evaluate(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        " return [box.left + box.width / 2, box.top + Math.min(box.height / 2, 150)]; })()"
    )
    return x, y


def test_a_pause_loses_nothing_that_can_be_kept(registry: Server, browser: Browser) -> None:
    open_timeline(browser, registry.url)
    browser.evaluate(
        "(() => { const { timeline } = atoll.pages; timeline.store.clear();"
        " timeline.spans(make(100)); timeline.setPaused(true);"
        " timeline.spans(make(50, { from: 1e12 + 1e9 })); })()"
    )
    assert browser.evaluate(f"{STORE}.size") == 100
    assert browser.wait(f"{INFO}.includes('50 since the pause')"), browser.evaluate(INFO)
    # Another page and back: what was looked at is still there.
    browser.go("models")
    browser.go("timeline")
    assert browser.evaluate("document.querySelector('main .head button').textContent") == "Go on"
    assert browser.evaluate(f"{STORE}.size") == 100
    browser.evaluate("document.querySelector('main .head button').click()")
    assert browser.evaluate(f"{STORE}.size") >= 150
    assert not browser.evaluate(f"{INFO}.includes('not kept')")
    # A pause that outlasts the room says what it cost.
    browser.evaluate(
        "(() => { const { timeline } = atoll.pages; timeline.setPaused(true);"
        " for (let turn = 0; turn < 16; turn += 1) timeline.spans(make(10000)); })()"
    )
    assert browser.wait(f"{INFO}.includes('10,000 not kept')"), browser.evaluate(INFO)
    browser.evaluate("atoll.pages.timeline.setPaused(false)")
    assert browser.wait(f"{INFO}.includes('10,000 not kept')"), browser.evaluate(INFO)
    assert browser.evaluate(f"{STORE}.size") == 150_000
    assert browser.errors() == []


def test_what_was_selected_is_not_marked_on_other_spans(
    registry: Server, browser: Browser
) -> None:
    open_timeline(browser, registry.url)
    browser.evaluate(
        "(() => { const { timeline } = atoll.pages; timeline.store.capacity = 100;"
        " timeline.store.clear(); timeline.store.data = new Float64Array(0);"
        " timeline.spans(make(100)); timeline.select(7); timeline.spans(make(90));"
        " timeline.setPaused(false); })()"
    )
    assert not browser.evaluate("atoll.pages.timeline.selected >= 0")
    assert browser.errors() == []


def test_old_spans_are_not_lost_spans(demo: str, browser: Browser) -> None:
    open_timeline(browser, demo)
    assert browser.wait(f"{STORE}.size > 100")
    assert browser.evaluate(f"{STORE}.lost") == 0
    # Another page and back: the stream goes on where it was.
    browser.evaluate(f"window.before = {STORE}.count")
    browser.go("now")
    assert browser.wait(LIVE)
    browser.go("timeline")
    assert browser.wait(f"{STORE}.count > before + 100")
    assert browser.evaluate(f"{STORE}.lost") == 0
    # Every span came once.
    twice = browser.evaluate(
        f"(() => {{ const seen = new Set(); let twice = 0; {STORE}.forEach((slot) => {{"
        f" const key = {STORE}.data.slice(slot * 14, slot * 14 + 14).join();"
        " if (seen.has(key)) twice += 1; seen.add(key); }); return twice; })()"
    )
    assert twice == 0
    assert browser.errors() == []


def test_the_tooltip_names_every_kind(registry: Server, browser: Browser) -> None:
    open_timeline(browser, registry.url)
    names = {0: "Request", 1: "Run", 2: "Load", 3: "Eviction", 4: "Gathering of a batch"}
    for kind, name in names.items():
        browser.evaluate(
            "(() => { const { timeline } = atoll.pages; timeline.setPaused(false);"
            f" timeline.store.clear(); timeline.spans(make(1, {{ kind: {kind}, extra: 1 }}));"
            " timeline.look(1e12, 1e12 + 5e5); })()"
        )
        row = "atoll.pages.timeline.rows.find((row) => row.lane)"
        assert browser.wait(row)
        x, y = browser.evaluate(
            f"(() => {{ const box = {CANVAS}.getBoundingClientRect(); const row = {row};"
            " return [box.left + 132 + (box.width - 132) * 0.2, box.top + row.y + 3]; })()"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tooltip = "atoll.pages.timeline.tooltip"
        assert browser.wait(f"{tooltip}?.startsWith('{name} of ')"), browser.evaluate(tooltip)
    assert browser.errors() == []


def test_wheel_and_fingers_scroll_the_page(registry: Server, browser: Browser) -> None:
    browser.resize(380, 600)
    open_timeline(browser, registry.url)
    browser.evaluate(
        "(() => { const { timeline } = atoll.pages; timeline.store.clear();"
        " timeline.spans(make(10)); timeline.look(1e12, 1e12 + 1e7); scrollTo(0, 0); })()"
    )
    assert browser.wait("atoll.pages.timeline.drawMs > 0")
    width = "atoll.pages.timeline.view.width"
    before = browser.evaluate(width)

    def wheel(delta: int, modifiers: int) -> None:
        x, y = box(browser, ".timeline canvas")
        browser.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0,
                     deltaY=delta, modifiers=modifiers)

    wheel(100, 0)
    assert browser.wait("scrollY > 0") and browser.evaluate(width) == before
    # It says how to zoom.
    assert browser.wait("!document.querySelector('.hint').hidden")
    browser.evaluate("scrollTo(0, 0)")
    wheel(-100, 2)
    assert browser.wait(f"{width} < {before}") and browser.evaluate("scrollY") == 0
    # A finger that moves up scrolls the page, too; one that moves sideways moves the view.
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    start = "atoll.pages.timeline.view.from"

    def swipe(across: int, up: int) -> tuple[float, float]:
        x, y = box(browser, ".timeline canvas")
        for step in range(13):
            point = {"x": x - across * step / 12, "y": y - up * step / 12}
            kind = "touchMove" if step else "touchStart"
            browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=[point])
        # A finger that rests before it leaves gives the page no momentum.
        time.sleep(0.3)
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        return x, y

    swipe(0, 120)
    assert browser.wait("scrollY > 50")
    browser.evaluate("scrollTo(0, 0)")
    before = browser.evaluate(start)
    x, y = swipe(80, 0)
    assert browser.wait(f"{start} > {before}") and browser.evaluate("scrollY") == 0
    # Two fingers zoom.
    before = browser.evaluate(width)
    for kind, spread in [("touchStart", 20), ("touchMove", 40), ("touchMove", 60)]:
        points = [{"x": x - spread, "y": y, "id": 0}, {"x": x + spread, "y": y, "id": 1}]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert browser.wait(f"{width} < {before}")
    assert browser.errors() == []


def test_many_lanes_scroll_in_their_place(registry: Server, browser: Browser) -> None:
    open_timeline(browser, registry.url)
    browser.evaluate(
        "(() => { const { timeline } = atoll.pages; timeline.store.clear();"
        " timeline.spans(make(400, { kind: 0, model: (index) => index + 1 }));"
        " timeline.look(1e12, 1e12 + 4e8); })()"
    )
    height = f"{CANVAS}.getBoundingClientRect().height"
    assert browser.wait("document.querySelector('.lanes').scrollHeight > 5000")
    assert browser.evaluate(height) <= browser.evaluate("innerHeight")
    assert browser.evaluate(f"{CANVAS}.height") < 2000
    # The last lane can be scrolled to, and clicked.
    browser.evaluate("document.querySelector('.lanes').scrollTop = 1e6")
    last = "atoll.pages.timeline.rows.filter((row) => row.lane).at(-1)"
    x, y = browser.evaluate(
        f"(() => {{ const box = {CANVAS}.getBoundingClientRect();"
        " const { view, width } = atoll.pages.timeline; const row = " + last + ";"
        f" const at = {STORE}.at(row.lane.slots[0], 12) + 2e5;"
        " return [box.left + 132 + ((at - view.from) / view.width) * (width - 132),"
        " box.top + row.y - document.querySelector('.lanes').scrollTop + 4]; })()"
    )
    for kind in ["mousePressed", "mouseReleased"]:
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    number = browser.evaluate(f"{STORE}.at({last}.lane.slots[0], 4)")
    assert browser.wait(f"document.querySelector('main').innerText.includes('#{number} of')")
    # The server does not know this request; that it says so is no error of the page.
    assert all("404" in error for error in browser.errors())


HIDE = """
(hidden) => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event('visibilitychange'));
}
"""


def test_a_hidden_tab_draws_nothing_and_asks_for_less(demo: str, browser: Browser) -> None:
    open_timeline(browser, demo)
    assert browser.wait(f"{STORE}.size > 100")
    browser.evaluate(
        "(() => { const real = fetch; window.asked = [];"
        " window.fetch = (path, options) => { asked.push(path); return real(path, options); };"
        " })()"
    )
    browser.evaluate(f"({HIDE})(true)")
    last = "asked.filter((path) => path.startsWith('/v2/atoll/live')).at(-1)"
    assert browser.wait(f"{last}?.includes('spans=false&interval_ms=5000')"), browser.evaluate(last)
    browser.evaluate(f"atoll.pages.timeline.drawMs = -1; window.kept = {STORE}.count")
    browser.evaluate("new Promise((resolve) => setTimeout(resolve, 500))")
    assert browser.evaluate("atoll.pages.timeline.drawMs") == -1
    assert browser.evaluate(f"{STORE}.count === kept")
    # The list of models is not asked for, either.
    browser.evaluate("location.hash = '#models'; asked.length = 0")
    browser.evaluate("new Promise((resolve) => setTimeout(resolve, 3500))")
    assert not browser.evaluate("asked.some((path) => path.includes('repository'))")
    browser.evaluate(f"location.hash = '#timeline'; ({HIDE})(false)")
    assert browser.wait(f"{last}?.includes('spans=true&position=')"), browser.evaluate(last)
    # What happened meanwhile comes, and nothing of it was lost.
    assert browser.wait(f"{STORE}.count > kept + 50 && atoll.pages.timeline.drawMs >= 0")
    assert browser.evaluate(f"{STORE}.lost") == 0
    assert browser.errors() == []


def test_a_file_beside_its_box_does_not_replace_the_page(
    registry: Server, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "digits.onnx"
    file.write_bytes((ASSETS / "digits.onnx").read_bytes())
    browser.open(f"{registry.url}/#models")
    assert browser.wait("document.querySelector('.drop')")
    data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}

    def drop(x: float, y: float) -> None:
        for kind in ["dragEnter", "dragOver", "drop"]:
            browser.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    drop(*box(browser, "h1"))
    browser.evaluate("new Promise((resolve) => setTimeout(resolve, 300))")
    assert browser.evaluate("location.href") == f"{registry.url}/#models"
    # In the box it is taken.
    drop(*box(browser, ".drop span"))
    assert browser.wait("document.querySelector('form input').value === 'digits'")
    assert browser.errors() == []
