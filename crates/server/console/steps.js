// The slowest steps of a model, measured when they are asked for.

import { postJson } from "./api.js";
import { el, number, percent, show, time } from "./dom.js";

/** Steps that are listed. */
const LISTED = 20;

const head = (text, numeric) => el("th", { scope: "col", class: numeric ? "number" : null }, text);

/** The share of the machine's limit, where the device knows it. */
const limitText = (step) =>
  step.share_of_limit === null ? "not known" : `${percent(step.share_of_limit)} (${step.bound})`;

function table(report) {
  const known = report.steps.some((step) => step.share_of_limit !== null);
  const row = (step) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, step.name || "without a name"),
      el("td", {}, step.op),
      el("td", { class: "number" }, time(step.us * 1e3)),
      el("td", { class: "number" }, percent(step.share)),
      known ? el("td", { class: "number" }, limitText(step)) : null,
    );
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Slowest steps" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          head("Step"),
          head("Operator"),
          head("Time", true),
          head("Share", true),
          known ? head("Of the limit", true) : null,
        ),
      ),
      el("tbody", {}, report.steps.slice(0, LISTED).map(row)),
    ),
  );
}

function summary(report) {
  const listed = Math.min(LISTED, report.steps.length);
  const which = listed < report.step_count ? `the slowest ${listed} of ` : "";
  const shapes = report.inputs.map((shape) => `[${shape.join(", ")}]`).join(", ");
  return (
    `${which}${number(report.step_count)} steps, ${time(report.total_us * 1e3)} in all on ` +
    `${report.device}; median of ${report.runs} runs with inputs ${shapes}`
  );
}

export class StepsPanel {
  constructor({ name }) {
    const status = el("p", { class: "note", role: "status" });
    const error = el("p", { class: "error", role: "alert" });
    const result = el("div");
    status.textContent =
      "The steps are timed with random inputs, as best effort: real time goes first.";
    const measure = el(
      "button",
      {
        onclick: async () => {
          measure.disabled = true;
          error.textContent = "";
          status.textContent = "Measuring";
          try {
            const report = await postJson(`/v2/atoll/models/${encodeURIComponent(name)}/steps`);
            status.textContent = summary(report);
            show(result, table(report));
          } catch (failure) {
            status.textContent = "";
            error.textContent = failure.message;
          } finally {
            measure.disabled = false;
          }
        },
      },
      "Measure",
    );
    this.node = el(
      "section",
      { class: "panel", "aria-label": `Slowest steps of ${name}` },
      el(
        "div",
        { class: "bar" },
        el("h2", {}, "Slowest steps"),
        el("div", { class: "end" }, measure),
      ),
      el("div", { class: "body" }, status, error),
      result,
    );
  }
}
