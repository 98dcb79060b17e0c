// The way of a request: what it did when, and why it took as long as it did.

import { el, time } from "./dom.js";

/** The explanation of the server as elements; `look(from, to)` shows a range of the timeline. */
export function wayOf(why, look) {
  const fills = {
    staging: "fill-6",
    load: "fill-load",
    leaving: "fill-cut",
    "behind real time": "fill-rt",
    "behind best effort": "fill-be",
    waiting: "fill-dim",
    computing: "fill-good",
    reply: "fill-7",
  };
  const bar = el(
    "div",
    {
      class: "meter tall",
      role: "img",
      "aria-label": why.parts.map((part) => `${time(part.ns)} ${part.text}`).join(", "),
    },
    why.parts.map((part) => {
      const piece = el("i", { class: fills[part.kind], title: part.text });
      piece.style.width = `${(part.ns / Math.max(why.total_ns, 1)) * 100}%`;
      return piece;
    }),
  );
  const at = (ns) => el("span", { class: "at" }, `+${time(ns - why.arrived_ns)}`);
  const steps = [[why.arrived_ns, "arrived"]];
  if (why.staged_ns > why.arrived_ns) steps.push([why.staged_ns, "inputs staged, admitted"]);
  if (why.members.length) {
    const others = why.members.slice(0, 12).map((other) => `#${other}`);
    if (why.members.length > others.length) others.push("…");
    const text = `batched with ${why.members.length} other`;
    steps.push([why.runs[0]?.began_ns ?? why.started_ns, `${text}: ${others.join(", ")}`]);
  }
  for (const other of why.preempted)
    steps.push([
      why.staged_ns,
      `preempted job ${other.job}${other.model ? ` of ${other.model}` : ""}`,
    ]);
  why.runs.forEach((run, index) => {
    steps.push([
      run.began_ns,
      `${index ? "resumed" : "started"} on queue ${run.queue}, ` +
        `step ${run.steps[0]} of ${run.steps[2]}`,
    ]);
    if (run.preempt_requested_ns)
      steps.push([
        run.preempt_requested_ns,
        `asked to leave${run.preempted_for ? ` for ${run.preempted_for}` : ""}`,
      ]);
    if (run.end === "preempted")
      steps.push([
        run.ended_ns,
        `left the device after ${time(run.ended_ns - run.preempt_requested_ns)}, ` +
          `before step ${run.steps[1]}`,
      ]);
    else steps.push([run.ended_ns, run.end === "done" ? "finished" : "failed"]);
  });
  steps.push([why.answered_ns, why.end === "done" ? "answered" : `answered: ${why.end}`]);
  steps.sort((a, b) => a[0] - b[0]);
  return [
    el("p", { class: "why" }, why.sentence),
    bar,
    el(
      "ul",
      { class: "legend" },
      why.parts.map((part) =>
        el("li", {}, el("i", { class: fills[part.kind] }), `${time(part.ns)} ${part.text}`),
      ),
    ),
    el("h3", {}, "Its way"),
    el(
      "ol",
      { class: "way", tabindex: 0, "aria-label": "Its way" },
      steps.map(([when, text]) => el("li", {}, at(when), el("span", {}, text))),
    ),
    el(
      "div",
      { class: "head" },
      el("button", { onclick: () => look(why.arrived_ns, why.answered_ns) }, "Show it"),
    ),
  ];
}
