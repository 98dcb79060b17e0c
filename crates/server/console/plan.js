// The page Plan: services and profiles in; slices, bound and commands out.

import { postJson } from "./api.js";
import { el, number, show, svg } from "./dom.js";
import { Sweep } from "./sweep.js";

const SERVICES = `[[service]]
name = "photos"
model = "resnet50"
rate = 2000
slo_ms = 100

[[service]]
name = "search"
model = "bert"
rate = 900
slo_ms = 60

[[service]]
name = "speech"
model = "conformer"
rate = 120
slo_ms = 250
`;
// The shape of measured profiles; atoll profile writes real ones.
const PROFILES = `model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms
resnet50,1,8,1,420,19
resnet50,1,16,1,560,29
resnet50,2,16,2,1150,28
resnet50,3,32,2,1750,37
resnet50,4,32,2,2280,28
resnet50,7,64,3,3900,49
bert,1,4,1,150,27
bert,2,8,1,330,24
bert,3,16,1,520,31
bert,4,16,2,700,46
bert,7,32,2,1250,51
conformer,1,2,1,22,91
conformer,2,4,1,49,82
conformer,3,8,1,78,103
conformer,4,8,1,104,77
conformer,7,16,2,190,168
`;
const KINDS = [
  "a30-24gb",
  "a100-40gb",
  "a100-80gb",
  "h100-80gb",
  "h200-141gb",
  "gh200-96gb",
  "gh200-144gb",
  "b200-180gb",
  "l4-24gb",
  "a10-24gb",
  "l40s-48gb",
  "rtx-4090-24gb",
  "rtx-5090-32gb",
];
const COLOURS = [
  "#2f66b3",
  "#207562",
  "#7a48b8",
  "#9c5230",
  "#55721f",
  "#a03a6c",
  "#456d89",
  "#7a670f",
];
const PAUSE_MS = 250;

/** Eighths of a GPU's memory that a slice takes: 3 of 7 compute slices have half of it. */
function places(slice) {
  if (!/^\d+g/.test(slice.profile)) return slice.size;
  return { 3: 4, 7: 8 }[slice.size] || slice.size;
}

const rates = (slice) =>
  slice.services.map((service) => `${service.name}, ${number(service.rate)}/s`).join("; ");

function batches(slice) {
  const one = ({ name, batch, processes, rate }) =>
    `${name} (batch ${batch} × ${processes}, ${number(rate)}/s)`;
  return slice.services.map(one).join(", ");
}

export class Plan {
  title = "Plan";
  #node = null;
  #timer = 0;
  #number = 0;
  #inputs = { services: SERVICES, profiles: PROFILES, gpu: "a100-80gb" };

  open(node) {
    this.#node = node;
    const later = () => this.#later();
    this.services = el("textarea", {
      rows: 12,
      spellcheck: "false",
      oninput: later,
      value: this.#inputs.services,
    });
    this.profiles = el("textarea", {
      rows: 12,
      spellcheck: "false",
      oninput: later,
      value: this.#inputs.profiles,
    });
    this.gpu = el(
      "select",
      { onchange: later },
      KINDS.map((kind) => el("option", { value: kind, selected: kind === this.#inputs.gpu }, kind)),
    );
    const slider = (name, min, max, value, step, text) => {
      const output = el("output", {}, text(value));
      const input = el("input", {
        type: "range",
        min,
        max,
        step,
        value,
        oninput: () => {
          output.textContent = text(Number(input.value));
          later();
        },
      });
      return { input, label: el("label", {}, el("span", {}, name, " ", output), input) };
    };
    const times = (power) => `× ${(2 ** power).toFixed(2)}`;
    this.rate = slider("Rates", -4, 4, 0, 0.1, times);
    this.slo = slider("Objectives", -2, 2, 0, 0.1, times);
    this.headroom = slider("Headroom", 0, 100, 0, 5, (n) => `${n} %`);
    this.share = el("input", { type: "checkbox", onchange: later });
    this.foreign = el("input", { type: "checkbox", onchange: later });
    this.error = el("p", { class: "error", role: "alert" });
    this.summary = el("dl", { class: "figures" });
    this.picture = el("div", { class: "body" });
    this.sweep = new Sweep(() => this.#request());
    this.commands = el("pre", { tabindex: 0, role: "region", "aria-label": "Commands" });
    const copy = el(
      "button",
      { onclick: () => navigator.clipboard?.writeText(this.commands.textContent) },
      "Copy",
    );
    show(
      node,
      el(
        "div",
        { class: "head" },
        el("h1", {}, "Plan"),
        el(
          "p",
          { class: "dim" },
          "The fewest GPUs for given services, with a proof of how few suffice.",
        ),
      ),
      el(
        "section",
        { class: "panel", "aria-label": "What if" },
        el("div", { class: "bar" }, el("h2", {}, "What if")),
        el(
          "div",
          { class: "body" },
          el(
            "div",
            { class: "fields" },
            el("label", {}, "GPU", this.gpu),
            this.rate.label,
            this.slo.label,
            this.headroom.label,
            el("label", { class: "check" }, this.share, "services may take turns on a slice"),
            el("label", { class: "check" }, this.foreign, "use profiles of another GPU"),
          ),
        ),
      ),
      this.error,
      this.summary,
      el(
        "section",
        { class: "panel", "aria-label": "GPUs" },
        el("div", { class: "bar" }, el("h2", {}, "GPUs and their slices")),
        this.picture,
      ),
      this.sweep.node,
      el(
        "div",
        { class: "grid" },
        el(
          "section",
          { class: "panel" },
          el("div", { class: "bar" }, el("h2", {}, "Services")),
          el(
            "div",
            { class: "body" },
            el("label", {}, "TOML, as for atoll plan --services", this.services),
          ),
        ),
        el(
          "section",
          { class: "panel" },
          el("div", { class: "bar" }, el("h2", {}, "Profiles")),
          el(
            "div",
            { class: "body" },
            el(
              "label",
              {},
              "CSV or JSON, as atoll profile writes it; an example is given",
              this.profiles,
            ),
          ),
        ),
        el(
          "section",
          { class: "panel" },
          el("div", { class: "bar" }, el("h2", {}, "Commands"), el("div", { class: "end" }, copy)),
          el("div", { class: "body" }, this.commands),
        ),
      ),
    );
    this.#plan();
  }

  close() {
    clearTimeout(this.#timer);
    this.sweep.stop();
    this.#inputs = {
      services: this.services.value,
      profiles: this.profiles.value,
      gpu: this.gpu.value,
    };
    this.#node = null;
  }

  #later() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#plan(), PAUSE_MS);
  }

  /** What the fields ask for. */
  #request() {
    return {
      services: this.services.value,
      profiles: this.profiles.value,
      gpu: this.gpu.value,
      rate_scale: 2 ** Number(this.rate.input.value),
      slo_scale: 2 ** Number(this.slo.input.value),
      headroom: Number(this.headroom.input.value) / 100,
      share_time: this.share.checked,
      foreign_profiles: this.foreign.checked,
    };
  }

  async #plan() {
    this.#number += 1;
    const current = this.#number;
    try {
      const plan = await postJson("/v2/atoll/plan", this.#request());
      // A later change has its own answer.
      if (current !== this.#number || !this.#node) return;
      this.error.textContent = plan.faults.join("\n");
      this.#show(plan);
    } catch (error) {
      if (current !== this.#number || !this.#node) return;
      this.error.textContent = error.message;
      show(this.summary);
      show(this.picture);
      this.commands.textContent = "";
    }
  }

  #show(plan) {
    const figure = (name, value, unit) =>
      el(
        "div",
        { class: "figure" },
        el("dt", {}, name),
        el("dd", {}, value, " ", el("small", {}, unit || "")),
      );
    const gap = plan.gpus - plan.lower_bound;
    show(
      this.summary,
      figure("GPUs", plan.gpus, plan.gpu_kind),
      figure("At least needed", plan.lower_bound, `bound ${plan.bound.toFixed(3)}`),
      figure(
        "Proof",
        gap === 0 ? "best" : `${gap} above`,
        gap === 0 ? "no plan uses fewer" : "the bound",
      ),
      figure("Search", number(plan.seconds * 1e3), plan.stopped ? "ms, stopped early" : "ms"),
    );
    const names = [
      ...new Set(
        plan.plan.flatMap((gpu) =>
          gpu.slices.flatMap((slice) => slice.services.map((service) => service.name)),
        ),
      ),
    ].sort();
    const colour = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
    const shown = plan.plan.slice(0, 60);
    show(
      this.picture,
      el(
        "div",
        { class: "gpus" },
        shown.map((gpu, index) => this.#gpu(gpu, index, colour)),
      ),
      plan.plan.length > shown.length
        ? el("p", { class: "dim" }, `and ${plan.plan.length - shown.length} more`)
        : null,
      el(
        "ul",
        { class: "legend" },
        names.map((name) => {
          const box = el("i");
          box.style.background = colour(name);
          return el("li", {}, box, name);
        }),
      ),
    );
    this.commands.textContent = plan.commands || "";
  }

  #gpu(gpu, index, colour) {
    const most = 8;
    const unit = 400 / most;
    const texts = gpu.slices.map((slice) => `${slice.profile || slice.size}: ${rates(slice)}`);
    const node = svg(
      "svg",
      {
        viewBox: "0 0 400 74",
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": texts.join(". "),
      },
      svg("rect", { x: 0, y: 0, width: 400, height: 74, fill: "var(--line-soft)" }),
    );
    for (const slice of gpu.slices) {
      const next = Math.min(
        most,
        ...gpu.slices.map((other) => other.start).filter((start) => start > slice.start),
      );
      const [x, width] = [
        slice.start * unit + 1,
        Math.min(places(slice), next - slice.start) * unit - 2,
      ];
      const height = 74 / Math.max(slice.services.length, 1);
      slice.services.forEach((service, at) => {
        node.append(
          svg("rect", {
            x,
            y: at * height + 1,
            width,
            height: height - 2,
            fill: colour(service.name),
            rx: 2,
          }),
        );
      });
    }
    const words = el(
      "div",
      { class: "legend" },
      gpu.slices.map((slice) =>
        el("span", {}, `${slice.profile || `${slice.size}/8`}: ${batches(slice)}`),
      ),
    );
    return el("div", { class: "gpu" }, el("h3", {}, `GPU ${index}`), node, words);
  }
}
