// The sweep of the page Plan: the same services at several factors, as a table and a picture.

import { postJson } from "./api.js";
import { el, number, show, svg } from "./dom.js";

const STEPS = 9;
const FIELDS = {
  rate_scale: { name: "Rates", values: factors(2), text: times },
  slo_scale: { name: "Objectives", values: factors(1), text: times },
  headroom: { name: "Headroom", values: shares(), text: (share) => `${(share * 100).toFixed(0)} %` },
};
const [WIDTH, HEIGHT, LEFT, BASE] = [560, 180, 44, 24];

/** Factors from a half, or a quarter, to its inverse, evenly spread as powers. */
function factors(octaves) {
  const power = (step) => octaves * ((2 * step) / (STEPS - 1) - 1);
  return Array.from({ length: STEPS }, (_, step) => 2 ** power(step));
}

function shares() {
  return Array.from({ length: STEPS }, (_, step) => step / (STEPS - 1));
}

function times(factor) {
  return `× ${factor.toFixed(2)}`;
}

export class Sweep {
  /** `request` returns what the page would ask for now. */
  constructor(request) {
    this.request = request;
    this.run = 0;
    this.field = el(
      "select",
      { "aria-label": "What is swept" },
      Object.entries(FIELDS).map(([field, { name }]) => el("option", { value: field }, name)),
    );
    this.body = el(
      "div",
      { class: "body", "aria-live": "polite" },
      el("p", { class: "dim" }, `Plans ${STEPS} times, from less to more, with all else as above.`),
    );
    const button = el("button", { onclick: () => this.start() }, "Sweep");
    this.node = el(
      "section",
      { class: "panel sweep", "aria-label": "Sweep" },
      el(
        "div",
        { class: "bar" },
        el("h2", {}, "Sweep"),
        el("div", { class: "end" }, this.field, " ", button),
      ),
      this.body,
    );
  }

  /** Ends a sweep under way. */
  stop() {
    this.run += 1;
  }

  async start() {
    this.run += 1;
    const current = this.run;
    const field = this.field.value;
    const [rows, request] = [[], this.request()];
    for (const value of FIELDS[field].values) {
      show(this.body, el("p", { class: "dim" }, `${rows.length} of ${STEPS} planned`));
      const row = { value };
      try {
        row.plan = await postJson("/v2/atoll/plan", { ...request, [field]: value });
      } catch (error) {
        row.error = error.message;
      }
      // A later sweep has its own answers.
      if (current !== this.run) return;
      rows.push(row);
    }
    const bars = el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Picture of the sweep" },
      picture(field, rows),
    );
    show(this.body, el("div", { class: "sides" }, bars, table(field, rows)));
  }
}

/** Whether a row has GPUs for all services. */
const whole = ({ plan }) => plan && plan.faults.length === 0;

function table(field, rows) {
  const { name, text } = FIELDS[field];
  const line = (row) => {
    const why = row.error || row.plan?.faults.join("; ");
    const figures = whole(row)
      ? [row.plan.gpus, row.plan.lower_bound, row.plan.gpus - row.plan.lower_bound]
      : ["–", "–", "–"];
    return el(
      "tr",
      { title: why },
      el("th", { scope: "row" }, text(row.value)),
      figures.map((figure) => el("td", { class: "number" }, figure)),
    );
  };
  const faulty = rows.find((row) => !whole(row));
  const why = faulty && `${text(faulty.value)}: ${faulty.error || faulty.plan.faults[0]}`;
  return el(
    "div",
    {},
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, name),
          ["GPUs", "At least", "Above"].map((title) =>
            el("th", { scope: "col", class: "number" }, title),
          ),
        ),
      ),
      el("tbody", {}, rows.map(line)),
    ),
    why ? el("p", { class: "dim" }, why) : null,
  );
}

/** GPUs as bars, and the bound as a line in each. */
function picture(field, rows) {
  const { name, text } = FIELDS[field];
  const good = rows.filter(whole);
  const most = Math.max(1, ...good.map(({ plan }) => plan.gpus));
  const step = (WIDTH - LEFT) / rows.length;
  const height = (gpus) => ((HEIGHT - BASE - 16) * gpus) / most;
  const said = good.map(({ value, plan }) => `${text(value)}: ${plan.gpus}`).join(", ");
  const label = (x, y, anchor, words) =>
    svg("text", { x, y, "text-anchor": anchor, "font-size": 11, fill: "currentColor" }, words);
  const bar = (row, index) => {
    const x = LEFT + index * step;
    const middle = x + step / 2;
    const foot = label(middle, HEIGHT - 6, "middle", text(row.value));
    if (!whole(row)) return [foot, label(middle, HEIGHT - BASE - 4, "middle", "none")];
    const { gpus, bound } = row.plan;
    const [top, least] = [height(gpus), HEIGHT - BASE - height(bound)];
    return [
      svg("rect", { x: x + 4, y: HEIGHT - BASE - top, width: step - 8, height: top, rx: 2 }),
      svg("line", { x1: x + 4, x2: x + step - 4, y1: least, y2: least }),
      label(middle, HEIGHT - BASE - top - 4, "middle", number(gpus)),
      foot,
    ];
  };
  return svg(
    "svg",
    {
      class: "bars",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `GPUs by ${name.toLowerCase()}: ${said}. The line in a bar is the bound.`,
    },
    label(0, HEIGHT - BASE, "start", "GPUs"),
    rows.flatMap(bar),
  );
}
