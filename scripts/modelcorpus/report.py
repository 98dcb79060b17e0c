"""Counts of a corpus' results, and the table of the book."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

PAGE = Path("docs/book/src/corpus.md")
START, END = "<!-- corpus: begin -->", "<!-- corpus: end -->"


def why(row: dict) -> str:
    """Why a file is not accepted, in one line."""
    if row["status"] == "refused":
        return "; ".join(row["check"].get("unsupported") or [])[:300]
    if row["status"] == "wrong":
        return row["verdict"]["wrong"]
    if row.get("rows_alone") not in (None, "equal"):
        return row["rows_alone"]
    if row["status"] == "accepted" and not row.get("compared"):
        return f"not compared: {row.get('ort')}"
    return row.get("reason") or ""


def reason(row: dict) -> str:
    """A refusal's reason without the names of one file."""
    text = why(row)
    found = re.findall(r"\b(?:[a-z.]+::)?([A-Z][A-Za-z0-9]+)\b", text)
    return found[0] if found else text[:80]


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def batching(rows: list[dict]) -> dict:
    """Of files whose first input begins with a symbol: how many batch."""
    symbolic = [r for r in rows if r.get("symbolic_batch") and r["status"] == "accepted"]
    proven = [r for r in symbolic if (r["check"].get("batching") or {}).get("possible")]
    independent = [r for r in symbolic if r.get("ort_independent")]
    return {
        "symbolic_first_dimension": len(symbolic),
        "batch": len(proven),
        "independent_by_measurement": len(independent),
        "independent_and_batch": len([r for r in independent if r in proven]),
        "rows_compared_alone": len([r for r in proven if r.get("rows_alone")]),
        "rows_wrong": len([r for r in proven if r.get("rows_alone") not in (None, "equal")]),
    }


def times(rows: list[dict]) -> dict:
    ratios = {True: [], False: []}
    for row in rows:
        if "ratio" in row.get("time", {}):
            ratios[row["quantised"]].append(row["time"]["ratio"])
    both = ratios[True] + ratios[False]
    rounded = {
        name: round(mean, 3) if (mean := geometric_mean(values)) else None
        for name, values in (("float", ratios[False]), ("int8", ratios[True]))
    }
    return {"files": len(both), "geometric_mean": rounded, "worst": max(both, default=None)}


def summary(rows: list[dict]) -> dict:
    """Counts of all files and of both parts."""
    known = [row for row in rows if row["status"] != "skipped"]
    parts = {
        "all": known,
        "seen": [row for row in known if row["part"] == "seen"],
        "unseen": [row for row in known if row["part"] == "unseen"],
    }
    return {name: counts(part) for name, part in parts.items()}


def counts(rows: list[dict]) -> dict:
    status = Counter(row["status"] for row in rows)
    accepted = status["accepted"] + status["wrong"]
    refused = Counter(reason(row) for row in rows if row["status"] == "refused")
    compared = [row for row in rows if row.get("compared")]
    return {
        "files": len(rows),
        "accepted": accepted,
        "accepted_percent": round(100 * accepted / len(rows), 1) if rows else None,
        "refused": dict(refused.most_common()),
        "failed": status["failed"],
        "compared": len(compared),
        "wrong": status["wrong"],
        "with_rounding_flips": len([r for r in compared if r["verdict"]["flips"]]),
        "batching": batching(rows),
        "time": times(rows),
    }


def table(about: dict, totals: dict) -> str:
    def cells(title: str, value) -> str:
        return f"| {title} | " + " | ".join(str(value(totals[part])) for part in totals) + " |"

    def mean(kind: str):
        return lambda part: part["time"]["geometric_mean"][kind] or "-"

    lines = [
        f"| | {' | '.join(totals)} |",
        "|---|" + "---:|" * len(totals),
        cells("files", lambda part: part["files"]),
        cells("accepted", lambda part: f"{part['accepted']} ({part['accepted_percent']} %)"),
        cells("refused by `atoll check`", lambda part: sum(part["refused"].values())),
        cells("accepted and then failed", lambda part: part["failed"]),
        cells("compared with ONNX Runtime", lambda part: part["compared"]),
        cells("wrong", lambda part: part["wrong"]),
        cells("with rounding flips (quantised)", lambda part: part["with_rounding_flips"]),
        cells(
            "symbolic first dimension", lambda part: part["batching"]["symbolic_first_dimension"]
        ),
        cells("of these, requests batch", lambda part: part["batching"]["batch"]),
        cells(
            "of these, ONNX Runtime's rows are independent",
            lambda part: part["batching"]["independent_by_measurement"],
        ),
        cells("rows differ from rows alone", lambda part: part["batching"]["rows_wrong"]),
        cells("time / ONNX Runtime's, float, geometric mean", mean("float")),
        cells("time / ONNX Runtime's, int8, geometric mean", mean("int8")),
        cells("largest ratio", lambda part: part["time"]["worst"] or "-"),
    ]
    version = f"ONNX Runtime {about['onnxruntime']}, 2 threads each, in turns."
    return "\n".join([*lines, "", version])


def refusals(totals: dict) -> str:
    refused = totals["all"]["refused"]
    if not refused:
        return "No file is refused."
    rows = [f"| {name} | {count} |" for name, count in refused.items()]
    return "\n".join(["| refused for | files |", "|---|---:|", *rows])


def write_page(repository: Path, about: dict, totals: dict, rows: list[dict]) -> None:
    """Replaces what stands between the marks of the book's page."""
    page = repository / PAGE
    text = page.read_text()
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    body = f"{START}\n\n{table(about, totals)}\n\n{refusals(totals)}\n\n{END}"
    page.write_text(before + body + after)
