#!/usr/bin/env python3
"""Draws the README's chart from evidence/disb.json: real-time latency and overall throughput of
Atoll beside other policies, for each DISB workload.

    scripts/two_promises.py            writes docs/book/src/images/two-promises.svg
    scripts/two_promises.py --check    exits with 1 when that file does not match the evidence
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence/disb.json"
CHART = ROOT / "docs/book/src/images/two-promises.svg"

WORKLOADS = ["A", "B", "C", "D", "E", "REAL"]
POLICIES = [
    ("atoll", "Atoll"),
    ("free_streams", "streams"),
    ("priority_streams", "streams with priorities"),
    ("sequential", "sequential"),
]

WIDTH, HEIGHT = 960, 572
LEFT, RIGHT = 64, 936
PANEL_HEIGHT = 170
BAR, BAR_STEP = 27, 30

# The card is opaque and changes together with its text, so both variants are readable on any page.
STYLE = """
    text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
    .card { fill: #ffffff; stroke: #d0d7de; }
    .title { fill: #1f2328; font-size: 17px; font-weight: 600; }
    .note, .axis { fill: #59636e; font-size: 12.5px; }
    .group { fill: #1f2328; font-size: 13.5px; font-weight: 600; }
    .value { fill: #59636e; font-size: 11px; }
    .value { stroke: #ffffff; stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; }
    .strong { fill: #1f2328; font-weight: 700; }
    .grid { stroke: #d8dee4; stroke-width: 1; }
    .base { stroke: #59636e; stroke-width: 1; }
    .alone { stroke: #59636e; stroke-width: 1; stroke-dasharray: 5 4; }
    .atoll { fill: #0b6bcb; }
    .free_streams { fill: #e69f00; }
    .priority_streams { fill: #b8609a; }
    .sequential { fill: #8c959f; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d; }
      .note, .axis, .value { fill: #a9b3be; }
      .title, .group, .strong { fill: #f0f6fc; }
      .value { stroke: #0d1117; }
      .grid { stroke: #2a313a; }
      .base, .alone { stroke: #9198a1; }
      .atoll { fill: #4da3ff; }
      .free_streams { fill: #f2b134; }
      .priority_streams { fill: #d987bd; }
      .sequential { fill: #6e7681; }
    }
"""


def cells(evidence):
    """The measured cells at scaled rates, by workload and policy."""
    chosen = {
        (cell["workload"], cell["policy"]): cell
        for cell in evidence["cells"]
        if cell["rates"] == "scaled"
    }
    missing = [
        f"{workload} under {policy}"
        for workload in WORKLOADS
        for policy, _ in POLICIES
        if (workload, policy) not in chosen
    ]
    if missing:
        sys.exit(f"{EVIDENCE}: no measurement of {', '.join(missing)}")
    return chosen


def text(x, y, words, style, anchor="start"):
    return f'  <text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def line(x1, y1, x2, y2, style):
    return f'  <line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{style}"/>'


def panel(top, title, note, limit, ticks, tick_text, value_of, value_text, mark=None):
    """One chart: a group of bars for each workload, and a dashed line at `mark`."""
    bottom = top + PANEL_HEIGHT
    height_of = lambda value: max(0.0, value) / limit * PANEL_HEIGHT
    out = [text(LEFT, top - 36, title, "title"), text(LEFT, top - 17, note, "note")]
    for tick in ticks:
        y = bottom - height_of(tick)
        out.append(line(LEFT, y, RIGHT, y, "base" if tick == 0 else "grid"))
        out.append(text(LEFT - 8, y + 4, tick_text(tick), "axis", "end"))
    if mark is not None:
        y = bottom - height_of(mark)
        out.append(line(LEFT, y, RIGHT, y, "alone"))
    group_width = (RIGHT - LEFT) / len(WORKLOADS)
    for index, workload in enumerate(WORKLOADS):
        middle = LEFT + (index + 0.5) * group_width
        first = middle - len(POLICIES) * BAR_STEP / 2
        for position, (policy, _) in enumerate(POLICIES):
            value = value_of(workload, policy)
            x = first + position * BAR_STEP + (BAR_STEP - BAR) / 2
            # A bar of no height would look like a missing measurement.
            height = max(1.5, height_of(value))
            y = bottom - height
            out.append(
                f'  <rect x="{x:.1f}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" '
                f'class="{policy}"/>'
            )
            style = "value strong" if policy == "atoll" else "value"
            out.append(text(x + BAR / 2, y - 4, value_text(value), style, "middle"))
        out.append(text(middle, bottom + 19, workload, "group", "middle"))
    return out


def svg(evidence):
    measured = cells(evidence)
    increase = lambda workload, policy: measured[workload, policy]["rt_increase"]["mean_pct"]
    throughput = lambda workload, policy: measured[workload, policy]["over_rt_only"]
    title = "Real-time latency and overall throughput on one GPU"
    worst = max(increase(workload, "atoll") for workload in WORKLOADS)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title desc">',
        f'  <title id="title">{title}</title>',
        f'  <desc id="desc">DISB on {evidence["device"]}: under Atoll real time takes at most '
        f"{worst:.1f} percent longer than alone, beside best effort.</desc>",
        f"  <style>{STYLE}  </style>",
        f'  <rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="card"/>',
    ]
    x = LEFT
    for policy, name in POLICIES:
        out.append(f'  <rect x="{x}" y="18" width="13" height="13" class="{policy}"/>')
        out.append(text(x + 19, 29, name, "group"))
        x += 45 + round(7.6 * len(name))
    source = f"DISB, {evidence['device']}, {evidence['date']}"
    out.append(text(RIGHT, 29, source, "note", "end"))
    out += panel(
        106,
        "Real time: mean latency increase",
        "percent over real time alone on the same GPU; lower is better",
        240,
        [0, 50, 100, 150, 200],
        lambda tick: f"{tick} %",
        increase,
        lambda value: f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}",
    )
    out += panel(
        366,
        "Everything: overall throughput",
        "requests per second over real time alone (dashed); higher is better",
        7.6,
        [0, 2, 4, 6],
        lambda tick: f"{tick} x",
        throughput,
        lambda value: f"{value:.1f}",
        mark=1,
    )
    return "\n".join([*out, "</svg>", ""])


def main():
    drawn = svg(json.loads(EVIDENCE.read_text()))
    if sys.argv[1:] == ["--check"]:
        if not CHART.is_file() or CHART.read_text() != drawn:
            sys.exit(f"{CHART} does not match {EVIDENCE}; run scripts/two_promises.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        CHART.parent.mkdir(parents=True, exist_ok=True)
        CHART.write_text(drawn)


if __name__ == "__main__":
    main()
