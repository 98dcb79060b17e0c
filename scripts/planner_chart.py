#!/usr/bin/env python3
"""Draws the book's chart of planners from evidence/planner.txt: GPUs of every planner, without
headroom, over the certified lower bound of plans without sharing.

    scripts/planner_chart.py            writes docs/book/src/images/planners.svg
    scripts/planner_chart.py --check    exits with 1 when that file does not match the evidence
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence/planner.txt"
CHART = ROOT / "docs/book/src/images/planners.svg"

LOADS = [("S5", "scenario S5"), ("S5 x 10", "S5, ten times"), ("1000", "1,000 services")]
PLANNERS = [
    "certified, shared",
    "certified",
    "parvagpu",
    "mig-serving-like",
    "repartitioning-like",
    "least-fragmentation-like",
    "gpulet-like",
    "squishy",
]
ROW = re.compile(
    r"^(S\d x 10|\S+) +(certified, shared|[a-z-]+) +0 % +[\d.]+ +[\d.]+ +(\d+) +([\d.]+)"
)

WIDTH, LEFT, TOP, BAR, GAP = 900, 190, 64, 17, 34
STYLE = """
    text { font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
    .card { fill: #ffffff; stroke: #d0d7de; }
    .title { fill: #1f2328; font-size: 17px; font-weight: 600; }
    .note, .value { fill: #59636e; font-size: 12px; }
    .bound { stroke: #59636e; stroke-dasharray: 5 4; }
    .ours { fill: #0b6bcb; }
    .others { fill: #8c959f; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d; }
      .title { fill: #f0f6fc; }
      .note, .value { fill: #a9b3be; }
      .ours { fill: #4da3ff; }
      .others { fill: #6e7681; }
    }
"""


def measured():
    """GPUs and bound by load and planner."""
    found = {}
    for line in EVIDENCE.read_text().splitlines():
        row = ROW.match(line)
        if row:
            load, planner, gpus, bound = row.groups()
            found.setdefault((load, planner), (int(gpus), float(bound)))
    return found


def chart():
    found = measured()
    group = len(PLANNERS) * (BAR + 3) + GAP
    height = TOP + len(LOADS) * group + 10
    ratio = lambda load, planner: found[load, planner][0] / found[load, "certified"][1]
    most = max(ratio(load, planner) for load, _ in LOADS for planner in PLANNERS)
    scale = (WIDTH - LEFT - 90) / most
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{WIDTH}" height="{height}" rx="6"/>',
        '<text class="title" x="20" y="28">GPUs for the same services</text>',
        '<text class="note" x="20" y="47">dashed: lower bound of plans that share no slice; '
        "shorter is better</text>",
    ]
    y = TOP
    for load, name in LOADS:
        bound = found[load, "certified"][1]
        lines.append(f'<text class="note" x="20" y="{y + 14}">{name}</text>')
        y += 20
        end = y + len(PLANNERS) * (BAR + 3)
        for planner in PLANNERS:
            gpus, _ = found[load, planner]
            width, base = gpus / bound * scale, y + 13
            colour = "ours" if planner.startswith("certified") else "others"
            lines.append(
                f'<text class="value" text-anchor="end" x="{LEFT - 8}" y="{base}">{planner}</text>'
                f'<rect class="{colour}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
                f'<text class="value" x="{LEFT + width + 6:.1f}" y="{base}">{gpus}</text>'
            )
            y += BAR + 3
        x, start = LEFT + scale, end - group + GAP
        lines.append(f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{start}" y2="{end}"/>')
        y += GAP - 20
    lines.append("</svg>\n")
    return "\n".join(lines)


def main():
    text = chart()
    if "--check" in sys.argv:
        sys.exit(0 if CHART.exists() and CHART.read_text() == text else 1)
    CHART.write_text(text)


if __name__ == "__main__":
    main()
