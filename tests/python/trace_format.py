"""Checks a trace against the trace event format, as far as viewers require it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any


def check_trace(trace: dict[str, Any]) -> Counter[str]:
    """Fails on an event that a viewer would drop; returns the number of events by phase."""
    phases: Counter[str] = Counter()
    asynchronous = []
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phase = event["ph"]
        phases[phase] += 1
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert isinstance(event["name"], str) and event["name"], event
        if phase == "M":
            assert isinstance(event["args"]["name"], str), event
            continue
        assert event["ts"] >= 0, event
        if phase == "X":
            assert event["dur"] >= 0, event
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif phase in "be":
            key = (event["pid"], event["cat"], event["id2"]["local"])
            asynchronous.append((event["ts"], key, phase, event["name"]))
        else:
            assert phase == "i" and event["s"] in "tpg", event
    open_spans: dict[Any, list[str]] = defaultdict(list)
    # Viewers sort by time and keep the order of the file.
    for _, key, phase, name in sorted(asynchronous, key=lambda event: event[0]):
        if phase == "b":
            open_spans[key].append(name)
        else:
            assert open_spans[key] and open_spans[key].pop() == name, (key, name)
    assert not any(open_spans.values()), "spans that never end"
    for lane, spans in lanes.items():
        spans.sort()
        for (_, end), (begin, _) in zip(spans, spans[1:]):
            # Runs of one queue follow each other; a microsecond is the rounding of both.
            assert begin >= end - 0.002, (lane, end, begin)
    return phases
