"""The console in a real browser: its pages, the timeline, registration, and the form."""

from __future__ import annotations

import base64
import time

import onnx
import pytest
import requests

from browser import PAGES, Browser
from support import ASSETS, Server

@pytest.mark.parametrize("width", [1280, 380])
def test_every_page_opens_without_an_error(demo: str, browser: Browser, width: int) -> None:
    browser.resize(width, 800)
    browser.open(demo)
    for scheme in ["light", "dark"]:
        browser.scheme(scheme)
        for page in PAGES:
            browser.go(page)
            current = "document.querySelector('nav [aria-current]').textContent.toLowerCase()"
            assert browser.evaluate(current) == page
            # Tables scroll by themselves; the page does not.
            wide = browser.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (page, scheme, wide)
    assert browser.wait("document.getElementById('status').className === 'status live'")
    # Every control has a name.
    unnamed = browser.evaluate(
        "[...document.querySelectorAll('button, a, input, select, textarea')].filter((node) =>"
        " !(node.textContent.trim() || node.ariaLabel || node.labels?.length)).length"
    )
    assert unnamed == 0
    assert browser.errors() == []


def test_now_shows_both_classes(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#now")
    rows = "[...document.querySelectorAll('tbody tr')].map((row) => row.innerText)"
    both = f"{rows}.length >= 2 && {rows}.join().includes('best effort')"
    assert browser.wait(both), browser.evaluate(rows)
    assert browser.wait(f"{rows}.some((text) => /real time\\s+[1-9]/.test(text))")
    # Both quantiles of each second are drawn.
    spark = 'svg[aria-label^="p99 of digits"] path'
    drawn = f"[...document.querySelectorAll('{spark}')].filter((path) => path.getAttribute('d'))"
    assert browser.wait(f"{drawn}.length >= 6"), browser.evaluate(f"{drawn}.length")
    assert browser.errors() == []


CUT_RUNS = """
(() => {
  const { store } = atoll.pages.timeline;
  const runs = [];
  store.forEach((slot) => {
    if (store.at(slot, 0) === 1) {
      runs.push({
        slot, kind: store.at(slot, 3), job: store.at(slot, 4), end: store.at(slot, 9),
        asked: store.at(slot, 10), from: store.at(slot, 12), to: store.at(slot, 13),
      });
    }
  });
  // A best-effort run that was cut, a real-time run after it, and the rest of the same job.
  return runs.filter((cut) => cut.kind === 1 && cut.end === 1 && cut.asked > cut.from
    && runs.some((run) => run.kind === 0 && run.from >= cut.asked && run.from <= cut.to + 5e6
      && runs.some((rest) => rest.job === cut.job && rest.from >= run.from)));
})()
"""


def test_the_timeline_shows_real_time_cutting_best_effort(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#timeline")
    assert browser.wait(f"{CUT_RUNS}.length > 0")
    # The job that was cut says so in a sentence.
    browser.evaluate(f"window.cut = {CUT_RUNS}[0]")
    found = """
    (() => {
      const { store } = atoll.pages.timeline;
      let found = -1;
      store.forEach((slot) => {
        if (store.at(slot, 0) === 0 && store.at(slot, 5) === cut.job) found = slot;
      });
      return found;
    })()
    """
    assert browser.wait(f"({found}) >= 0")
    browser.evaluate(f"atoll.pages.timeline.select({found})")
    assert browser.wait("document.querySelector('.why')")
    sentence = browser.evaluate("document.querySelector('.why').textContent")
    assert "It took" in sentence and "preempted" in sentence and "for 'digits'" in sentence
    way = browser.evaluate("document.querySelector('.way').innerText")
    for step in ["arrived", "started on queue", "asked to leave", "resumed", "answered"]:
        assert step in way, way
    # Paused: the view stays. Keys move and zoom it.
    browser.evaluate("document.querySelector('.timeline canvas').focus()")
    before = browser.evaluate("atoll.pages.timeline.view")
    for key in ["+", "ArrowRight"]:
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key[0])
    after = browser.evaluate("atoll.pages.timeline.view")
    assert after["width"] < before["width"] and after["from"] > before["from"]
    assert browser.errors() == []


def test_copies_have_lanes_of_their_own(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#timeline")
    assert browser.wait("atoll.pages.timeline.store.size > 0")
    # Two copies at the same time, and the gathering of a batch later.
    browser.evaluate(
        "(() => { const { timeline } = atoll.pages; const from = timeline.store.newest;"
        " const copy = (kind, begin, end) => [4, 0, 1, 1, 3 << 20, kind, 7, 0, 0, 0, 0, 0,"
        " from + begin, from + end];"
        " timeline.spans(new Float64Array([...copy(0, 1e6, 5e6), ...copy(0, 2e6, 6e6),"
        " ...copy(1, 8e6, 9e6)])); timeline.look(from, from + 1e7); })()"
    )
    lanes = ("atoll.pages.timeline.store.ordered().filter((lane) => lane.kind === 4)"
             ".map((lane) => [lane.label, lane.length])")
    # The load of the demo copies, too.
    (label, count), *others = browser.evaluate(lanes)
    assert label == "copies" and others and all(label == "" for label, _ in others)
    assert count + sum(count for _, count in others) >= 3
    browser.evaluate("(() => { const { store } = atoll.pages.timeline; let last = -1;"
                     " store.forEach((slot) => { if (store.at(slot, 0) === 4"
                     " && store.at(slot, 4) === 3 << 20 && store.at(slot, 5) === 1)"
                     " last = slot; });"
                     " atoll.pages.timeline.select(last); })()")
    assert browser.wait("document.querySelector('main').innerText.includes('Gathering')")
    assert "3.0 MiB" in browser.evaluate("document.querySelector('main').innerText")
    assert "copies" in browser.evaluate("document.querySelector('.legend').innerText")
    assert browser.errors() == []


def test_dropping_a_file_registers_it(registry: Server, browser: Browser) -> None:
    browser.open(f"{registry.url}/#models")
    assert browser.wait("document.querySelector('.drop')")
    data = base64.b64encode((ASSETS / "digits.onnx").read_bytes()).decode()
    browser.evaluate(
        "(() => { const bytes = Uint8Array.from(atob('" + data + "'), (c) => c.charCodeAt(0));"
        " const transfer = new DataTransfer();"
        " transfer.items.add(new File([bytes], 'my digits.onnx'));"
        " document.querySelector('.drop').dispatchEvent(new DragEvent('drop',"
        " { dataTransfer: transfer, bubbles: true, cancelable: true })); })()"
    )
    assert browser.evaluate("document.querySelector('form input').value") == "my_digits"
    labels = "document.querySelector('form textarea')"
    browser.evaluate(f"{labels}.value = [...'0123456789'].join('\\n')")
    fields = "[...document.querySelectorAll('form.panel label')]"
    for label, value in [("Priority", "7"), ("Batching", "elastic")]:
        browser.evaluate(f"{fields}.find((one) => one.textContent.startsWith('{label}'))"
                         f".querySelector('input, select').value = '{value}'")
    browser.evaluate("document.querySelector('form.panel').requestSubmit()")
    rows = "document.querySelector('tbody').innerText"
    error = "document.querySelector('.error').textContent"
    assert browser.wait(f"/my_digits\\s+1\\s+ready/.test({rows})"), browser.evaluate(error)
    assert requests.get(f"{registry.url}/v2/models/my_digits/ready", timeout=60).ok
    details = requests.get(f"{registry.url}/v2/atoll/models/my_digits", timeout=60).json()
    assert details["settings"]["priority"] == 7
    assert details["settings"]["batching"]["policy"] == "elastic"
    assert browser.errors() == []


def test_a_model_says_what_its_check_warns_of(registry: Server, browser: Browser) -> None:
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "g",
        [value("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 4])],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    file = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    reply = requests.post(f"{registry.url}/register", data={"name": "odd"},
                          files={"model": file}, timeout=60)
    assert reply.ok, reply.text
    browser.open(f"{registry.url}/#models")
    show = "document.querySelector('[data-key=\"show odd\"]')"
    assert browser.wait(show)
    browser.evaluate(f"{show}.click()")
    text = "document.querySelector('main').innerText"
    assert browser.wait(f"{text}.includes('is declared')"), browser.evaluate(text)
    # Tuning goes on while the page is open.
    browser.evaluate(
        "(() => { const real = fetch; window.fetch = async (path, options) => {"
        " const reply = await real(path, options);"
        " if (!path.endsWith('/v2/atoll/models/odd')) return reply;"
        " const details = await reply.json();"
        " details.tuning = { tuned: window.tuned || 0, steps: 3 };"
        " return new Response(JSON.stringify(details)); };"
        f" {show}.click(); }})()"
    )
    for tuned in range(4):
        browser.evaluate(f"window.tuned = {tuned}")
        assert browser.wait(f"{text}.includes('{tuned} of 3 steps')"), browser.evaluate(text)
    assert browser.errors() == []


def line(begin: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    steps = 12
    shares = [step / steps for step in range(steps + 1)]
    (x, y), (to_x, to_y) = begin, end
    return [(x + (to_x - x) * share, y + (to_y - y) * share) for share in shares]


def test_a_drawn_seven_is_a_seven(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#models")
    assert browser.wait("document.querySelector('canvas.draw')")
    box = browser.evaluate(
        "(() => { const box = document.querySelector('canvas.draw').getBoundingClientRect();"
        " return [box.left, box.top]; })()"
    )
    points = line((62, 40), (160, 40)) + line((160, 40), (95, 190))
    browser.drag([(box[0] + x, box[1] + y) for x, y in points])
    assert browser.wait("document.querySelector('.scores li')")
    assert browser.evaluate("document.querySelector('.scores .label').textContent") == "7"
    assert browser.errors() == []


def test_sliders_plan_again(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#plan")
    count = "Number(document.querySelector('.figures dd')?.firstChild.data)"
    assert browser.wait(f"{count} > 0")
    before = browser.evaluate(count)
    browser.evaluate(
        "(() => { const rates = document.querySelector('input[type=range]'); rates.value = 3;"
        " rates.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    assert browser.wait(f"{count} > {before}")
    assert browser.wait("document.querySelector('pre').textContent.includes('nvidia-smi')")
    assert browser.errors() == []


def test_a_sweep_plans_at_several_rates(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#plan")
    assert browser.wait("document.querySelector('.sweep button')")
    browser.evaluate("document.querySelector('.sweep button').click()")
    rows = "[...document.querySelectorAll('.sweep tbody tr')]"
    assert browser.wait(f"{rows}.length === 9")
    gpus = browser.evaluate(f"{rows}.map((row) => Number(row.cells[1].textContent))")
    assert gpus == sorted(gpus) and 0 < gpus[0] < gpus[-1], gpus
    # Rates as they are need as many as the plan above.
    planned = browser.evaluate("Number(document.querySelector('.figures dd').firstChild.data)")
    assert gpus[4] == planned
    bars = browser.evaluate("document.querySelectorAll('.sweep svg rect').length")
    assert bars == 9
    # A sweep that cannot be planned says why.
    browser.evaluate("atoll.pages.plan.services.value = '[[service]]'")
    browser.evaluate("document.querySelector('.sweep button').click()")
    assert browser.wait(f"{rows}.length === 9 && {rows}[0].cells[1].textContent === '–'")
    assert browser.evaluate("document.querySelector('.sweep p')?.textContent.length > 8")


def test_a_page_that_stays_open_does_not_grow(demo: str, browser: Browser) -> None:
    browser.open(f"{demo}/#timeline")
    assert browser.wait("atoll.pages.timeline.store.size > 100")
    # A ring smaller than what arrives: it drops the oldest and keeps its size.
    browser.evaluate(
        "(() => { const { store } = atoll.pages.timeline; store.clear(); store.capacity = 200;"
        " store.data = new Float64Array(0); })()"
    )
    assert browser.wait("atoll.pages.timeline.store.count > 450")
    assert browser.evaluate("atoll.pages.timeline.store.size") == 200
    kept = "[...atoll.pages.timeline.store.lanes.values()].reduce((n, lane) => n + lane.length, 0)"
    assert browser.evaluate(kept) == 200
    time.sleep(0.5)
    assert browser.errors() == []
