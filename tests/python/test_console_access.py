"""The console for everyone: no violation of WCAG's levels A and AA, keyboard, narrow screens."""

from __future__ import annotations

import base64

import pytest

from accessibility import violations
from browser import PAGES, Browser
from support import ASSETS, Server

NO_WIDER = "document.documentElement.scrollWidth - innerWidth"
# What a page shows when its data has come.
FILLED = {
    "now": "document.querySelectorAll('tbody tr').length >= 2 && document.querySelector('.meter')",
    "timeline": "document.querySelector('.slow button')",
    "models": "document.querySelector('canvas.draw')",
    "plan": "document.querySelector('.gpu')",
    "cluster": "document.querySelector('main pre')",
}


@pytest.mark.parametrize("width", [1280, 380])
def test_no_page_violates_a_rule(demo: str, browser: Browser, width: int) -> None:
    browser.resize(width, 800)
    browser.open(demo)
    for page in PAGES:
        browser.go(page)
        assert browser.wait(FILLED[page]), page
        if page == "timeline":
            # With the way of a request.
            browser.evaluate("document.querySelector('.slow button').click()")
            assert browser.wait("document.querySelector('.why')")
        for scheme in ["light", "dark"]:
            browser.scheme(scheme)
            assert violations(browser) == [], (page, scheme)
        assert browser.evaluate(NO_WIDER) <= 0, page
    browser.open(f"{demo}/docs")
    assert browser.wait("document.querySelector('details')")
    browser.evaluate("document.querySelectorAll('details').forEach((one, index) => {"
                     " one.open = index < 4; })")
    for scheme in ["light", "dark"]:
        browser.scheme(scheme)
        assert violations(browser) == [], ("docs", scheme)
    assert browser.evaluate(NO_WIDER) <= 0
    assert browser.errors() == []


def drop_file(browser: Browser, data: bytes, name: str) -> None:
    """Drops a file on the page Models."""
    text = base64.b64encode(data).decode()
    browser.evaluate(
        "(() => { const bytes = Uint8Array.from(atob('" + text + "'), (c) => c.charCodeAt(0));"
        " const transfer = new DataTransfer();"
        f" transfer.items.add(new File([bytes], '{name}'));"
        " document.querySelector('.drop').dispatchEvent(new DragEvent('drop',"
        " { dataTransfer: transfer, bubbles: true, cancelable: true })); })()"
    )


def test_a_server_without_models_and_its_forms_violate_no_rule(
    registry: Server, browser: Browser
) -> None:
    browser.resize(380, 800)
    browser.open(registry.url)
    for page in ["now", "timeline", "models"]:
        browser.go(page)
        # It says that there is nothing, and what to do.
        assert browser.wait("document.querySelector('.empty:not([hidden])')?.textContent.trim()")
        if page == "models":
            drop_file(browser, (ASSETS / "digits.onnx").read_bytes(), "a.onnx")
            assert browser.wait("!document.querySelector('form.panel').hidden")
        assert violations(browser) == [], page
        assert browser.evaluate(NO_WIDER) <= 0, page
    assert browser.errors() == []


def press(browser: Browser, key: str) -> None:
    codes = {"Tab": 9, "Enter": 13}
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ["keyDown", "keyUp"]:
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                     windowsVirtualKeyCode=codes[key], **(text if kind == "keyDown" else {}))


def focused(browser: Browser) -> str:
    return browser.evaluate("document.activeElement.textContent.trim()")


def test_the_keyboard_reaches_everything(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#now")
    assert browser.wait("document.querySelector('tbody tr')")
    press(browser, "Tab")
    assert focused(browser) == "Skip to content"
    # What has the focus is seen to have it.
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    seen = []
    while focused(browser) != "Models":
        assert len(seen) < 20, seen
        press(browser, "Tab")
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", focused(browser)
        seen.append(focused(browser))
    assert seen[:3] == ["Atoll", "Now", "Timeline"]
    press(browser, "Enter")
    assert browser.wait("document.querySelector('main h1')?.textContent === 'Models'")
    assert browser.wait("document.querySelector('tbody button.link')")
    # Every control of the page is reached, one Tab after another.
    browser.evaluate(
        "window.controls = new Set([...document.querySelectorAll('main button, main input,"
        " main select, main textarea, main canvas[tabindex]')].filter((node) =>"
        " node.checkVisibility() && !node.disabled)); controls.size"
    )
    browser.evaluate("document.querySelector('main').focus()")
    for _ in range(browser.evaluate("controls.size") + 30):
        press(browser, "Tab")
        browser.evaluate("controls.delete(document.activeElement)")
    left = browser.evaluate("[...controls].filter((node) => node.isConnected)"
                            ".map((node) => node.outerHTML.slice(0, 120))")
    assert left == []
    # Enter on a model shows it.
    browser.evaluate("document.querySelector('tbody button.link').focus()")
    press(browser, "Enter")
    assert browser.wait("document.querySelector('tr.chosen')")
    assert browser.errors() == []
