// The page Cluster: machines, who serves what, routes, and queries.

import { getJson, repeat } from "./api.js";
import { become, el, number, show, svg, time } from "./dom.js";

const STAGE_LETTERS = 16;

/** A name that fits into the box of a stage, without its middle. */
const short = (name) =>
  name.length > STAGE_LETTERS
    ? `${name.slice(0, STAGE_LETTERS / 2)}…${name.slice(1 - STAGE_LETTERS / 2)}`
    : name;

const [BOX_WIDTH, BOX_HEIGHT, STEP_X, STEP_Y] = [128, 40, 164, 52];

/** Stages as a graph: each to the right of those whose outputs it reads, with its budget. */
function graphOf(stages) {
  const columns = [];
  stages.forEach((stage) => {
    const before = (stage.after || []).map((index) => columns[index] ?? 0);
    columns.push(before.length ? Math.max(...before) + 1 : 0);
  });
  const taken = [];
  const places = columns.map((column) => {
    taken[column] = (taken[column] ?? -1) + 1;
    return { x: column * STEP_X + 1, y: taken[column] * STEP_Y + 4 };
  });
  const width = Math.max(0, ...places.map(({ x }) => x)) + BOX_WIDTH + 2;
  const height = Math.max(0, ...places.map(({ y }) => y)) + BOX_HEIGHT + 4;
  const words = stages.map(
    (stage) =>
      `${stage.name}: ${stage.model}` +
      (stage.after?.length ? ` after ${stage.after.map((at) => stages[at]?.name)}` : ""),
  );
  const line = (text, place, y, size) =>
    svg(
      "text",
      {
        x: place.x + BOX_WIDTH / 2,
        y: place.y + y,
        "text-anchor": "middle",
        "font-size": size,
        fill: "currentColor",
      },
      text,
    );
  const boxes = stages.map((stage, at) => {
    const budget = stage.budget_ms ? time(stage.budget_ms * 1e6) : "no budget yet";
    const many = stage.fan_out ? `, × ${number(stage.fan_out)}` : "";
    return svg(
      "g",
      {},
      svg("title", {}, words[at]),
      svg("rect", {
        x: places[at].x,
        y: places[at].y,
        width: BOX_WIDTH,
        height: BOX_HEIGHT,
        rx: 4,
        fill: "var(--rt-soft)",
        stroke: stage.ready === false ? "var(--bad)" : "var(--rt)",
      }),
      line(short(stage.model), places[at], 17, 12),
      line(budget + many, places[at], 33, 11),
    );
  });
  const edges = stages.flatMap((stage, at) =>
    (stage.after || [])
      .filter((from) => places[from])
      .map((from) => {
        const [x, y] = [places[from].x + BOX_WIDTH, places[from].y + BOX_HEIGHT / 2];
        const [toX, toY] = [places[at].x, places[at].y + BOX_HEIGHT / 2];
        const bend = (toX - x) / 2;
        return svg("path", {
          d:
            `M${x} ${y}C${x + bend} ${y} ${toX - bend} ${toY} ${toX - 1} ${toY}` +
            `m-6 -5l6 5l-6 5`,
          fill: "none",
          stroke: "currentColor",
        });
      }),
  );
  return svg(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `Stages: ${words.join("; ")}`,
    },
    edges,
    boxes,
  );
}

export class Cluster {
  title = "Cluster";
  #node = null;
  #stop = null;

  open(node) {
    this.#node = node;
    this.content = el("div", { class: "stack" });
    /** Why what is shown is old; goes when there is news. */
    this.lost = el("p", { class: "error", role: "status" });
    show(node, el("div", { class: "head" }, el("h1", {}, "Cluster")), this.lost, this.content);
    this.#stop = repeat(2000, () => this.#refresh());
  }

  close() {
    this.#stop();
    this.#node = null;
  }

  async #refresh() {
    try {
      const status = await getJson("/v2/atoll/cluster");
      if (!this.#node) return;
      if (!status) {
        // It does not become a frontend while it runs.
        this.#stop();
        this.#update([this.#none()]);
        return;
      }
      const queries = await getJson("/v2/atoll/queries");
      if (this.#node) this.#update(this.#parts(status, queries));
    } catch (error) {
      if (this.#node && this.lost.textContent !== error.message)
        this.lost.textContent = error.message;
    }
  }

  /** Shows `parts` in place of what is there, without touching what stays the same. */
  #update(parts) {
    if (this.lost.textContent) this.lost.textContent = "";
    become(this.content, el("div", { class: "stack" }, parts));
  }

  #none() {
    return el(
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
    );
  }

  #parts(status, queries) {
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
    const tag = (state) => {
      const kind = { serving: "good", ejected: "bad" }[state] || "plain";
      return el("span", { class: `tag ${kind}` }, state);
    };
    const words = (text) => el("div", { class: "words" }, text || "–");
    const lines = (texts) => (texts.length ? texts.map(words) : words());
    // Its own console; it may be out of a browser's reach.
    const link = (address) =>
      address
        ? el("a", { href: `${location.protocol}//${address}/`, rel: "noreferrer" }, address)
        : "–";
    const share = (value) =>
      value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
    return [
      el(
        "dl",
        { class: "figures" },
        figure("Backends", status.backends.length),
        figure("Frontends", status.frontends),
        figure("Models", status.models.length),
        figure("Plan", status.epoch === null ? "none" : `#${status.epoch}`),
        figure("Scheduler", status.leader || "none"),
      ),
      this.#plan(status),
      table(
        "Problems",
        ["What", "What to do"],
        status.problems.map((problem) => [words(problem.what), words(problem.advice)]),
        "Nothing is wrong.",
      ),
      table(
        "Backends",
        ["Backend", "State", "Why", "Address", "Device", "Serves", "In flight"],
        status.backends.map((backend) => [
          backend.name,
          tag(backend.state),
          lines(backend.reasons),
          backend.address,
          backend.device || "–",
          backend.models.join(", ") || "nothing",
          number(backend.in_flight),
        ]),
        "No backend has joined.",
      ),
      table(
        "Frontends",
        ["Frontend", "Console"],
        Object.entries(status.frontend_addresses).map(([name, address]) => [name, link(address)]),
        "No frontend has joined.",
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
      table(
        "Canaries",
        ["Model", "Version", "Beside", "State", "Share", "Backends", "Why"],
        status.canaries.map((canary) => {
          const model = status.models.find(({ name }) => name === canary.model);
          return [
            canary.model,
            canary.version,
            canary.in_force,
            canary.state.replace("_", " "),
            share(canary.share),
            model?.canary?.backends.join(", ") || "–",
            words(canary.why),
          ];
        }),
        "No model has a canary.",
      ),
      this.#queries(queries),
    ];
  }

  /** Why the plan was made, and what it needs and has. */
  #plan(status) {
    const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
    const planned = status.epoch !== null;
    return el(
      "section",
      { class: "panel", "aria-label": "Plan" },
      el("div", { class: "bar" }, el("h2", {}, "Plan")),
      el(
        "dl",
        { class: "body pairs" },
        pair("Made because", (planned && status.reason) || "–"),
        pair(
          "Backends",
          planned ? `${status.used} serve, at least ${number(status.bound)} are needed` : "–",
        ),
        pair("Capacity", status.scale ? `${number(status.scale)} times the load` : "–"),
      ),
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
          const graph = graphOf(query.stages || []);
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
