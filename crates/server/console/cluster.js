// The page Cluster: machines, who serves what, routes, and queries.

import { getJson } from "./api.js";
import { el, number, show, svg, time } from "./dom.js";

export class Cluster {
  title = "Cluster";
  #node = null;
  #timer = 0;

  open(node) {
    this.#node = node;
    this.key = null;
    this.content = el("div", { class: "grid" });
    show(node, el("div", { class: "head" }, el("h1", {}, "Cluster")), this.content);
    this.#refresh();
    this.#timer = setInterval(() => this.#refresh(), 2000);
  }

  close() {
    clearInterval(this.#timer);
    this.#node = null;
  }

  async #refresh() {
    try {
      const status = await getJson("/v2/atoll/cluster");
      if (!this.#node) return;
      if (!status) {
        // It does not become a frontend while it runs.
        clearInterval(this.#timer);
        this.#none();
        return;
      }
      const queries = await getJson("/v2/atoll/queries");
      if (this.#node) this.#show(status, queries);
    } catch (error) {
      if (!this.#node) return;
      show(this.content, el("p", { class: "error", role: "alert" }, error.message));
    }
  }

  #none() {
    show(
      this.content,
      el(
        "section",
        { class: "panel" },
        el(
          "div",
          { class: "body" },
          el("p", {}, "This server is not part of a cluster."),
          el(
            "p",
            { class: "note" },
            "A cluster on one machine, with scheduler, frontend and backend in one process:",
          ),
          el("pre", { tabindex: 0 }, "atoll serve --cluster --model-repository models"),
          el(
            "p",
            { class: "note" },
            "Several machines: atoll cluster scheduler, atoll cluster frontend and atoll cluster " +
              "backend, with etcd between them. Open the console of the frontend.",
          ),
        ),
      ),
    );
  }

  #show(status, queries) {
    const key = JSON.stringify([status, queries]);
    if (key === this.key) return;
    this.key = key;
    const figure = (name, value, unit) =>
      el(
        "div",
        { class: "figure" },
        el("dt", {}, name),
        el("dd", {}, value, " ", unit ? el("small", {}, unit) : null),
      );
    const table = (title, header, rows, nothing) =>
      el(
        "section",
        { class: "panel", "aria-label": title },
        el("div", { class: "bar" }, el("h2", {}, title)),
        rows.length
          ? el(
              "div",
              { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
              el(
                "table",
                {},
                el(
                  "thead",
                  {},
                  el(
                    "tr",
                    {},
                    header.map((text) => el("th", { scope: "col" }, text)),
                  ),
                ),
                el(
                  "tbody",
                  {},
                  rows.map((cells) =>
                    el(
                      "tr",
                      {},
                      cells.map((cell, at) =>
                        at === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell),
                      ),
                    ),
                  ),
                ),
              ),
            )
          : el("p", { class: "empty" }, nothing),
      );
    const share = (value) =>
      value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
    show(
      this.content,
      el(
        "dl",
        { class: "figures" },
        figure("Backends", status.backends.length),
        figure("Models", status.models.length),
        figure("Plan", status.epoch === null ? "none" : `#${status.epoch}`),
        figure("Scheduler", status.leader || "none"),
      ),
      table(
        "Backends",
        ["Backend", "Address", "Device", "Serves", "In flight"],
        status.backends.map((backend) => [
          backend.name,
          backend.address,
          backend.device || "–",
          backend.models.join(", ") || "nothing",
          number(backend.in_flight),
        ]),
        "No backend has joined.",
      ),
      table(
        "Routes",
        ["Model", "Backends and their share", "Objective"],
        status.models.map((model) => [
          model.name,
          model.routes.map((route) => `${route.backend} ${share(route.share)}`).join(", ") ||
            "none",
          model.slo_ms ? `${model.slo_ms} ms` : "–",
        ]),
        "No model is routed.",
      ),
      this.#queries(queries),
    );
  }

  #queries(queries) {
    if (!queries.length) return null;
    return el(
      "section",
      { class: "panel", "aria-label": "Queries" },
      el("div", { class: "bar" }, el("h2", {}, "Queries")),
      el(
        "div",
        { class: "body" },
        queries.map((query) => {
          const stages = query.stages || [];
          const width = Math.max(stages.length * 150, 150);
          const graph = svg(
            "svg",
            {
              width,
              height: 54,
              viewBox: `0 0 ${width} 54`,
              role: "img",
              "aria-label": `Stages: ${stages.map((stage) => stage.model).join(", ")}`,
            },
            stages.map((stage, at) => [
              svg("rect", {
                x: at * 150 + 1,
                y: 8,
                width: 118,
                height: 38,
                rx: 4,
                fill: "var(--rt-soft)",
                stroke: "var(--rt)",
              }),
              svg(
                "text",
                {
                  x: at * 150 + 60,
                  y: 25,
                  "text-anchor": "middle",
                  "font-size": 12,
                  fill: "currentColor",
                },
                stage.model,
              ),
              svg(
                "text",
                {
                  x: at * 150 + 60,
                  y: 40,
                  "text-anchor": "middle",
                  "font-size": 11,
                  fill: "currentColor",
                },
                stage.budget_ms ? time(stage.budget_ms * 1e6) : "",
              ),
              at < stages.length - 1
                ? svg("path", {
                    d: `M${at * 150 + 120} 27h26m-6 -5l6 5l-6 5`,
                    fill: "none",
                    stroke: "currentColor",
                  })
                : null,
            ]),
          );
          return el(
            "div",
            {},
            el("h3", {}, query.name, query.slo_ms ? ` (${query.slo_ms} ms)` : ""),
            el(
              "div",
              {
                class: "scroll",
                tabindex: 0,
                role: "region",
                "aria-label": `Stages of ${query.name}`,
              },
              graph,
            ),
          );
        }),
      ),
    );
  }
}
